"""Workers: futures, errors, deadlines."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from holdfast import errors
from holdfast.threads.workers import Background, Workers, gather_results, hand_over, num_threads


@pytest.mark.parametrize(
    ("of_host", "usable", "num_ranks", "expected"),
    [
        (16, 16, None, (16, 32)),
        (16, 16, 8, (2, 4)),
        (16, 2, 8, (2, 4)),  # each rank has cores of its own
        (2, 2, 4, (1, 1)),
        (2, 2, 64, (1, 1)),
    ],
)
def test_ranks_of_a_host_share_its_cores(
    of_host: int,
    usable: int,
    num_ranks: int | None,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: of_host)
    monkeypatch.setattr("holdfast.threads.workers.num_cores", lambda: usable)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if num_ranks is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "128")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert (num_threads(), num_threads(per_core=2)) == expected


def test_the_first_error_is_raised_and_nothing_runs_afterwards() -> None:
    """Invariant 2: whoever cleans up must not race with a writer."""
    workers, ran = Workers(1, "test"), []

    def fail() -> None:
        raise ZeroDivisionError

    jobs = [workers.submit(fail)] + [workers.submit(lambda: ran.append(1)) for _ in range(20)]
    with pytest.raises(ZeroDivisionError):
        gather_results(jobs, timeout_s=30, what="jobs")
    assert all(job.done() for job in jobs)
    workers.close_pool()


def test_a_deadline_names_what_was_waited_for() -> None:
    """Invariant 9."""
    workers, release = Workers(1, "test"), threading.Event()
    jobs = [workers.submit(lambda: release.wait(60)) for _ in range(3)]
    with pytest.raises(errors.DeadlineExceeded, match="reading x"):
        gather_results(jobs, timeout_s=0.05, what="reading x")
    release.set()
    workers.close_pool()


def test_what_is_queued_is_done_after_close_and_nothing_more_is_taken() -> None:
    """Invariant 9: a future that nobody works at would be waited for to its deadline."""
    workers, release = Workers(2, "test"), threading.Event()
    jobs = [workers.submit(lambda: release.wait(60)) for _ in range(3)]
    workers.close_pool()
    with pytest.raises(errors.ManagerUnusable, match="test"):
        workers.submit(release.set)
    release.set()
    assert gather_results(jobs, timeout_s=60, what="jobs") == [True] * 3


def test_work_is_taken_while_the_interpreter_exits() -> None:
    """Decision 0002: in whatever order what is to be done at exit was told."""
    code = """
import atexit
from holdfast.threads.workers import Workers
workers = []
atexit.register(lambda: print(workers[0].submit(lambda: "done").result(60)))
workers.append(Workers(1, "test"))
workers[0].start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_jobs_are_handed_over_to_several_workers_at_once() -> None:
    """One thread is woken by the caller; the results are in the order of the jobs."""
    first, second = Workers(2, "first"), Workers(1, "second")

    meet = threading.Barrier(3)

    def met() -> str:
        meet.wait(60)
        return name_of_thread()

    jobs = hand_over((first, met), (first, met), (second, met))
    names = gather_results(jobs, timeout_s=60, what="jobs")
    assert {*names[:2]} == {"first-0", "first-1"}
    assert names[2] == "second-0"
    first.close_pool()
    second.close_pool()


def test_what_was_handed_over_is_done_when_workers_close_before_they_were_woken() -> None:
    """Invariant 9: a job that was taken is not forgotten; another thread does it, in order."""
    first, second = Workers(1, "first"), Workers(1, "second")
    release, done = threading.Event(), []
    first.submit(lambda: release.wait(60))
    jobs = hand_over(
        (first, partial(done.append, 1)), (first, partial(done.append, 2)), (second, name_of_thread)
    )
    second.close_pool()
    first.close_pool()
    release.set()
    assert gather_results(jobs, timeout_s=60, what="jobs") == [None, None, "first-0"]
    assert done == [1, 2]


def test_nothing_is_handed_over_when_one_of_the_workers_was_closed() -> None:
    """Invariant 9."""
    first, second = Workers(1, "first"), Workers(1, "second")
    second.close_pool()
    ran: list[int] = []
    with pytest.raises(errors.ManagerUnusable, match="second"):
        hand_over((first, partial(ran.append, 1)), (second, partial(ran.append, 2)))
    first.submit(bool).result(60)
    first.close_pool()
    assert ran == []


def test_an_error_or_a_cancelled_job_does_not_keep_the_others_from_being_done() -> None:
    workers, release = Workers(1, "test"), threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    workers.submit(lambda: release.wait(60))
    cancelled, failing, last = hand_over((workers, fail), (workers, fail), (workers, bool))
    assert cancelled.cancel()
    release.set()
    assert last.result(60) is False
    assert isinstance(failing.exception(60), ZeroDivisionError)
    workers.close_pool()


def make_scarce(left: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each next thread can be started."""
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if not left.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)


def test_threads_that_could_be_started_end_although_others_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each save tries again: where threads are few it must not take more of them."""
    left = [True, False, True, False]
    make_scarce(left, monkeypatch)
    workers = Workers(3, "scarce")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            workers.submit(bool)
    left += [True]
    assert workers.submit(bool).result(60) is False
    started = [one for one in threading.enumerate() if one.name.startswith("scarce")]
    assert len(started) == 3
    workers.close_pool()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def name_of_thread() -> str:
    """Who does a job."""
    return threading.current_thread().name


def test_they_grow_by_one_for_a_job_and_not_where_no_more_are_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that has begun must not end half-way for that."""
    make_scarce([False, True, False, True], monkeypatch)
    workers, done = Workers(2, "grown"), threading.Event()
    with pytest.raises(RuntimeError, match="new thread"):
        workers.grow()
    for num_running in (1, 1, 2, 2):
        workers.grow()
        started = [one for one in threading.enumerate() if one.name.startswith("grown")]
        assert len(started) == num_running
    workers.queue_task(done.set)
    assert done.wait(60)
    workers.close_pool()
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


# Background


def test_a_pause_ends_with_the_signal_to_stop() -> None:
    background = Background("test")
    job = background.submit(lambda: background.sleep(600))
    assert background.stop([job], timeout_s=60)
    assert job.result() is True
    background.stop_jobs()


def test_work_goes_on_after_the_signal_was_withdrawn() -> None:
    background = Background("test")
    assert background.stop([], timeout_s=0)
    assert background.is_stopping
    background.proceed()
    assert background.submit(lambda: background.sleep(0)).result(60) is False
    background.stop_jobs()


def test_a_job_that_hangs_is_reported_at_the_deadline() -> None:
    """Invariant 9."""
    background, release = Background("test"), threading.Event()
    job = background.submit(lambda: release.wait(60))
    assert not background.stop_jobs([job], timeout_s=0.01)
    release.set()
    assert job.result(60)


def test_queued_jobs_are_done_after_the_end_and_no_more_are_taken() -> None:
    background = Background("test")
    jobs = [background.submit(lambda: 1) for _ in range(3)]
    assert background.stop_jobs(jobs, timeout_s=60)
    with pytest.raises(errors.ManagerUnusable):
        background.submit(lambda: 1)
