"""Workers: futures, errors, deadlines."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from holdfast import errors
from holdfast.engine.workers import Workers, gather


def test_the_first_error_is_raised_and_nothing_runs_afterwards() -> None:
    """Invariant 2: whoever cleans up must not race with a writer."""
    workers, ran = Workers(1, "test"), []

    def fail() -> None:
        raise ZeroDivisionError

    jobs = [workers.submit(fail)] + [workers.submit(lambda: ran.append(1)) for _ in range(20)]
    with pytest.raises(ZeroDivisionError):
        gather(jobs, timeout_s=30, what="jobs")
    assert all(job.done() for job in jobs)
    workers.close()


def test_a_deadline_names_what_was_waited_for() -> None:
    """Invariant 9."""
    workers, release = Workers(1, "test"), threading.Event()
    jobs = [workers.submit(lambda: release.wait(60)) for _ in range(3)]
    with pytest.raises(errors.DeadlineExceeded, match="reading x"):
        gather(jobs, timeout_s=0.05, what="reading x")
    release.set()
    workers.close()


def test_what_is_queued_is_done_after_close_and_nothing_more_is_taken() -> None:
    """Invariant 9: a future that nobody works at would be waited for to its deadline."""
    workers, release = Workers(2, "test"), threading.Event()
    jobs = [workers.submit(lambda: release.wait(60)) for _ in range(3)]
    workers.close()
    with pytest.raises(errors.ManagerUnusable, match="test"):
        workers.submit(release.set)
    release.set()
    assert gather(jobs, timeout_s=60, what="jobs") == [True] * 3


def test_work_is_taken_while_the_interpreter_exits() -> None:
    """Decision 0002: in whatever order what is to be done at exit was told."""
    code = """
import atexit
from holdfast.engine.workers import Workers
workers = []
atexit.register(lambda: print(workers[0].submit(lambda: "done").result(60)))
workers.append(Workers(1, "test"))
workers[0].start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")
