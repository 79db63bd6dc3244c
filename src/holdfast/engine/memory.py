"""Memory of our own: on pages, private, and empty in forked children."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from queue import Empty, SimpleQueue

from holdfast.errors import OutOfMemory

_WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which Python has no name for."""
_ADVICE = (
    (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK)
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")
    else ()
)


def take(nbytes: int) -> mmap.mmap:
    """So much memory, or a byte.

    A forked child has it too, filled with zeros and its own: it costs nothing until it is used
    there. Were it missing there (MADV_DONTFORK), the child would put something else into its place,
    and unmap that when it lets go of what it inherited.

    Raises:
        OutOfMemory: the system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        found = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"{nbytes} bytes of memory are not to be had: {error}") from error
    for advice in _ADVICE:
        _advise(found, advice)
    return found


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        # Only advice: a kernel without it keeps ordinary pages, and copies on fork.
        return


class Buffers:
    """Memory that is used again and again, by any thread: new memory costs a fault a page."""

    def __init__(self) -> None:
        self._free: SimpleQueue[memoryview] = SimpleQueue()

    def take(self, nbytes: int) -> memoryview:
        """Memory of at least so many bytes, on a page.

        Raises:
            OutOfMemory: the system refuses.
        """
        with suppress(Empty):
            found = self._free.get_nowait()
            if found.nbytes >= nbytes:
                return found
        return memoryview(take(nbytes))

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that is used no more."""
        self._free.put(buffer)
