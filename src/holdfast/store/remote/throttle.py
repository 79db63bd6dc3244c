"""Rate limit for uploads or downloads: computes how long the caller has to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Computes waits that limit the bytes per second of all threads of a process.

    Pieces get time slots one after the other, as long as each takes at this rate; unused time is
    not saved up. The first piece after a pause waits `offset_s`, so that the ranks of a host, each
    with its own offset, do not begin at the same moment.

    Args:
        nbytes_per_s: the rate; None is without limit.
        offset_s: how long the first piece after a pause waits.
        clock: gives seconds that only go up.
    """

    def __init__(
        self,
        nbytes_per_s: float | None,
        *,
        offset_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._offset_s = offset_s
        self._clock = clock
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def compute_seconds(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take at this rate."""
        return nbytes / self._nbytes_per_s if self._nbytes_per_s else 0.0

    def reserve(self, nbytes: int) -> float:
        """Reserve the next time slot for a piece; return the seconds to wait until it begins."""
        if not self._nbytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = self._free_at if self._free_at > now else now + self._offset_s
            self._free_at = begin + self.compute_seconds(nbytes)
            return begin - now
