"""Two processes on one root: the second is refused, may take over by name, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warm
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify_root
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

CHILD = Path(__file__).with_name("child.py")


class Child:
    """A training process and what it tells."""

    def __init__(self, root: Path, **options: Any) -> None:
        pipe = subprocess.PIPE
        words = (CHILD, root, json.dumps(options))
        self.process = warm.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)

    def told(self, name: str) -> Any:
        """The next line that has `name`; lines before it are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if name in said:
                return said[name]
        raise AssertionError(f"ended without {name!r}: {self.process.communicate()[1]}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Its exit status; its pipes are read to the end."""
        self.process.communicate(timeout=120)
        return self.process.returncode

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()


def steps(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(LocalStore(root)).checkpoints()]


def names_in(root: Path) -> list[str]:
    """What lies in a root and among its claims, but for what a live owner writes at any time: the
    temporary of its heartbeat, and `latest`."""
    names = {*os.listdir(root), *os.listdir(root / "writers")} - {"latest"}
    return sorted(name for name in names if not name.startswith(".tmp-"))


def test_a_live_owner_is_refused_by_name_and_nothing_is_touched(tmp_path: Path) -> None:
    """R10; invariant 11."""
    owner = Child(tmp_path, steps=2, pause_before=1)
    owner.told("waiting")
    before = names_in(tmp_path)
    second = Child(tmp_path, steps=1)
    assert second.told("error") == "OwnedElsewhere"
    second.end()
    assert names_in(tmp_path) == before
    owner.go_on()
    assert owner.told("saved") == 2
    assert owner.end() == 0
    assert steps(tmp_path) == [2, 1]


def test_takeover_fences_the_first_one_off(tmp_path: Path) -> None:
    """R10: the first one's next commit is a clear error, and both one's commits stay whole."""
    take_over(tmp_path)


def test_a_writer_without_a_fence_is_caught(tmp_path: Path) -> None:
    """R10: the mutant commits although it was superseded."""
    with pytest.raises(AssertionError):
        take_over(tmp_path, no_fence=True)


def take_over(tmp_path: Path, **mutant: Any) -> None:
    """One process takes the run from another, which then tries to commit."""
    first = Child(tmp_path, steps=2, pause_before=1, **mutant)
    first.told("waiting")
    second = Child(tmp_path, steps=2, takeover=True)
    try:
        assert second.told("resumed") == 1
        assert second.told("saved") == 2
        first.go_on()
        assert first.told("error") == "Superseded"
        assert second.told("saved") == 3
    finally:
        statuses = first.end(), second.end()
    assert statuses == (0, 0)
    report = verify_root(LocalStore(tmp_path))
    assert report.ok
    assert steps(tmp_path) == [3, 2, 1]
    third = Child(tmp_path)
    assert third.told("resumed") == 3
    third.end()


def test_a_dead_owner_blocks_nobody(tmp_path: Path) -> None:
    """R1, D24: also one that was killed in the middle, and was not waited for by its parent."""
    first = Child(tmp_path, steps=1, end="hang")
    first.told("hanging")
    first.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    second = Child(tmp_path)
    assert second.told("resumed") == 1
    assert second.told("saved") == 2
    second.end()
    first.end()


def test_a_paused_writer_cannot_commit_what_gc_removed(tmp_path: Path) -> None:
    """R10, R22: SIGSTOP instead of a clean pause, then gc, then SIGCONT."""
    first = Child(tmp_path, steps=2, pause_before=1)
    first.told("waiting")
    first.process.send_signal(signal.SIGSTOP)
    second = Child(tmp_path, steps=1, takeover=True)
    assert second.told("saved") == 2
    second.end()
    collect_garbage(LocalStore(tmp_path))
    first.process.send_signal(signal.SIGCONT)
    first.go_on()
    assert first.told("error") == "Superseded"
    first.end()
    assert steps(tmp_path) == [2, 1]


@pytest.mark.parametrize("number", range(4))
def test_two_that_start_at_once_have_one_winner(tmp_path: Path, number: int) -> None:
    """R10: whoever claims second is refused, or comes after the first has closed."""
    children = [Child(tmp_path, steps=3, end="hang") for _ in range(2)]
    said = [child.told("hanging") for child in children]
    assert said == [True, True]
    for child in children:
        child.kill()
    entries = Catalog(LocalStore(tmp_path)).checkpoints()
    assert {entry.name.epoch for entry in entries} == {1}
    assert [entry.step for entry in entries] == [3, 2, 1]


def test_interpreter_exit_finishes_a_save_under_way_and_says_so(tmp_path: Path) -> None:
    """R14: a program that simply ends loses nothing."""
    child = Child(tmp_path, steps=1, end="leave")
    _, said = child.process.communicate(timeout=120)
    assert child.process.returncode == 0
    assert steps(tmp_path) == [1]
    assert said == "" or "step 1 was committed" in said  # it may be done before the exit
    again = Child(tmp_path)
    assert again.told("resumed") == 1
    again.end()


FAILING_EXIT = """
import os, sys, torch
from holdfast.manager import CheckpointManager
root = sys.argv[1]
manager = CheckpointManager(root, {"tree": {"x": torch.zeros(10)}}, sinks=(), preflight=False)
manager.save(1).wait()
os.rename(root, root + "-gone")
manager.save(2)
import atexit
atexit.register(lambda: print("another handler", flush=True))
"""

SLOW_EXIT = """
import sys, torch
from holdfast.manager import CheckpointManager
from holdfast.store.local import LocalStore
from holdfast.testing.faulty import Fault, FaultyStore
fault = Fault(kind="hang", op="finish", deadline_s=60)
store = FaultyStore(LocalStore(sys.argv[1]), [fault])
manager = CheckpointManager(store, {"tree": {"x": torch.zeros(10)}}, sinks=(), preflight=False,
                            exit_timeout_s=float(sys.argv[2]))
manager.save(1)
assert fault.reached.wait(60)
if len(sys.argv) > 3:
    # Released only once the interpreter is in its exit handlers.
    import atexit
    atexit.register(fault.release.set)
"""


def test_a_failure_that_nobody_fetched_makes_the_exit_status_1(tmp_path: Path) -> None:
    """R14, D37, D39: a scheduler must not take the run for complete."""
    done = warm.run(["-c", FAILING_EXIT, tmp_path / "run"])
    assert done.returncode == 1, done.stderr
    assert "save of step 2 failed" in done.stderr
    assert done.stdout == "another handler\n"  # others' exit handlers have their turn, once


def test_exit_waits_for_a_slow_save_and_says_what_became_of_it(tmp_path: Path) -> None:
    """R14."""
    done = warm.run(["-c", SLOW_EXIT, tmp_path, "60", "release"])
    assert done.returncode == 0, done.stderr
    assert "save of step 1 was committed while the program ended" in done.stderr
    assert steps(tmp_path) == [1]


def test_exit_gives_a_hanging_save_up_and_says_so(tmp_path: Path) -> None:
    """R14; invariant 9: what hangs is named, and nothing half-done is visible."""
    done = warm.run(["-c", SLOW_EXIT, tmp_path, "0.5"])
    assert done.returncode == 1, done.stderr
    assert "writing" in done.stderr
    assert steps(tmp_path) == []
