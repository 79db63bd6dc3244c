"""Memory of our own: on pages, private, and not inherited by forked children, unless said."""

from __future__ import annotations

import mmap
from queue import Empty, SimpleQueue

from holdfast.errors import OutOfMemory


def take(nbytes: int, *, is_inherited: bool = False) -> mmap.mmap:
    """So much memory, or a byte. Forked children have a copy of it only if it `is_inherited`.

    Raises:
        OutOfMemory: the system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        found = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"{nbytes} bytes of memory are not to be had: {error}") from error
    for advice in ("MADV_HUGEPAGE",) if is_inherited else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            _advise(found, getattr(mmap, advice))
    return found


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        # Only advice: a kernel without it keeps ordinary pages and copies on fork.
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
        try:
            found = self._free.get_nowait()
        except Empty:
            return memoryview(take(nbytes))
        return found if found.nbytes >= nbytes else memoryview(take(nbytes))

    def give_back(self, buffer: memoryview) -> None:
        """It is not used any more."""
        self._free.put(buffer)
