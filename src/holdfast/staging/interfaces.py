"""Interfaces to a staged state: its files, and their blocks, which may still be being copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from typing_extensions import override

from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES, tree_file
from holdfast.staging.layout import KnownFile
from holdfast.threads.workers import Workers, cancel, gather_results


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
        """Stop copying, because training continues: the save of the state fails with `error`.

        In waves, waits for the block that is being copied right now.
        """
        ...

    def wait_for_threads(self, timeout_s: float) -> None:
        """Wait until no thread copies for this transfer any more.

        Raises:
            DeadlineExceeded: one still does after `timeout_s` seconds.
        """
        ...

    def release_waiters(self) -> None:
        """Release waiters: the save has ended, or reads no live tensor any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Staged state: tensor files, which may still be being copied, and encoded trees."""

    files: Mapping[str, tuple[KnownFile, ...]]
    """The tensor files of each component."""
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
