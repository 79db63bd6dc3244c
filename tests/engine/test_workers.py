"""Workers: futures, errors, deadlines."""

from __future__ import annotations

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
