"""Blocks in the shared memory of `holdfast run`, found by digest and read in place of stored ones.

Managers that are closed, or whose processes are dead, have staged them (decision 0069).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.events import Emitter
from holdfast.format.blocks import DIGEST_NBYTES, block_hasher
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.launched import memory_folder
from holdfast.loading.block_reader import FileBlocks
from holdfast.ownership.process import liveness
from holdfast.staging.shared import SharedFolder, StagingFolder
from holdfast.system import read_at

_PIECE_NBYTES = 1 << 20
"""Bytes that are hashed while the processor's cache still has them."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """Block in shared memory, and the digest that it must have."""

    path: Path
    start: int
    digest: bytes
    emit: Emitter

    def read_into(self, targets: Sequence[memoryview]) -> bool:
        """Copy the block to targets, in order; False, with a warning, if it has another digest.

        Then the targets are undefined, as they are if the memory is not there any more.
        """
        hasher, start = block_hasher(), self.start
        try:
            # Not mapped: each page would be faulted in.
            with self.path.open("rb", buffering=0) as file:
                for target in targets:
                    for at in range(0, len(target), _PIECE_NBYTES):
                        piece = target[at : at + _PIECE_NBYTES]
                        if read_at(file.fileno(), piece, start) != len(piece):
                            return False
                        hasher.update(piece)
                        start += len(piece)
        except OSError:
            return False  # of a manager that another rank has seen end
        if hasher.digest() == self.digest:
            return True
        self.emit(
            "warning",
            f"holdfast run --memory: block {self.start // BLOCK_NBYTES} of {self.path.name} is not "
            "what was staged, so it is read from the storage. If this happens again, test the "
            "memory of this host",
        )
        return False


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks that dead processes, or closed managers, have left in shared memory."""

    found: dict[bytes, StagedBlock] = field(default_factory=dict)
    """By digest."""

    @classmethod
    def of_ended_managers(cls, emit: Emitter) -> StagedBlocks | None:
        """Find the blocks of ended managers; None if there are none."""
        path = memory_folder()
        folders = [] if path is None else SharedFolder(Path(path)).staging_folders()
        found: dict[bytes, StagedBlock] = {}
        for folder in folders:
            if is_ended(folder):
                found.update((one.digest, one) for one in _blocks_in(folder, emit))
        return cls(found) if found else None

    def find_block(self, file: FileBlocks, number: int) -> StagedBlock | None:
        """Find a block of a stored file; None if storage has to be read."""
        return self.found.get(file.digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)])


def is_ended(folder: StagingFolder) -> bool:
    """Whether the manager of a folder is closed, or proven dead with its process."""
    process = folder.process
    return folder.is_closed or (process is not None and liveness(process) == "dead")


def _blocks_in(folder: StagingFolder, emit: Emitter) -> Iterator[StagedBlock]:
    # Without a record the process was killed while it staged: most blocks would be other bytes.
    for name in folder.arena_names() if folder.is_whole else ():
        with suppress(OSError):
            for number, digest in enumerate(folder.read_digests(name)):
                if digest is not None:
                    yield StagedBlock(folder.arena_path(name), number * BLOCK_NBYTES, digest, emit)
