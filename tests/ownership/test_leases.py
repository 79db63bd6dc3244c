"""Readers whose checkpoint stays while they read: leases, and when they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.crash.test_every_operation import Stores, changes_or_all, stores  # noqa: F401

import holdfast
import warm
from holdfast import errors
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import Lease, Retired, Thinned
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ownership import leases
from holdfast.ownership.leases import SILENT_S, BeingDeleted, Readers, find_leases, leased
from holdfast.ownership.process import this_process
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from marks import full
from runs import Recorder, remove_folder
from stops import stops
from ways import Tiny, opened

CHILD = Path(__file__).with_name("lease_child.py")
NONCE = "ab" * 16
ELSEWHERE = msgspec.structs.replace(this_process(), host="node-7", boot_id="another boot")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def store() -> MemoryStore:
    """Three checkpoints, and no owner."""
    return make(MemoryStore())


def make(store: Any, num_saves: int = 3) -> Any:
    tiny = Tiny()
    with opened(store, tiny) as manager:
        for step in range(1, num_saves + 1):
            tiny.become(step)
            manager.save(step).wait()
    return store


def folder_at(store: Store, step: int) -> str:
    (folder,) = [e.folder for e in Catalog(store).checkpoints() if e.step == step]
    return folder


def steps(store: Store) -> list[int]:
    return [entry.step for entry in Catalog(store).checkpoints()]


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("readers/")]


def put_lease(store: Store, folder: str, data: bytes | None = None, *, beat: int = 1) -> str:
    """A lease of a process on another host, or of these bytes."""
    record = Lease(nonce=NONCE, beat=beat, created="2026-01-02T03:04:05Z", process=ELSEWHERE)
    key = layout.lease_key(folder, NONCE)
    if isinstance(store, LocalStore):
        store.make_folder(layout.READERS)
    store.put(key, record.encode() if data is None else data)
    return key


# The reader's side -------------------------------------------------------------------------------


def test_a_lease_is_there_while_the_block_lasts(store: MemoryStore) -> None:
    folder = folder_at(store, 1)
    with leased(store, folder) as refused:
        (found,) = find_leases(store)
        assert refused == ""
        assert (found.folder, found.state) == (folder, "ours")
        assert f"process {os.getpid()} on " in found.who
        assert len(Readers(store).find_leases(folder)) == 1
        assert Readers(store).find_leases(folder_at(store, 2)) == ()
    assert keys(store) == []


def test_an_error_in_the_block_ends_the_lease(store: MemoryStore) -> None:
    with pytest.raises(ZeroDivisionError), leased(store, folder_at(store, 1)):
        _ = 1 // 0
    assert keys(store) == []


def test_a_lease_is_renewed(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes change with every beat, so that a deleter elsewhere sees that it lives."""
    monkeypatch.setattr(leases, "BEAT_S", 0.001)
    with leased(store, folder_at(store, 1)):
        seen = set()
        while len(seen) < 3:
            (found,) = find_leases(store)
            assert found.lease is not None
            seen.add(found.lease.beat)
    assert keys(store) == []


def test_a_reader_gives_way_to_a_deletion_that_has_begun(tmp_path: Path) -> None:
    """R11: the mark was there first; a root's newest is then another one."""
    tiny = Tiny()
    store = LocalStore(tmp_path)
    with opened(store, tiny) as manager:
        for step in (1, 2):
            tiny.become(step)
            manager.save(step).wait()
        mark = Retired(by="writer 1", reason="a test").encode()
        store.put(f"{folder_at(store, 2)}/{layout.retired_name(1)}", mark)
        begun = "started to delete it"
        with pytest.raises(BeingDeleted, match=begun), leased(store, folder_at(store, 2)):
            pass
        named = f"{tmp_path}@step=2"
        with pytest.raises(errors.NoCheckpoint, match=begun), holdfast.reading(named):
            pass
        with holdfast.reading(tmp_path) as checkpoint:
            assert checkpoint.step == 1
        assert keys(store) == []
    with holdfast.reading(tmp_path) as checkpoint:
        assert checkpoint.step == 2, "the mark of a writer that has closed binds nobody"


def test_what_is_gone_cannot_be_kept(store: MemoryStore) -> None:
    folder = folder_at(store, 1)
    remove_folder(store, folder)
    with pytest.raises(errors.NoCheckpoint, match="deleted"), leased(store, folder):
        pass
    assert keys(store) == []


def leases_put(store: FaultyStore) -> int:
    return sum(op == "put" and key.startswith("readers/") for op, key in store.ops)


def test_a_manager_that_does_not_own_the_run_loads_under_a_lease(store: MemoryStore) -> None:
    """The owner needs none: its own retention waits for it."""
    tiny = Tiny()
    watched = FaultyStore(store)
    with opened(watched, tiny) as manager:
        assert manager.load("step=1").step == 1
        assert leases_put(watched) == 1
        manager.resume()
        manager.load("step=2", components=["tiny"])
        assert leases_put(watched) == 1
    assert keys(store) == []


def test_a_copy_of_a_checkpoint_needs_no_lease(tmp_path: Path) -> None:
    """Invariant 10: nothing is written where nobody ever claimed a run."""
    make(LocalStore(tmp_path / "root"), 1)
    source = folder_at(LocalStore(tmp_path / "root"), 1)
    for name in (source, "best"):
        copy_folder(tmp_path / "root" / source, tmp_path / "copies" / name)
        with holdfast.reading(tmp_path / "copies" / name) as checkpoint:
            assert (checkpoint.step, checkpoint.notes) == (1, ())
            assert Path(checkpoint.path) == tmp_path / "copies" / name
    assert {path.name for path in (tmp_path / "copies").iterdir()} == {source, "best"}


def copy_folder(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("error", [errors.AccessDenied, errors.StoreFull])
def test_who_may_not_write_reads_without_a_lease(
    error: type[errors.StoreError], store: MemoryStore
) -> None:
    """A note, not an error."""
    faulty = FaultyStore(store, [Fault(kind="fail", op="put", key="readers/*", error=error("no"))])
    with leased(faulty, folder_at(store, 1)) as refused:
        assert refused.startswith("read without a lease")
        assert keys(store) == []


def test_a_lost_reply_is_read_back(store: MemoryStore) -> None:
    faulty = FaultyStore(store, [Fault(kind="lose_reply", op="put", key="readers/*")])
    with leased(faulty, folder_at(store, 1)) as refused:
        assert refused == ""
        assert len(keys(store)) == 1
    assert keys(store) == []


def test_a_lease_that_could_not_be_put_is_an_error_and_leaves_nothing(store: MemoryStore) -> None:
    """R6: a storage that fails is another thing than one that refuses."""
    faulty = FaultyStore(store, [Fault(kind="fail", op="put", key="readers/*", times=None)])
    with pytest.raises(errors.StoreError), leased(faulty, folder_at(store, 1)):
        pass
    assert keys(store) == []


def test_a_lease_that_cannot_be_taken_back_is_told(store: MemoryStore) -> None:
    """Invariant 8: what was read was read; the lease ends with the process."""
    recorder = Recorder()
    faulty = FaultyStore(store, [Fault(kind="fail", op="delete", key="readers/*")])
    with leased(faulty, folder_at(store, 1), emit=Emitter((recorder,))):
        pass
    assert len(keys(store)) == len(recorder.of("housekeeping_failed")) == 1


def test_a_storage_that_hangs_when_a_lease_is_given_back_holds_nobody_up(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9; what was read was read."""
    monkeypatch.setattr(leases, "_STOP_TIMEOUT_S", 0.2)
    recorder = Recorder()
    hang = Fault(kind="hang", op="delete", key="readers/*", deadline_s=3600.0)
    try:
        with leased(FaultyStore(store, [hang]), folder_at(store, 1), emit=Emitter((recorder,))):
            pass
    finally:
        hang.release.set()
    (event,) = recorder.of("housekeeping_failed")
    assert "hangs in the store" in event.message


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_other_things_in_place_of_the_folder_stop_nobody(kind: str, tmp_path: Path) -> None:
    """R28: nothing is put behind a link, retention goes on, and the reader is told."""
    store = make(LocalStore(tmp_path / "root"))
    place = tmp_path / "root" / layout.READERS
    (tmp_path / "outside").mkdir()
    if kind == "file":
        place.write_bytes(b"")
    else:
        place.symlink_to(tmp_path / ("outside" if kind == "link" else "nothing"))
    with holdfast.reading(tmp_path / "root") as checkpoint:
        (note,) = checkpoint.notes
        assert note.startswith("read without a lease")
    assert list(find_leases(store)) == []
    assert {where for where, _ in collect_garbage(store).failed} <= {layout.READERS}
    assert prune_checkpoints(store, Last(1), emit=Emitter(())).failed == []
    assert steps(store) == [3]
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_checkpoint_that_went_all_the_same_is_told_of(tmp_path: Path) -> None:
    """A reader that was suspended for long is not left in the belief that it read all."""
    store = make(LocalStore(tmp_path))
    with (
        pytest.raises(errors.NoCheckpoint, match="deleted while it was read"),
        holdfast.reading(f"{tmp_path}@step=1") as checkpoint,
    ):
        remove_folder(store, checkpoint.folder)
    assert keys(store) == []


# The deleter's side ------------------------------------------------------------------------------


def test_silence_is_measured_by_the_clock_of_the_deleter(store: MemoryStore) -> None:
    """D3: nothing is compared with the time that a record tells."""
    folder, clock = folder_at(store, 1), Clock()
    readers = Readers(store, clock=clock)
    put_lease(store, folder)
    assert len(readers.find_leases(folder)) == 1
    clock.now += SILENT_S - 1
    assert len(readers.find_leases(folder)) == 1
    put_lease(store, folder, beat=2)
    clock.now += 2
    assert len(readers.find_leases(folder)) == 1, "it has moved"
    clock.now += SILENT_S
    assert readers.find_leases(folder) == ()
    put_lease(store, folder, beat=3)
    assert len(readers.find_leases(folder)) == 1, "it was only slow"


@pytest.mark.parametrize("start", ["", "1"])
def test_the_dead_read_nothing(start: str, store: MemoryStore) -> None:
    """Same boot, same process namespace, and no such process: the lease is void at once."""
    folder = folder_at(store, 1)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = msgspec.structs.replace(this_process(), pid=gone.pid, start=start)
    record = Lease(nonce=NONCE, beat=1, created="", process=process)
    put_lease(store, folder, record.encode())
    assert [lease.state for lease in find_leases(store)] == ["dead"]
    assert Readers(store).find_leases(folder) == ()
    report = collect_garbage(store)
    assert [why for _, why in report.removed] == ["a lease of a process that is gone"]
    assert keys(store) == []


def hostile_leases() -> Iterator[bytes]:
    yield b""
    yield b"{}"
    yield b"\x80\x04\x95" + bytes(range(50))
    yield b"[" * 60_000
    yield b" " * 100_000
    record = Lease(nonce="cd" * 16, beat=1, created="", process=ELSEWHERE)
    yield record.encode()
    yield Retired(by="writer 1", reason="not a lease").encode()


@pytest.mark.parametrize("data", tuple(hostile_leases()), ids=lambda data: f"{len(data)} bytes")
def test_a_hostile_lease_is_reported_and_holds_nothing_for_ever(
    data: bytes, store: MemoryStore
) -> None:
    """R29: it binds as the lease of a stranger, until it was silent for long enough."""
    folder, clock = folder_at(store, 1), Clock()
    key = put_lease(store, folder, data)
    readers = Readers(store, clock=clock)
    (found,) = readers.find_leases(folder)
    assert found.who == f"a process whose lease {key} cannot be read"
    ((kept, why),) = collect_garbage(store).kept
    assert kept == key
    assert "cannot be read" in why
    clock.now += SILENT_S
    assert readers.find_leases(folder) == ()


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link"])
def test_other_things_than_files_bind_nobody_for_ever(kind: str, tmp_path: Path) -> None:
    """R28: no link is followed."""
    store = make(LocalStore(tmp_path / "root"))
    folder, clock = folder_at(store, 1), Clock()
    path = tmp_path / "root" / put_lease(store, folder)
    (tmp_path / "twin").write_bytes(path.read_bytes())
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("twin" if kind == "link" else "nothing"))
    readers = Readers(store, clock=clock)
    assert all(lease.lease is None for lease in readers.find_leases(folder))
    clock.now += SILENT_S
    assert readers.find_leases(folder) == ()
    assert collect_garbage(store).failed == []


def test_names_that_are_no_leases_are_ignored(store: MemoryStore) -> None:
    folder = folder_at(store, 1)
    for name in (
        "now",
        "x.json",
        f"{folder}.json",
        f"{folder}.ABCDEFABCDEFABCD.json",
        f"{folder}.tmp",
    ):
        store.put(f"readers/{name}", b"")
    assert list(find_leases(store)) == []
    assert collect_garbage(store).removed == []


def test_gc_removes_leases_on_what_is_gone(store: MemoryStore) -> None:
    """R9: also those of other hosts; what is still there keeps its lease."""
    folder = folder_at(store, 1)
    kept = put_lease(store, folder_at(store, 2))
    lost = put_lease(store, folder)
    remove_folder(store, folder)
    assert {key for key, _ in collect_garbage(store, dry_run=True).removed} == {lost}
    assert set(keys(store)) == {kept, lost}
    collect_garbage(store)
    assert keys(store) == [kept]


# Owner and reader --------------------------------------------------------------------------------


class Reading:
    """A process that reads a checkpoint until it is told to go on."""

    def __init__(self, source: str) -> None:
        pipe = subprocess.PIPE
        self.process = warm.Popen([CHILD, source], stdin=pipe, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        self.folder = self.process.stdout.readline().strip()
        assert self.folder, self.process.communicate()[1]

    def finish(self) -> int:
        """Let it read; its exit status."""
        out, err = self.process.communicate("\n", timeout=120)
        assert int(out) > 0, err
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=120)


@contextmanager
def training(root: Path, recorder: Recorder) -> Iterator[Callable[[int], list[int]]]:
    """An owner that keeps one; gives a function that saves a step and says what is there."""
    tiny = Tiny()
    with CheckpointManager(
        root, {"tiny": tiny.tree}, keep=Last(1), sinks=(recorder,), preflight=False
    ) as manager:
        manager.resume()

        def save(step: int) -> list[int]:
            tiny.become(step)
            manager.save(step).wait()
            manager.wait()
            return steps(LocalStore(root))

        yield save


def test_what_is_read_stays_until_the_reader_has_ended(tmp_path: Path, recorder: Recorder) -> None:
    """R11, R20: with a real owner that keeps one, and a real reader."""
    with training(tmp_path, recorder) as save:
        save(1)
        reading = Reading(f"{tmp_path}@step=1")
        assert save(2) == [2, 1]
        assert save(3) == [3, 1]
        assert not Catalog(LocalStore(tmp_path)).marks(reading.folder).retired, "no needless mark"
        assert verify(LocalStore(tmp_path), reading.folder).ok
        assert reading.finish() == 0
        assert save(4) == [4]
    (event,) = recorder.of("postponed")
    assert f"process {reading.process.pid} on " in event.message
    assert keys(LocalStore(tmp_path)) == []


def test_a_killed_reader_keeps_nothing(tmp_path: Path, recorder: Recorder) -> None:
    """R1: its lease is found dead, and the checkpoint goes with the next save."""
    with training(tmp_path, recorder) as save:
        save(1)
        reading = Reading(f"{tmp_path}@step=1")
        assert save(2) == [2, 1]
        reading.kill()
        assert len(keys(LocalStore(tmp_path))) == 1
        assert save(3) == [3]
    assert keys(LocalStore(tmp_path)) == []


def test_the_silent_lease_of_another_host_ends(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner remembers since when it has not moved."""
    with training(tmp_path, recorder) as save:
        save(1)
        put_lease(LocalStore(tmp_path), folder_at(LocalStore(tmp_path), 1))
        assert save(2) == [2, 1]
        assert save(3) == [3, 1]
        monkeypatch.setattr(leases, "SILENT_S", 0.0)
        assert save(4) == [4]
    (event,) = recorder.of("postponed")
    assert "node-7" in event.message
    assert keys(LocalStore(tmp_path)) == []


def scenario(store: Store, acknowledged: list[int]) -> None:
    """Resume, and two saves of which one is kept; meanwhile what was the newest is read."""
    tiny = Tiny()
    with opened(store, tiny, keep=Last(1)) as manager:
        found = manager.resume()
        last = found.step if found is not None else 0
        for step in range(last + 1, last + 3):
            tiny.become(step)
            entry = Catalog(store).head()
            with leased(store, entry.folder) if entry is not None else nullcontext():
                acknowledged.append(manager.save(step).wait().step)
                manager.wait()
                if entry is not None:
                    assert verify(store, entry.folder).ok, "read under a lease"
        manager.wait()
    collect_garbage(store)


@changes_or_all
@pytest.mark.parametrize("kind", ["stop_after", *full("stop_before")])
def test_a_stop_at_every_operation_of_a_reader_beside_retention(
    stores: Stores,  # noqa: F811
    kind: Any,
    at_all: bool,
) -> None:
    """R1, R2, R9, R23: nothing acknowledged is lost, and nothing is kept for ever."""
    clean = FaultyStore(stores(-1))
    scenario(clean, [])
    for number, fault in enumerate(stops(kind, clean, at_all=at_all)):
        store = stores(number)
        acknowledged: list[int] = []
        with suppress(Stopped, errors.HoldfastError):
            scenario(FaultyStore(store, [fault]), acknowledged)
        check(store, max(acknowledged, default=0))


def check(store: Store, newest: int) -> None:
    """The run goes on; once the lease of the one that was stopped is gone, one checkpoint stays."""
    for entry in Catalog(store).checkpoints():
        assert verify(store, entry.folder).ok
    head = Catalog(store).head()
    assert (head.step if head is not None else 0) >= newest
    for key in keys(store):
        store.delete(key)  # our own process lives on, so that nobody can find it dead
    tiny = Tiny()
    with opened(store, tiny, keep=Last(1)) as manager:
        manager.resume()
        tiny.become(newest + 10)
        manager.save(newest + 10).wait()
        manager.wait()
    assert steps(store) == [newest + 10]


def test_a_component_that_goes_is_given_up_by_the_reader(store: MemoryStore) -> None:
    """R11: the entry of a reader is read after its lease, with the marks of thinners."""
    folder = folder_at(store, 1)
    mark = Thinned(by="writer 9", component="tiny", reason="a test").encode()
    with leased(store, folder):
        assert Catalog(store).marks(folder).thinned_by == ()
        store.put(f"{folder}/{layout.thinned_name('tiny', 9)}", mark)
        assert len(Readers(store).find_leases(folder)) == 1, "and the thinner sees the lease"


def test_watching_ends_when_a_lease_moves_and_after_silence(store: MemoryStore) -> None:
    folder, clock, recorder = folder_at(store, 1), Clock(), Recorder()
    readers = Readers(store, clock=clock)
    put_lease(store, folder)

    def move(seconds: float) -> None:
        clock.wait(seconds)
        put_lease(store, folder, beat=int(clock.now))

    readers.watch_leases({folder}, wait=move, emit=Emitter((recorder,)))
    assert clock.now < 1000 + SILENT_S
    assert len(readers.find_leases(folder)) == 1
    readers.watch_leases({folder}, wait=clock.wait, emit=Emitter((recorder,)))
    assert readers.find_leases(folder) == ()
    assert all("node-7" in event.message for event in recorder.of("warning"))


def test_a_reader_that_a_global_keeps_gives_its_lease_back_when_the_process_ends(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, torch, holdfast\n"
        "state = {'model': torch.nn.Linear(3, 3)}\n"
        "manager = holdfast.CheckpointManager(sys.argv[1], state)\n"
        "manager.save(1, wait=True); manager.close()\n"
        "tensor = holdfast.load_file(sys.argv[1])['model:weight']\n"
    )
    ended = warm.run(["-c", code, tmp_path / "run"])
    assert ended.returncode == 0
    assert "lease" not in ended.stderr
    assert not [*find_leases(LocalStore(tmp_path / "run"))]
