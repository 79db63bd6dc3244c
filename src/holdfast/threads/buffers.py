"""Memory: page-aligned buffers, zeroed in forked children; pauses of the garbage collector."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from holdfast.errors import DeadlineExceeded, time_limit
from holdfast.system import private_memory


def allocate_pages(nbytes: int) -> mmap.mmap:
    """Allocate `nbytes` of page-aligned private memory, at least one byte.

    A forked child has its own copy, filled with zeros, which costs nothing until it is used. If it
    were missing there (MADV_DONTFORK), the child could map other memory at the same address, and
    would unmap that when it frees what it inherited.
    """
    return private_memory(nbytes, is_wiped_on_fork=True)


class Buffers:
    """Pool of reusable buffers, thread-safe: new memory costs one page fault a page."""

    def __init__(self) -> None:
        self._free: SimpleQueue[memoryview] = SimpleQueue()

    def acquire_buffer(self, nbytes: int) -> memoryview:
        """Return a page-aligned buffer of at least `nbytes`, a pooled one if it is large enough."""
        with suppress(Empty):
            found = self._free.get_nowait()
            if found.nbytes >= nbytes:
                return found
        return memoryview(allocate_pages(nbytes))

    def release_buffer(self, buffer: memoryview) -> None:
        """Put a buffer that is no longer used back into the pool."""
        self._free.put(buffer)


class LimitedBuffers:
    """Pool of a limited number of buffers of `nbytes`; by default allocated at their first use."""

    def __init__(self, num_buffers: int, nbytes: int, *, at_once: bool = False) -> None:
        self._nbytes = nbytes
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(memoryview(allocate_pages(nbytes)) if at_once else None)

    def acquire_buffer(self, timeout_s: float) -> memoryview:
        """Wait for a free, page-aligned buffer."""
        try:
            return self._free.get(timeout=timeout_s) or memoryview(allocate_pages(self._nbytes))
        except Empty:
            raise DeadlineExceeded(
                f"memory for blocks: none of them was written within {time_limit(timeout_s)}"
            ) from None

    def release_buffer(self, buffer: memoryview) -> None:
        """Put a buffer that is no longer used back into the pool."""
        self._free.put(buffer)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection in the block: it would take a quarter of the time of a load."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
