"""The bytes of a file of a checkpoint, block by block."""

from __future__ import annotations

from typing import Protocol

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES


class Content(Protocol):
    """The bytes of a file, which may still be copied while the file is written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        ...

    def block(self, number: int, timeout_s: float) -> memoryview:
        """The memory of a block, when it is there; asked for once, and in order.

        Raises:
            DeadlineExceeded: it was not in time.
        """
        ...

    def digest(self, number: int) -> bytes:
        """The digest of a block that is there, from any thread."""
        ...

    def written(self, number: int) -> None:
        """The memory of a block is not read any more for writing."""
        ...


class StagedContent(Content, Protocol):
    """The bytes of a staged tensor file."""

    def is_unchanged(self, timeout_s: float) -> bool:
        """Whether no block was seen to differ from what the last commit had.

        Raises:
            DeadlineExceeded: a block was not staged in time.
        """
        ...


class BytesContent:
    """A small file held in memory; without an encoder it is put as a whole."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return len(self.data)

    def block(self, number: int, timeout_s: float) -> memoryview:
        """See `Content.block`."""
        return memoryview(self.data)[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def digest(self, number: int) -> bytes:
        """See `Content.digest`."""
        return blocks.block_digest(self.block(number, 0))

    def written(self, number: int) -> None:
        """See `Content.written`; the memory stays."""
