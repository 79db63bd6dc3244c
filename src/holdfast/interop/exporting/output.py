"""Writes the bytes of a new file past the page cache, while the next ones are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from holdfast.errors import DeadlineExceeded
from holdfast.interop.files import copy_bytes
from holdfast.store.local.oserrors import UNSUPPORTED
from holdfast.store.local.syscalls import preallocate
from holdfast.system import CLOSED_ON_EXEC
from holdfast.threads.buffers import allocate_pages
from holdfast.threads.workers import Workers, cancel

BLOCK_NBYTES = 4 << 20
"""Bytes of one write."""
_NUM_BLOCKS = 4
"""Blocks of memory, of which all but one are written at a time."""
_TIMEOUT_S = 600.0
"""Longest wait for one block to be written."""


class _Output:
    """The rest of a file that is written from its beginning, in blocks."""

    def __init__(self, file: BinaryIO, descriptor: int, workers: Workers) -> None:
        self._file = file
        self._descriptor = descriptor
        self._workers = workers
        self._free = [memoryview(allocate_pages(BLOCK_NBYTES)) for _ in range(_NUM_BLOCKS)]
        self._block = self._free.pop()
        self._num_filled = 0
        self._start = 0
        self._writing: deque[tuple[Future[None], memoryview]] = deque()

    def append_bytes(self, data: memoryview) -> None:
        """Write the next bytes, which are copied.

        Raises:
            OSError: a block cannot be written.
            DeadlineExceeded: one was not written within ten minutes.
        """
        while data.nbytes:
            count = min(data.nbytes, BLOCK_NBYTES - self._num_filled)
            copy_bytes(data[:count], self._block[self._num_filled : self._num_filled + count])
            self._num_filled += count
            data = data[count:]
            if self._num_filled == BLOCK_NBYTES:
                self._submit_block()

    def flush_writes(self) -> None:
        """Write what is left, and wait for all."""
        while self._writing:
            self._wait_for_write()
        self._file.seek(self._start)
        self._file.write(self._block[: self._num_filled])

    def cancel_writes(self) -> None:
        """Wait for the writes in progress; begin no other."""
        cancel([written for written, _ in self._writing], timeout_s=_TIMEOUT_S)

    def _submit_block(self) -> None:
        job = partial(self._write_block, self._block, self._start)
        self._writing.append((self._workers.submit(job), self._block))
        self._start += BLOCK_NBYTES
        self._num_filled = 0
        if not self._free:
            self._wait_for_write()
        self._block = self._free.pop()

    def _wait_for_write(self) -> None:
        written, block = self._writing[0]
        try:
            written.result(timeout=_TIMEOUT_S)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self._file.name}: a block was not written within {_TIMEOUT_S:.0f} s"
            ) from None
        self._writing.popleft()
        self._free.append(block)

    def _write_block(self, block: memoryview, start: int) -> None:
        done = os.pwrite(self._descriptor, block, start)
        while done < block.nbytes:  # a rest may have no length that direct writes take
            done += os.pwrite(self._file.fileno(), block[done:], start + done)


@contextmanager
def past_cache(file: BinaryIO, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
    """Yield a function that writes the `nbytes` bytes of a new, empty file.

    They are written through the cache where they must.
    """
    descriptor = open_direct(file)
    if descriptor is None:
        yield file.write
        return
    workers = Workers(_NUM_BLOCKS - 1, "holdfast-export")
    output = _Output(file, descriptor, workers)
    try:
        # Writes that make a file longer wait for each other.
        preallocate(descriptor, nbytes)
        yield output.append_bytes
        output.flush_writes()
    finally:
        output.cancel_writes()
        workers.close_pool()
        os.close(descriptor)


def open_direct(file: BinaryIO) -> int | None:
    """Open a new file once more with O_DIRECT; None if the file system refuses."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return None
    try:
        descriptor = os.open(file.name, os.O_WRONLY | CLOSED_ON_EXEC | direct)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        raise
    with memoryview(allocate_pages(BLOCK_NBYTES)) as block:
        try:
            os.pwrite(descriptor, block, 0)
            os.ftruncate(descriptor, 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                return None
            raise
    return descriptor
