"""Throughput of a store, measured over the time in which calls were in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Throughput:
    """Sums bytes, and the time in which at least one call to the store was in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._began_s = 0.0
        self.busy_s = 0.0
        self.nbytes = 0

    @contextmanager
    def taking(self, nbytes: int = 0) -> Iterator[None]:
        """Measure a call to the store that takes `nbytes`, or makes earlier ones durable."""
        with self._lock:
            if self._num_calls == 0:
                self._began_s = time.perf_counter()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self.nbytes += nbytes
                self._num_calls -= 1
                if self._num_calls == 0:
                    self.busy_s += time.perf_counter() - self._began_s

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second; None before anything was measured."""
        return self.nbytes / self.busy_s if self.busy_s > 0 and self.nbytes else None
