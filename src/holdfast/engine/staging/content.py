"""The bytes of a checkpoint file, block by block, as the code that writes it takes them."""

from __future__ import annotations

from typing import Protocol

from typing_extensions import override

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES


class Content(Protocol):
    """The bytes of a file, some of which may still be copied while the file is written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        ...

    def block(self, number: int, timeout_s: float) -> memoryview:
        """Wait for a block; its memory. Called once for each block, in order.

        Raises:
            DeadlineExceeded: it was not in time.
        """
        ...

    def digest(self, number: int) -> bytes:
        """The digest of a block after `block` returned it. From any thread."""
        ...

    def written(self, number: int) -> None:
        """Note that a block was written: its memory may be used again once it was hashed, too."""
        ...


class StagedContent(Content, Protocol):
    """The bytes of a staged tensor file."""

    def is_unchanged(self, timeout_s: float) -> bool:
        """Whether no block was seen to differ from what the last commit had.

        Raises:
            DeadlineExceeded: a block was not staged in time.
        """
        ...


class BytesContent(Content):
    """A small file held in memory. Without an encoder it is put into the store as a whole."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    @override
    def nbytes(self) -> int:
        return len(self.data)

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        return memoryview(self.data)[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    @override
    def digest(self, number: int) -> bytes:
        return blocks.block_digest(self.block(number, 0))

    @override
    def written(self, number: int) -> None:
        """No-op: the memory stays."""
