"""SIGKILL at every system call of a save, a deletion, gc, a resume, `cp`, `rm`, `thin`: a script.

    python tests/crash/syscalls.py FOLDER --scenario later_save --calls all --stride 1

A warm parent forks a child for each point, follows all of its threads with ptrace(2) and kills
it when one thread is about to make its n-th call; that call is not made any more. Points are
(thread, n), threads in the order of their creation, so that they mean the same in every run.
`--calls changing` stops only at calls that can change what is in the store or tell somebody:
between two of these a kill at any other call leaves the same bytes behind. A scenario that is a way
to save (tests/ways.py, which PYTHONPATH must have) is a later save that goes it.

Prints one JSON line; exit status 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shutil
import signal
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import conversions
import storm
import torch

from holdfast.cli.cp import copy_all
from holdfast.cli.rm import rm, thin
from holdfast.errors import NoCheckpoint
from holdfast.format import layout
from holdfast.maintenance.gc import collect_garbage
from holdfast.manager import CheckpointManager
from holdfast.ownership import deletion
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.threads.workers import Workers
from holdfast.version import environment
from runs import begun
from ways import PLAIN, WAYS, Tiny, Trained, Way, save_and_go_on

NUM_ELEMENTS = 256
MAX_LIVES = 25
NO_PTRACE = 77
"""Exit status where processes may not be traced."""
WENT = b"went\n"
"""Tells that a save went its way."""
Point = tuple[int, int]
Act = Callable[[], object]

# <sys/ptrace.h> and <linux/wait.h>.
_SEIZE, _INTERRUPT, _CONTINUE_TO_CALL, _CALL_INFO = 0x4206, 0x4207, 24, 0x420E
_OPTIONS = 0x1 | 0x8 | 1 << 20  # TRACESYSGOOD, TRACECLONE, EXITKILL
_CALL_STOP = signal.SIGTRAP | 0x80
_EVENT_CLONE, _EVENT_STOP = 3, 128
_WAIT_ALL = 0x40000000
_ENTRY = 1

# Numbers from <asm/unistd.h>, by AUDIT_ARCH_*: what writes, names, removes or syncs files.
_OPENAT = {0xC000003E: 257, 0xC00000B7: 56}
_CHANGING = {
    0xC000003E: {1, 18, 20, 74, 75, 76, 77, 82, 83, 84, 85, 86, 87, 88, 91, 258, 263, 264}
    | {265, 266, 285, 296, 316, 328},
    0xC00000B7: {34, 35, 36, 37, 38, 45, 46, 47, 52, 64, 66, 68, 70, 82, 83, 276, 287},
}
_CREATES = os.O_CREAT | 0o20000000  # with __O_TMPFILE


class Calls:
    """ptrace(2) by way of the C library; Linux only."""

    def __init__(self) -> None:
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace.restype = ctypes.c_long
        self._info = ctypes.create_string_buffer(96)

    def __call__(self, request: int, thread: int, data: int = 0) -> None:
        """Raises `OSError`, unless the thread was killed meanwhile."""
        if self._ptrace(request, thread, None, data) < 0:
            self._expect_killed(f"ptrace request {request:#x}")

    def entered(self, thread: int) -> tuple[int, int, int] | None:
        """Architecture, number and third argument of the call that is about to be made."""
        size = len(self._info)
        address = ctypes.addressof(self._info)
        if self._ptrace(_CALL_INFO, thread, size, address) < 0:
            self._expect_killed("PTRACE_GET_SYSCALL_INFO (Linux 5.3)")
            return None
        if self._info.raw[0] != _ENTRY:
            return None
        arch, number, third = struct.unpack_from("=4xI16xQ16xQ", self._info.raw)
        return arch, number, third

    def _expect_killed(self, what: str) -> None:
        number = ctypes.get_errno()
        if number != errno.ESRCH:
            raise OSError(number, f"{what}: {os.strerror(number)}")


def is_changing(call: tuple[int, int, int]) -> bool:
    """Whether a call can change a file or tell somebody; of an unknown machine, every call."""
    arch, number, flags = call
    if arch not in _CHANGING:
        return True
    return number in _CHANGING[arch] or (number == _OPENAT[arch] and bool(flags & _CREATES))


@dataclass
class Life:
    """What was seen of a child: its points in order, whether it was killed, its exit status."""

    points: list[Point] = field(default_factory=list)
    killed: bool = False
    status: int = 0


class Tracer:
    """Follows one child and its threads from call to call."""

    def __init__(self, pid: int, *, only_changing: bool) -> None:
        self._pid = pid
        self._only_changing = only_changing
        self._calls = Calls()
        self._threads: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self.life = Life()

    def attach(self) -> None:
        """Follow every thread that there is; later ones follow by themselves."""
        for name in sorted(os.listdir(f"/proc/{self._pid}/task"), key=int):
            self._calls(_SEIZE, int(name), _OPTIONS)
            self._calls(_INTERRUPT, int(name))
            self._number(int(name))

    def follow(self, kill_at: Point | None) -> Life:
        """Let it run to its end, or to the point."""
        while True:
            thread, status = os.waitpid(-1, _WAIT_ALL)
            if os.WIFSTOPPED(status):
                self._stopped(thread, os.WSTOPSIG(status), status >> 16, kill_at)
            elif thread == self._pid:
                self.life.status = os.waitstatus_to_exitcode(status)
                return self.life

    def _stopped(self, thread: int, number: int, event: int, kill_at: Point | None) -> None:
        self._number(thread)
        deliver = 0
        if number == _CALL_STOP:
            if self._at_call(thread) == kill_at is not None:
                self.life.killed = True
                os.kill(self._pid, signal.SIGKILL)
                return
        elif event not in (_EVENT_CLONE, _EVENT_STOP):
            deliver = number
        self._calls(_CONTINUE_TO_CALL, thread, deliver)

    def _at_call(self, thread: int) -> Point | None:
        call = self._calls.entered(thread)
        if call is None or (self._only_changing and not is_changing(call)):
            return None
        number = self._threads[thread]
        self._counts[number] += 1
        point = (number, self._counts[number])
        self.life.points.append(point)
        return point

    def _number(self, thread: int) -> None:
        self._threads.setdefault(thread, len(self._threads))


def save_next(manager: CheckpointManager, state: Tiny, told: int) -> None:
    """Save the next step and go on; tells it."""
    saved = save_and_go_on(manager, state, state.step() + 1)
    os.write(told, f"{saved.step}\n".encode())
    manager.wait()


def first_beat() -> threading.Event:
    """Set when the heartbeat of a claim is written: then its thread makes no more such calls."""
    written = threading.Event()
    real = LocalStore.put

    def put(self: LocalStore, key: str, data: Any, *, if_absent: bool = False) -> None:
        real(self, key, data, if_absent=if_absent)
        if key.endswith(".alive.json"):
            written.set()

    LocalStore.put = put  # type: ignore[method-assign]
    return written


def first_save(way: Way, root: Path, told: int) -> Act:
    """A new root, with preflight, claim and close."""
    state = way.new_state()
    manager = way.manager(root, state)

    def act() -> None:
        save_next(manager, state, told)
        manager.close()

    return act


def later_save(way: Way, root: Path, told: int) -> Act:
    """A save after which retention deletes an earlier one, and close."""
    beat = first_beat()
    way.have_noted(setattr, lambda: os.write(told, WENT))
    state = way.new_state()
    manager = way.manager(root, state)
    manager.resume()
    manager.wait()
    beat.wait()
    for _ in range(way.num_before):
        save_next(manager, state, told)

    def act() -> None:
        save_next(manager, state, told)
        manager.close()

    return act


def gc(way: Way, root: Path, told: int) -> Act:
    """The removal of everything that a killed writer left."""
    return lambda: collect_garbage(LocalStore(root))


def resume(way: Way, root: Path, told: int) -> Act:
    """Resume from what a killed writer left, with the removal of the rest, and close."""
    state = way.new_state()
    manager = way.manager(root, state)

    def act() -> None:
        manager.resume()
        manager.wait()
        manager.close()

    return act


def one_checkpoint(way: Way, root: Path) -> None:
    """Make a root with one checkpoint."""
    state = way.new_state()
    with way.manager(root, state) as manager:
        save_next(manager, state, os.open(os.devnull, os.O_WRONLY))


def leftovers(way: Way, root: Path) -> None:
    """Leave an attempt, a scratch folder and a deletion that has only its tombstone; die."""
    one_checkpoint(way, root)
    state = way.new_state()
    manager = way.manager(root, state)
    manager.resume()
    manager.wait()
    store = LocalStore(root)
    attempt = begun(store, label="left", epoch=2, sequence=7)
    store.put(f"{attempt.folder}/{layout.INDEX}", b'{"holdfast":1')
    scratch = layout.scratch_folder(b"leftover")
    store.make_folder(scratch)
    store.put(f"{scratch}/file", b"probe")
    deletion.remove_files = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    save_next(manager, state, os.open(os.devnull, os.O_WRONLY))
    raise AssertionError("retention was to kill this process")


def three_checkpoints(way: Way, root: Path) -> None:
    """Make a root with three checkpoints, of steps 1 to 3, each of two components."""
    state = way.new_state()
    components = {**state.components, "extra": {"x": torch.zeros(NUM_ELEMENTS)}}
    with CheckpointManager(root, components, sinks=()) as manager:
        for step in (1, 2, 3):
            state.become(step)
            manager.save(step).wait()


SURE = {"reason": "test", "even_latest": True, "even_pinned": False, "dry_run": False, "yes": True}


def cp_once(root: Path) -> None:
    """Copy the checkpoints of steps 1 and 3 to the root `copy` beside this one."""
    sources = [f"{root}@step=1", f"{root}@step=3"]
    copy_all(sources, str(root.with_name("copy")), whole=False, dry_run=False)


def cp(way: Way, root: Path, told: int) -> Act:
    """`holdfast cp` to a new root."""
    shutil.rmtree(root.with_name("copy"), ignore_errors=True)
    return lambda: cp_once(root)


def cp_again(root: Path) -> None:
    """What was copied is whole; the same command copies the rest, and training goes on there."""
    copy = LocalStore(root.with_name("copy"))
    storm.expect_whole(copy, storm.survey(copy))
    cp_once(root)
    copies = storm.survey(copy)
    assert [entry.step for entry in copies] == [3, 1], copies
    storm.expect_whole(copy, copies)
    assert Catalog(copy).find_checkpoint().step == 3
    collect_garbage(copy)
    storm.expect_no_junk(copy, copy.url)


def rm_middle(way: Way, root: Path, told: int) -> Act:
    """`holdfast rm` of a checkpoint that is not the latest."""
    return lambda: rm(f"{root}@step=2", **SURE)


def rm_latest(way: Way, root: Path, told: int) -> Act:
    """`holdfast rm` of the latest checkpoint."""
    return lambda: rm(f"{root}@step=3", **SURE)


def rm_again(step: int, left: list[int]) -> Callable[[Path], None]:
    """The same command ends what was begun, or says that there is nothing."""

    def again(root: Path) -> None:
        try:
            rm(f"{root}@step={step}", **SURE)
        except NoCheckpoint:
            assert step not in {entry.step for entry in storm.survey(LocalStore(root))}
        assert [entry.step for entry in storm.survey(LocalStore(root))] == left
        assert Catalog(LocalStore(root)).find_checkpoint().step == left[0]

    return again


def thin_old(way: Way, root: Path, told: int) -> Act:
    """`holdfast thin` of a checkpoint that is not the latest."""
    return lambda: thin(f"{root}@step=1", ["extra"], **SURE)


def thin_again(root: Path) -> None:
    """The same command drops the component, and nothing else."""
    thin(f"{root}@step=1", ["extra"], **SURE)
    store = LocalStore(root)
    entry = storm.survey(store)[-1]
    assert entry.marks.thinned == ("extra",)
    names = set(store.children(entry.folder))
    gone = set(entry.manifest.components["extra"].files)
    assert set(entry.manifest.files) - names == gone


SMALL = replace(PLAIN, num_elements=NUM_ELEMENTS)


@dataclass(frozen=True)
class Scenario:
    """What is there before (its newest step is `before`), and what the child does."""

    act: Callable[[Way, Path, int], Act]
    prepare: Callable[[Way, Path], None] | None
    before: int
    way: Way = SMALL
    again: Callable[[Path], None] | None = None
    """Gives the same command once more after the kill, and checks what it left."""
    check: Callable[[Path, int], None] | None = None
    """Checks the root instead, given the newest step that was told."""


SCENARIOS = {
    "first_save": Scenario(first_save, None, 0),
    "later_save": Scenario(later_save, one_checkpoint, 1),
    "gc": Scenario(gc, leftovers, 2),
    "resume": Scenario(resume, leftovers, 2),
    "cp": Scenario(cp, three_checkpoints, 3, again=cp_again),
    "rm": Scenario(rm_middle, three_checkpoints, 3, again=rm_again(2, [3, 1])),
    "rm_latest": Scenario(rm_latest, three_checkpoints, 2, again=rm_again(3, [2, 1])),
    "thin": Scenario(thin_old, three_checkpoints, 3, again=thin_again),
    "import": Scenario(
        conversions.importing, conversions.a_file, 1, check=conversions.check_import
    ),
    "export": Scenario(
        conversions.exporting, conversions.a_file, 1, check=conversions.check_export
    ),
    **{name: Scenario(later_save, one_checkpoint, 1, way) for name, way in WAYS.items()},
}


def files_first() -> None:
    """Mutant: a deletion removes files while the manifest still says that they are there."""
    deletion._put_tombstone = lambda *_: None


MUTANTS = {**storm.MUTANTS, "files_first": files_first}


class Sweep:
    """The warm parent. It stays single-threaded: what uses threads runs in forked children."""

    def __init__(self, folder: Path, scenario: Scenario, *, only_changing: bool) -> None:
        self._scenario = scenario
        self._only_changing = only_changing
        self._template = folder / "template"
        self._root = folder / "root"
        self.killed = self.missed = self.stuck = self.went = 0
        self.bad: list[Point | None] = []
        folder.mkdir(parents=True, exist_ok=True)
        if (prepare := scenario.prepare) is not None:
            pid = storm.forked(lambda: prepare(scenario.way, self._template))
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == (-signal.SIGKILL if prepare is leftovers else 0), status

    def points(self) -> list[Point]:
        """Every point to which more than one of a few undisturbed lives came.

        Threads that wait for each other do not make the same number of calls every time.
        """
        found = Counter(point for _ in range(4) for point in self.live(None).points)
        return [point for point, count in found.items() if count > 1]

    def trial(self, point: Point) -> None:
        """Kill a child at the point, then look and go on with what it left.

        A life that ends before it comes to the point is checked, too, and another one is tried.
        """
        for _ in range(MAX_LIVES):
            life = self.live(point)
            if life.killed:
                self.killed += 1
                return
            self.stuck += life.status != 0
        self.missed += 1

    def live(self, kill_at: Point | None) -> Life:
        """One child in a fresh copy of the root, and the checks after it."""
        self._copy_template()
        told, tell = os.pipe()
        life = self._run(tell, kill_at)
        os.close(tell)
        with os.fdopen(told) as lines:
            words = lines.read().split()
        self.went += words.count(WENT.decode().strip())
        newest = max([self._scenario.before, *(int(word) for word in words if word.isdigit())])
        if not storm.succeeds(lambda: self._check(newest)):
            self.bad.append(kill_at)
        return life

    def _copy_template(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._scenario.prepare is not None:
            shutil.copytree(self._template, self._root, symlinks=True)

    def _run(self, tell: int, kill_at: Point | None) -> Life:
        (ready, got_ready), (go, let_go) = os.pipe(), os.pipe()

        def child() -> None:
            act = self._scenario.act(self._scenario.way, self._root, tell)
            os.write(got_ready, b".")
            os.read(go, 1)
            act()

        pid = storm.forked(child)
        os.close(got_ready)
        os.read(ready, 1)
        tracer = Tracer(pid, only_changing=self._only_changing)
        tracer.attach()
        os.write(let_go, b".")
        life = tracer.follow(kill_at)
        for fd in (ready, go, let_go):
            os.close(fd)
        return life

    def _check(self, newest: int) -> None:
        """Nothing is lost or damaged, the run goes on, and gc leaves nothing but checkpoints."""
        if self._scenario.check is not None:
            self._scenario.check(self._root, newest)
            return
        way = self._scenario.way
        if self._scenario.again is not None:
            store = LocalStore(self._root)
            storm.expect_whole(store, storm.survey(store))
            self._scenario.again(self._root)
            storm.expect_whole(store, storm.survey(store))
            return
        self._look(newest)
        state = way.new_state()
        with way.manager(self._root, state) as manager:
            manager.resume()
            step = state.step()
            if step < newest:
                raise AssertionError(f"lost: {newest} was acknowledged, {step} was resumed")
            save_next(manager, state, os.open(os.devnull, os.O_WRONLY))
        self._look(step + 1)
        storm.clean_up(self._root, most=way.num_kept + 2)

    def _look(self, newest: int) -> None:
        state = self._scenario.way.new_state()
        storm.look(self._root, state.components, newest, step_of=lambda _: state.step())


def one_thread_for_each_kind_of_work() -> None:
    """With several, who takes a job would be chance."""
    real = Workers.__init__

    def one(self: Workers, num_threads: int, name: str) -> None:
        real(self, 1, name)

    Workers.__init__ = one  # type: ignore[method-assign]


def sweep(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Go through the points; what was counted."""
    began = time.perf_counter()
    scenario = SCENARIOS[options.scenario]
    found = Sweep(folder, scenario, only_changing=options.calls == "changing")
    points = found.points()
    tried = 0
    for point in points[options.offset :: options.stride]:
        tried += 1
        found.trial(point)
        if options.mutant and point in found.bad:
            break
    return {
        "points": len(points),
        "threads": len({thread for thread, _ in points}),
        "tried": tried,
        **{name: getattr(found, name) for name in ("killed", "missed", "stuck", "went")},
        "bad": len(found.bad),
        "bad_points": found.bad[:10],
        "took_s": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), required=True)
    parser.add_argument("--calls", choices=("all", "changing"), default="all")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    one_thread_for_each_kind_of_work()
    if options.mutant:
        MUTANTS[options.mutant]()
    environment()  # asks git once; a process of its own has no place among the calls
    if options.scenario in WAYS:
        Trained(1).become(1)  # imports what every child would import
    try:
        counts = sweep(options.folder, options)
    except PermissionError as error:
        print(error, file=sys.stderr)
        return NO_PTRACE
    print(json.dumps(counts))
    return 1 if counts["bad"] or counts["stuck"] else 0


if __name__ == "__main__":
    sys.exit(main())
