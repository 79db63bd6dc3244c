"""Packs encoded blocks, in order, into 8 MiB pieces for writes to a store.

Stored blocks have any length. A store takes pieces of 8 MiB at multiples of that, from page-aligned
memory, so that direct writes stay direct and an upload has equal parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from holdfast.errors import DeadlineExceeded, time_limit
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.base import Buffer
from holdfast.threads.buffers import allocate_pages

NUM_PIECES = 9
"""Pieces in the pool: one that is being filled, and one for each writer."""


class Pieces:
    """Pool of 8 MiB buffers for packed blocks, each allocated at first use."""

    def __init__(self, num_pieces: int = NUM_PIECES) -> None:
        self._free: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(num_pieces):
            self._free.put(None)

    def acquire_buffer(self, timeout_s: float) -> memoryview:
        """Take a free, page-aligned buffer from the pool; the caller gives it back."""
        try:
            return self._free.get(timeout=timeout_s) or memoryview(allocate_pages(BLOCK_NBYTES))
        except Empty:
            raise DeadlineExceeded(
                f"memory for stored blocks: no piece was written within {time_limit(timeout_s)}"
            ) from None

    def release_buffer(self, piece: memoryview) -> None:
        """Return a buffer to the pool."""
        self._free.put(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An encoded block and its digest."""

    data: Buffer
    digest: bytes


class Packer:
    """Packs the encoded blocks of one file into pieces. Not thread-safe."""

    def __init__(
        self, pieces: Pieces, send: Callable[[int, memoryview, int], None], timeout_s: float
    ) -> None:
        """Pass full pieces to `send(offset, piece, used_nbytes)`, which then owns the piece."""
        self._pieces = pieces
        self._send = send
        self._timeout_s = timeout_s
        self._piece: memoryview | None = None
        self._start = 0
        self._used = 0
        self._lengths: list[int] = []
        self._digests: list[bytes] = []

    def append_block(self, block: Encoded) -> None:
        """Append the next block; each full piece is passed to `send`."""
        data = memoryview(block.data)
        self._lengths.append(data.nbytes)
        self._digests.append(block.digest)
        while data.nbytes:
            if self._piece is None:
                self._piece = self._pieces.acquire_buffer(self._timeout_s)
            part = data[: BLOCK_NBYTES - self._used]
            _copy_memory(self._piece[self._used : self._used + part.nbytes], part)
            self._used += part.nbytes
            data = data[part.nbytes :]
            if self._used == BLOCK_NBYTES:
                self._flush()

    def send_rest(self) -> None:
        """Pass the last piece, which may be partly filled, to `send`."""
        self._flush()

    @property
    def packed_blocks(self) -> StoredBlocks:
        """Lengths and digests of the blocks packed so far."""
        return StoredBlocks(tuple(self._lengths), b"".join(self._digests))

    def _flush(self) -> None:
        if self._piece is not None:
            piece, used = self._piece, self._used
            self._piece, self._used = None, 0
            self._send(self._start, piece, used)
            self._start += used


def _copy_memory(target: memoryview, source: memoryview) -> None:
    # NumPy lets other threads run meanwhile, which assigning to a memoryview does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
