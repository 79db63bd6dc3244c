"""Threads for work that goes on until it is told to stop, such as heartbeats and uploads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from holdfast.engine.workers import Workers

T = TypeVar("T")


class Background:
    """Workers with one signal to stop, and a deadline for whoever waits for their end."""

    def __init__(self, name: str, *, num_threads: int = 1) -> None:
        self._workers = Workers(num_threads, name)
        self._stop = threading.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether the jobs were told to stop."""
        return self._stop.is_set()

    def start(self) -> None:
        """Start the threads now; see `Workers.start`."""
        self._workers.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Raises:
            ManagerUnusable: after `end`.
        """
        return self._workers.submit(job)

    def sleep(self, seconds: float) -> bool:
        """For a job: wait, but not beyond the signal to stop. Returns whether that was given."""
        return self._stop.wait(seconds)

    def ask_to_stop(self) -> None:
        """Tell the jobs to stop; does not wait."""
        self._stop.set()

    def proceed(self) -> None:
        """Withdraw the signal to stop."""
        self._stop.clear()

    def stop(self, jobs: Sequence[Future[Any]], *, timeout_s: float) -> bool:
        """Tell the jobs to stop. Returns whether the given ones end within `timeout_s` seconds."""
        self.ask_to_stop()
        return not wait(jobs, timeout=timeout_s).not_done

    def end(self, jobs: Sequence[Future[Any]] = (), *, timeout_s: float = 0.0) -> bool:
        """As `stop`; the threads take no more jobs, and end after those that are queued."""
        self._workers.close()
        return self.stop(jobs, timeout_s=timeout_s)
