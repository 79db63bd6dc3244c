"""Thread pools that read or write checkpoints: one for compute, one to wait for the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from holdfast.threads.progress import watch_all
from holdfast.threads.workers import Workers, gather_results, num_threads

T = TypeVar("T")
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
