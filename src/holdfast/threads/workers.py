"""Thread pools whose jobs are Futures, and which still work while the interpreter exits.

There they differ from `concurrent.futures`, so that a save under way can finish
(docs/decisions/0002, tests/threads/test_workers.py). The threads are daemons; a caller that needs
a job holds its Future and waits for it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from holdfast.errors import DeadlineExceeded, ManagerUnusable, time_limit
from holdfast.launched import ranks_on_host
from holdfast.threads.progress import watch_all

T = TypeVar("T")
Job: TypeAlias = Callable[[], Any]
_Task: TypeAlias = Callable[[], None]
_Queue = SimpleQueue["_Task | None"]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads(per_core: int = 1) -> int:
    """Return the number of threads, at least one, for `per_core` on each core of this rank.

    Ranks of a host share its cores, unless each may use only some of them. More threads would not
    copy or hash faster, and delay those that keep the disk busy.
    """
    of_host = per_core * (os.cpu_count() or 1) // ranks_on_host()
    return max(1, min(per_core * num_cores(), of_host))


class Workers:
    """Pool of a fixed number of daemon threads that run jobs in order; started when needed."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._jobs: _Queue = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()  # `close_pool` may be called in the middle of any method
        self._end = weakref.finalize(self, _queue_stops, self._jobs, num_threads)
        self._end.atexit = False  # a save may still be on its way

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its result or its error is in the future."""
        future: Future[T] = Future()
        self.start()
        self.queue_task(partial(run_job, future, job))
        return future

    def queue_task(self, task: Callable[[], None]) -> None:
        """Queue a task that raises nothing and has no future; call `start` or `grow` before."""
        with self._lock:
            self.expect_open()
            self._jobs.put(task)

    def expect_open(self) -> None:
        """Raise `ManagerUnusable` after `close_pool`."""
        if not self._end.alive:
            raise ManagerUnusable(f"{self._name}: the thread pool is closed")

    def grow(self) -> None:
        """Start one more thread, unless all run: enough for a job that waits for no other job."""
        # To start all takes longer than a short job. Only a failure of the first is raised.
        with self._lock:
            if len(self._threads) < self._num_threads:
                with suppress(RuntimeError) if self._threads else nullcontext():
                    self._threads.append(self._new_thread(len(self._threads)))

    def start(self) -> None:
        """Start all threads now: the interpreter starts none once it has begun to exit."""
        with self._lock:
            # One by one, so that those started are counted if another one fails to start.
            while len(self._threads) < self._num_threads:
                self._threads.append(self._new_thread(len(self._threads)))

    def close_pool(self) -> None:
        """Close the pool: queued jobs are done, no more are accepted. Does not wait."""
        with self._lock:
            self._end()

    def _new_thread(self, number: int) -> threading.Thread:
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name=f"{self._name}-{number}", daemon=True
        )
        thread.start()
        return thread


def _queue_stops(jobs: _Queue, num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


def _work(jobs: _Queue) -> None:
    while (task := jobs.get()) is not None:
        task()
        del task


def run_job(future: Future[Any], job: Job) -> None:
    """Run a job, unless its future was cancelled, and put its result or error into the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
        future.set_exception(error)
    else:
        future.set_result(result)


def hand_over(*jobs: tuple[Workers, Job]) -> list[Future[Any]]:
    """Queue jobs in several pools; wake one thread of the first pool, which wakes the others.

    To wake a thread takes longer than to queue many jobs, and may cost the caller its core. Jobs
    that were accepted are done, even if workers are closed before they are woken.
    """
    for workers, _ in jobs:
        workers.start()
        workers.expect_open()
    futures: list[Future[Any]] = [Future() for _ in jobs]
    tasks = [
        (workers, partial(run_job, future, job))
        for future, (workers, job) in zip(futures, jobs, strict=True)
    ]
    jobs[0][0].queue_task(partial(_pass_on, tasks))
    return futures


def _pass_on(tasks: Sequence[tuple[Workers, _Task]]) -> None:
    """Queue all tasks but the first, so that their pools wake; then run the first here."""
    (_, first), *others = tasks
    own = [first]
    for workers, task in others:
        try:
            workers.queue_task(task)
        except ManagerUnusable:
            own.append(task)  # those workers were closed
    for task in own:
        task()


def gather_results(futures: Sequence[Future[T]], *, timeout_s: float, what: str) -> list[T]:
    """Wait for futures and return their results in order; on an error, cancel the rest and raise.

    Waits until every running job has ended, so that no job writes after this returns.

    Raises:
        DeadlineExceeded: jobs are still running after `timeout_s` seconds.
    """
    done, running = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
    failed = next((future for future in futures if future in done and future.exception()), None)
    cancel(running, timeout_s=timeout_s)
    if failed is not None:
        raise_from(failed)
    if running:
        raise DeadlineExceeded(f"{what}: not done after {time_limit(timeout_s)}")
    return [future.result() for future in futures]


def cancel(futures: Collection[Future[Any]], *, timeout_s: float) -> None:
    """Cancel the jobs that have not started, and wait up to `timeout_s` seconds for the others."""
    for future in futures:
        future.cancel()
    wait(futures, timeout=timeout_s)


def raise_from(failed: Future[Any]) -> None:
    """Raise the error that a future holds."""
    error = failed.exception()
    assert error is not None
    raise error


class Background(Workers):
    """Workers for background jobs, with a stop signal and a deadline on waits for their end."""

    def __init__(self, name: str, *, num_threads: int = 1) -> None:
        super().__init__(num_threads, name)
        self._signal = threading.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether the stop signal is set."""
        return self._signal.is_set()

    def sleep(self, seconds: float) -> bool:
        """Wait inside a job for `seconds` or the stop signal; return whether the signal is set."""
        return self._signal.wait(seconds)

    def ask_to_stop(self) -> None:
        """Set the stop signal; does not wait."""
        self._signal.set()

    def proceed(self) -> None:
        """Clear the stop signal."""
        self._signal.clear()

    def stop(self, jobs: Sequence[Future[Any]], *, timeout_s: float) -> bool:
        """Set the stop signal; return whether the given jobs end within `timeout_s` seconds."""
        self.ask_to_stop()
        return not wait(jobs, timeout=timeout_s).not_done

    def stop_jobs(self, jobs: Sequence[Future[Any]] = (), *, timeout_s: float = 0.0) -> bool:
        """Close the pool and `stop` its jobs; queued ones are still run, no more are accepted."""
        self.close_pool()
        return self.stop(jobs, timeout_s=timeout_s)


Use: TypeAlias = Callable[[], Any]
Read: TypeAlias = Callable[[], Use | None]
"""Function that reads, and returns a function that uses what was read; None: nothing to do."""

_NUM_WAITERS = 8
NUM_AHEAD = 2 * _NUM_WAITERS
"""Most reads at a time whose use has not ended."""


class Threads:
    """Two thread pools, for compute and for store I/O, so that both cores and store stay busy."""

    def __init__(self) -> None:
        self.workers = Workers(min(num_threads(per_core=2), 8), "holdfast-io")
        """Threads for copies and digests; more than cores, because some wait for the interpreter,
        but fewer for each of several ranks on a host."""
        self.waiters = Workers(_NUM_WAITERS, "holdfast-disk")
        """Threads that mostly wait for the store: more of them than cores cost nothing, and one
        that is done finds the next job already queued."""

    def start(self) -> None:
        """Start all threads now; see `Workers.start`."""
        self.workers.start()
        self.waiters.start()

    def close_pools(self) -> None:
        """Close both pools: queued jobs are done, no more are accepted. Does not wait."""
        self.waiters.close_pool()
        self.workers.close_pool()

    def submit_read(self, read: Callable[[], Callable[[], T]]) -> Future[T]:
        """Call `read` in one thread, and the function that it returns in another.

        The future has that function's result, or an error of either. The caller limits how much is
        read ahead.
        """
        return self._start_read(read, threading.Semaphore(1))

    def read_all(self, reads: Iterable[Read], *, timeout_s: float, what: str) -> None:
        """Run all reads and their uses, and wait for them; raises as `gather_results` does.

        A disk that reads several blocks at once has them ready at nearly the same time. It would be
        idle while the reading threads used them, so other threads do; at most `NUM_AHEAD` are being
        read, waiting or being used.
        """
        room = threading.Semaphore(NUM_AHEAD)
        futures: list[Future[None]] = []
        try:
            for read in reads:
                futures.append(self._start_read(read, room))
            began_s = time.monotonic()
            watch_all(futures, timeout_s=timeout_s, what=what)
            left_s = max(timeout_s - (time.monotonic() - began_s), 0.0)
            gather_results(futures, timeout_s=left_s, what=what)
        finally:
            # A read that still waits for room, because uses hang, sees that it was cancelled and
            # frees its thread; one place is enough, which each passes to the next.
            room.release()

    def _start_read(self, read: Read, room: threading.Semaphore) -> Future[Any]:
        self.waiters.grow()
        self.workers.grow()
        reading = _Reading(read, self.workers, room)
        self.waiters.queue_task(reading.read_and_queue_use)
        return reading.future


class _Reading:
    """Job of a read and then its use in another pool, with one Future for both."""

    def __init__(self, read: Read, workers: Workers, room: threading.Semaphore) -> None:
        self.future: Future[Any] = Future()
        self._read = read
        self._workers = workers
        self._room = room

    def read_and_queue_use(self) -> None:
        """Read, unless it was cancelled, and queue the use of what was read."""
        self._room.acquire()  # waits for the future have a time limit
        if not self.future.set_running_or_notify_cancel():
            self._room.release()
            return
        try:
            use = self._read()
        except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
            self._set_exception(error)
            return
        if use is None:
            self._set_result(None)
            return
        try:
            self._workers.queue_task(lambda: self._use_result(use))
        except BaseException:  # noqa: BLE001 - closed, or without memory
            self._use_result(use)  # no other thread will, and it frees what the read took

    def _use_result(self, use: Use) -> None:
        try:
            result = use()
        except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
            self._set_exception(error)
        else:
            self._set_result(result)

    def _set_result(self, result: Any) -> None:
        self._room.release()
        self.future.set_result(result)

    def _set_exception(self, error: BaseException) -> None:
        self._room.release()
        self.future.set_exception(error)
