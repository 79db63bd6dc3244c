"""Readers on hostile input: each case in a fork, under an audit hook and limits of memory and time.

A module of cases is run as a process of its own, `python -m MODULE WORD...`, which prints one JSON
object a case: its name, its problems, and by how many bytes it made resident memory grow.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import warm

ROOT = Path(__file__).parents[2]
MIB = 2**20
NUM_TOGETHER = 32
"""The most cases that share a fork: forking and copying pages takes as long as a case."""
MAX_GROWTH_TOGETHER = 64 * MIB
"""Growth of a fork beyond which it takes no further case, whose peak it would hide."""
RUNS_CODE = (
    *("exec", "compile", "import", "pickle.", "marshal.", "code.__new__", "function.__new__"),
    *("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"),
    *("os.startfile", "pty.", "socket.", "ctypes.", "urllib.", "http.", "ftplib.", "webbrowser."),
    *("shutil.", "cpython.run_", "mmap.__new__.file", "os.chmod", "os.chown", "os.putenv"),
    "os.kill",
)
HARMLESS = ("socket.gethostname", "ctypes.create_string_buffer")
"""Events of asking for the name of this host, for the file system of an open folder, and for what
is in the page cache."""

Action = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A defect to put into the code, and the cases, each of which has to show it."""

    break_: Callable[[], None]
    cases: tuple[str, ...]
    shows: str
    """Pattern that one of the problems has to contain."""


# In the test


def run_child(module: str, *words: object, timeout_s: float = 280) -> list[dict[str, Any]]:
    """Run a module of cases, and return the objects that it prints."""
    done = warm.run(["-m", module, *words], cwd=ROOT, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def bad(found: Sequence[dict[str, Any]], *, max_growth: float = float("inf")) -> str:
    """Format a line for each case that had a problem or took too much memory."""
    wrong = {one["name"]: one["problems"][:3] for one in found if one["problems"]}
    greedy = {one["name"]: one["growth"] for one in found if one["growth"] > max_growth}
    return "\n".join(f"{name}: {problems}" for name, problems in {**greedy, **wrong}.items())


def assert_noticed(found: Sequence[dict[str, Any]], mutants: Mapping[str, Mutant]) -> None:
    """Every mutant was run, and shown by each of its cases."""
    pairs = [(name, case) for name, mutant in mutants.items() for case in mutant.cases]
    assert [(one["name"], one["case"]) for one in found] == pairs
    missed = {
        (one["name"], one["case"]): one["problems"]
        for one in found
        if not re.search(mutants[one["name"]].shows, " ".join(one["problems"]))
    }
    assert missed == {}


# In the child process


class Watch:
    """Audit hook that records the events which no reader may cause while it is on."""

    forbidden: tuple[str, ...] = RUNS_CODE
    takes_paths: tuple[str, ...] = ("os.scandir", "os.listdir")
    """Events that are allowed for paths inside."""

    def __init__(self) -> None:
        self.root = ""
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hook)

    def may_open(self, path: Any, flags: int) -> bool:
        """Whether a reader of `root` may open this."""
        raise NotImplementedError

    def is_inside(self, path: Any) -> bool:
        """Whether this is a path in `root`."""
        raise NotImplementedError

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event in HARMLESS:
            return
        if (
            event.startswith(self.forbidden)
            or (event == "open" and not self.may_open(arguments[0], arguments[2]))
            or (event in self.takes_paths and not all(map(self.is_inside, arguments[:2])))
        ):
            self.events.append(f"{event} {arguments!r}"[:200])

    @contextmanager
    def watched(
        self, root: Path, problems: list[str], *, memory: tuple[int, int], time_s: int
    ) -> Iterator[None]:
        """Watch what the block does with `root`, under a limit of a kind of memory and of
        processor time, which end it or the process."""
        kind, nbytes = memory
        hard = resource.getrlimit(kind)[1]
        sizes = Path("/proc/self/statm").read_text().split()
        used = int(sizes[0 if kind == resource.RLIMIT_AS else 5]) * resource.getpagesize()
        resource.setrlimit(kind, (used + nbytes, hard))
        signal.setitimer(signal.ITIMER_PROF, time_s)
        signal.alarm(10 * time_s)  # for a case that only waits
        self.root, self.is_on = str(root), True
        try:
            yield
        finally:
            self.is_on = False
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(kind, (hard, hard))
            problems += self.events[:5]
            self.events.clear()


def peak_nbytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forked(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Run actions in one fork, up to the first that fails or grows much, and return the results.

    An exception of the harness, and a signal that ends the fork, are problems of that action.
    """
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(here)
        with open(there, "w") as file:
            for result in _until_one_fails(actions):
                print(json.dumps(result), file=file, flush=True)
        os._exit(0)
    os.close(there)
    with open(here) as file:
        found = [json.loads(line) for line in file]
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        found.append({"problems": [f"ended by {name}"], "growth": 0})
    return found


def _until_one_fails(actions: Sequence[Action]) -> Iterator[dict[str, Any]]:
    start = peak_nbytes()
    for action in actions:
        before = peak_nbytes()
        try:
            found = action()
        except BaseException as error:
            found = {"problems": [f"the harness: {error!r}"[:300]]}
        yield {"growth": peak_nbytes() - before, **found}
        if found["problems"] or peak_nbytes() - start > MAX_GROWTH_TOGETHER:
            return


def each_forked(actions: Sequence[Action]) -> Iterator[dict[str, Any]]:
    """Run actions in forks; one that fails or grows much in a shared fork runs again in its own."""
    at = 0
    while at < len(actions):
        group = actions[at : at + NUM_TOGETHER]
        found = forked(group)
        last = found[-1]
        is_suspect = last["problems"] or last["growth"] > MAX_GROWTH_TOGETHER
        if len(found) > 1 and (is_suspect or len(found) < len(group)):
            found.pop()
        yield from found
        at += len(found)


def print_cases(actions: Mapping[str, Action]) -> None:
    """Run an action for each name, and print what it found."""
    for name, found in zip(actions, each_forked([*actions.values()]), strict=True):
        print(json.dumps({"name": name, **found}), flush=True)


def print_mutants(mutants: Mapping[str, Mutant], actions: Mapping[str, Action]) -> None:
    """Put each defect into a fork, run its cases there by name, and print what they found."""

    def broken(mutant: Mutant, action: Action) -> dict[str, Any]:
        mutant.break_()
        return action()

    for name, mutant in mutants.items():
        for case in mutant.cases:
            (found,) = forked([partial(broken, mutant, actions[case])])
            print(json.dumps({"name": name, "case": case, **found}), flush=True)
