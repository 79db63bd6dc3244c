"""Content of files that pass through a few buffers of host memory, block by block."""

from __future__ import annotations

import threading

from typing_extensions import override

from holdfast.format.blocks import block_digest
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.staging.interfaces import KnownFile, StagedContent
from holdfast.threads.buffers import LimitedBuffers


class PooledContent(StagedContent):
    """Content of a tensor file, of which a block is in memory until it is hashed and written."""

    def __init__(self, known: KnownFile, pool: LimitedBuffers) -> None:
        self._known = known
        self._file = known.file
        self._pool = pool
        self._buffers: dict[int, memoryview] = {}
        self._half_done: set[int] = set()
        self._lock = threading.Lock()

    @property
    @override
    def nbytes(self) -> int:
        return self._file.nbytes

    @override
    def digest(self, number: int) -> bytes:
        try:
            memory = self._buffers[number][: self.block_nbytes(number)]
            digest = self._known.digests[number] = block_digest(memory)
            return digest
        finally:
            self._free_buffer(number)

    @override
    def written(self, number: int) -> None:
        self._free_buffer(number)

    @override
    def is_unchanged(self, timeout_s: float) -> bool:
        # There is no copy to compare with, so blocks are hashed, up to the first that differs.
        for number, committed in enumerate([*self._known.digests]):
            self.block(number, timeout_s)
            digest = self.digest(number)
            self.written(number)
            if digest != committed:
                return False
        return True

    def _free_buffer(self, number: int) -> None:
        """Free a block's buffer on the second call, when it is both hashed and written."""
        # Called by the thread that hashes and by the one that writes.
        with self._lock:
            if number not in self._half_done:
                self._half_done.add(number)
                return
            buffer = self._buffers.pop(number)
        self._pool.release_buffer(buffer)

    def block_nbytes(self, number: int) -> int:
        """Return the length of a block."""
        return min(BLOCK_NBYTES, self._file.nbytes - number * BLOCK_NBYTES)
