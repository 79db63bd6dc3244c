"""Layout and block digests of a tensor file that is staged, without its memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorFile

if TYPE_CHECKING:
    from torch import Tensor

LARGE_NBYTES = 128 << 10
"""Minimum size of tensors that are copied one by one, by several threads and, with overlap, during
training; smaller ones are copied in one call. To plan and count one copy takes a few microseconds,
in which so many bytes are copied."""


class KnownFile:
    """Layout and block digests of a tensor file, and which tensors changed since a commit."""

    def __init__(self, file: TensorFile, *, is_apart: bool = False) -> None:
        self.file = file
        self.is_apart = is_apart
        """Whether the file holds tensors that are expected not to change."""
        self.digests: list[bytes | None] = [None] * blocks.num_blocks(file.nbytes)
        """Digest of each staged block; None where it is not computed."""
        self.differs = False
        """Whether a comparison found bytes that differ from those of the last commit."""
        self.changed: set[str] = set()
        """Keys of the tensors that a comparison found to differ."""
        self.large = [i for i, spec in enumerate(file.specs) if spec.nbytes >= LARGE_NBYTES]
        """Positions in the file of the tensors that are copied one by one."""
        self.small = [i for i, spec in enumerate(file.specs) if spec.nbytes < LARGE_NBYTES]
        """Positions in the file of the other tensors."""
        self._committed: list[bytes | None] | None = None
        self._versions: dict[int, tuple[int, int]] = {}
        self._committed_versions: dict[int, tuple[int, int]] = {}

    def blocks_of(self, position: int) -> range:
        """Return the numbers of the blocks that the tensor at `position` lies in."""
        start, nbytes = self.file.starts[position], self.file.specs[position].nbytes
        return range(start // BLOCK_NBYTES, -(-(start + nbytes) // BLOCK_NBYTES) if nbytes else 0)

    def note_version(self, position: int, source: Tensor) -> None:
        """Record address and version of the tensor at `position`, whose bytes are not compared."""
        version = -1 if source.is_inference() else source._version
        self._versions[position] = (source.data_ptr(), version)

    def clear_versions(self) -> None:
        """Clear the recorded tensor versions, at the start of a staging."""
        self._versions = {}

    def clear_digests(self, numbers: Iterable[int]) -> None:
        """Clear the digests of blocks into which bytes were, or will be, copied."""
        for number in numbers:
            self.digests[number] = None

    def doubt(self) -> None:
        """Discard all digests after a failed save, as its threads may still be copying."""
        # A new list: such a thread writes into the old one.
        self.digests = [None] * len(self.digests)
        self.differs = True

    def all_digests(self) -> bytes:
        """Return the digests of all blocks, joined in order; all must be computed."""
        known = [digest for digest in self.digests if digest is not None]
        assert len(known) == len(self.digests), self.file.name
        return b"".join(known)

    def record_commit(self) -> frozenset[str] | None:
        """Record that these bytes were committed; return the keys of the tensors that changed.

        None for the first checkpoint; others are compared with the one before. Tensors that were
        compared in place are known; for the rest the digests of their blocks are compared. A large
        tensor without a block of its own counts as unchanged if its version is, except in a file
        with `is_apart`: there its bytes have to be unchanged.
        """
        before, self._committed = self._committed, list(self.digests)
        changed, self.changed, self.differs = self.changed, set(), False
        versions, self._committed_versions = self._committed_versions, self._versions
        if before is None:
            return None
        moved = {
            n for n, pair in enumerate(zip(before, self.digests, strict=True)) if len({*pair}) > 1
        }
        for position in self.small if moved else ():
            if not moved.isdisjoint(self.blocks_of(position)):
                changed.add(self.file.specs[position].key)
        for position, version in self._versions.items():
            is_still = version == versions.get(position) and not self.is_apart
            inside = self._exclusive_blocks(position)
            if not moved.isdisjoint(inside or (() if is_still else self.blocks_of(position))):
                changed.add(self.file.specs[position].key)
        return frozenset(changed)

    def _exclusive_blocks(self, position: int) -> range:
        """Return the numbers of the blocks that hold nothing but this tensor."""
        start = self.file.starts[position]
        stop = start + self.file.specs[position].nbytes
        return range(-(-start // BLOCK_NBYTES), stop // BLOCK_NBYTES)
