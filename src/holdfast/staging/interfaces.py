"""Interfaces to a staged state: its files, and their blocks, which may still be being copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES, tree_file
from holdfast.format.tensors import TensorFile
from holdfast.threads.workers import Workers, cancel, gather_results

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

    def discard_digests(self) -> None:
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


class Content(Protocol):
    """The bytes of a file, some of which may still be copied while the file is written."""

    @property
    def nbytes(self) -> int:
        """Length of the file in bytes."""
        ...

    def block(self, number: int, timeout_s: float) -> memoryview:
        """Wait until a block is copied; return its memory. Called once for each block, in order."""
        ...

    def digest(self, number: int) -> bytes:
        """Compute the digest of a block that `block` has returned; in any thread."""
        ...

    def written(self, number: int) -> None:
        """Mark a block as written: its memory may be reused once it is hashed, too."""
        ...


class StagedContent(Content, Protocol):
    """The bytes of a tensor file, which can be compared with those of the last commit."""

    def is_unchanged(self, timeout_s: float) -> bool:
        """Whether every block is the same as in the last commit."""
        ...


class BytesContent(Content):
    """The bytes of a small file in memory; if uncompressed, it is written by one put."""

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
        """No-op: the memory is not reused."""


class StagingTransfer(Protocol):
    """Interface: copies one state from the live tensors into host memory."""

    is_early: bool
    """Whether blocks are written while copies that training waits for are still being made."""
    waited_s: float
    """Seconds that training has waited for copies."""

    def run_copies(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        """Make the copies that training waits for, and return when training may go on."""
        ...

    def content(self, known: KnownFile) -> StagedContent:
        """Return a reader of the blocks of one of the tensor files."""
        ...

    def cancel_copying(self, error: BaseException) -> None:
        """Stop copying, because training continues: the save of the state fails with `error`."""
        ...

    def wait_for_threads(self, timeout_s: float) -> None:
        """Wait until no thread copies for this transfer any more."""
        ...

    def release_waiters(self) -> None:
        """Release waiters: the save has ended, or reads no live tensor any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Staged state: tensor files, which may still be being copied, and encoded trees."""

    files: Mapping[str, tuple[KnownFile, ...]]
    trees: Mapping[str, bytes]
    kinds: Mapping[str, str]
    by_rank: frozenset[str] = frozenset()
    """Components of which each rank has its own state."""
    transfer: StagingTransfer

    @property
    def all_files(self) -> list[KnownFile]:
        """The tensor files of all components; files of unchanging tensors come last."""
        all_files = [known for files in self.files.values() for known in files]
        return sorted(all_files, key=lambda known: known.is_apart)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Length in bytes of each file but the index."""
        tensors = {known.file.name: known.file.nbytes for known in self.all_files}
        return tensors | {tree_file(name): len(tree) for name, tree in self.trees.items()}

    @property
    def nbytes(self) -> int:
        """Total length in bytes of all files but the index."""
        return sum(self.file_sizes.values())

    def compute_digests(self, known: KnownFile, workers: Workers, timeout_s: float) -> bytes:
        """Compute and return the joined digests of all blocks of a file, without writing it."""
        content = self.transfer.content(known)
        jobs = []
        # Hashed while the next block is copied; in waves each block's memory is needed for others,
        # and so is released by the thread that has hashed it.
        try:
            for number in range(len(known.digests)):
                content.block(number, timeout_s)
                jobs.append(workers.submit(partial(_digest_and_release, content, number)))
        except BaseException:
            # Later they would hash memory into which the next save copies.
            cancel(jobs, timeout_s=timeout_s)
            raise
        gather_results(jobs, timeout_s=timeout_s, what=f"digest of {known.file.name}")
        return known.all_digests()


def _digest_and_release(content: StagedContent, number: int) -> None:
    content.digest(number)
    content.written(number)
