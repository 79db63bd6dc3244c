"""Threads for work that goes on until it is told to stop, such as heartbeats and uploads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from holdfast.engine.workers import Workers


class Background(Workers):
    """Workers with one signal to stop, and a deadline for whoever waits for their end."""

    def __init__(self, name: str, *, num_threads: int = 1) -> None:
        super().__init__(num_threads, name)
        self._signal = threading.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether the jobs were told to stop."""
        return self._signal.is_set()

    def sleep(self, seconds: float) -> bool:
        """For a job: wait, but not beyond the signal to stop. Returns whether that was given."""
        return self._signal.wait(seconds)

    def ask_to_stop(self) -> None:
        """Tell the jobs to stop; does not wait."""
        self._signal.set()

    def proceed(self) -> None:
        """Withdraw the signal to stop."""
        self._signal.clear()

    def stop(self, jobs: Sequence[Future[Any]], *, timeout_s: float) -> bool:
        """Tell the jobs to stop. Returns whether the given ones end within `timeout_s` seconds."""
        self.ask_to_stop()
        return not wait(jobs, timeout=timeout_s).not_done

    def end(self, jobs: Sequence[Future[Any]] = (), *, timeout_s: float = 0.0) -> bool:
        """As `stop`; the threads take no more jobs, and end after those that are queued."""
        self.close()
        return self.stop(jobs, timeout_s=timeout_s)
