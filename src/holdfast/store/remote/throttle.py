"""How fast bytes may leave or enter: a share of a host's limit, in turns.

Knows numbers only; whoever asks does the waiting, and can be woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """A stream of bytes that is given its turns, for all threads of a process.

    Pieces get their turns one after the other, each as long as the piece takes at this rate; time
    in which nobody asked is not saved up. Whoever asks after a pause waits `offset_s` first, so
    that the ranks of a host, each with an offset of its own, do not begin at the same moment.

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

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take at this rate."""
        return nbytes / self._nbytes_per_s if self._nbytes_per_s else 0.0

    def reserve(self, nbytes: int) -> float:
        """Take the next turn for a piece; gives the seconds until it begins."""
        if not self._nbytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = self._free_at if self._free_at > now else now + self._offset_s
            self._free_at = begin + self.seconds(nbytes)
            return begin - now
