"""Work that goes on until it is told to stop."""

from __future__ import annotations

import threading

import pytest

from holdfast.engine.background import Background
from holdfast.errors import ManagerUnusable


def test_a_pause_ends_with_the_signal_to_stop() -> None:
    background = Background("test")
    job = background.submit(lambda: background.sleep(600))
    assert background.stop([job], timeout_s=60)
    assert job.result() is True
    background.end()


def test_work_goes_on_after_the_signal_was_withdrawn() -> None:
    background = Background("test")
    assert background.stop([], timeout_s=0)
    assert background.is_stopping
    background.proceed()
    assert background.submit(lambda: background.sleep(0)).result(60) is False
    background.end()


def test_a_job_that_hangs_is_reported_at_the_deadline() -> None:
    """Invariant 9."""
    background, release = Background("test"), threading.Event()
    job = background.submit(lambda: release.wait(60))
    assert not background.end([job], timeout_s=0.01)
    release.set()
    assert job.result(60)


def test_queued_jobs_are_done_after_the_end_and_no_more_are_taken() -> None:
    background = Background("test")
    jobs = [background.submit(lambda: 1) for _ in range(3)]
    assert background.end(jobs, timeout_s=60)
    with pytest.raises(ManagerUnusable):
        background.submit(lambda: 1)
