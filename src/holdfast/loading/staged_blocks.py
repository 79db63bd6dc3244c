"""Blocks in the shared memory of `holdfast run`, found by digest and read in place of stored ones.

They are what managers of dead processes have staged, or closed ones (decision 0069).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holdfast.errors import CorruptData
from holdfast.events import Emitter
from holdfast.format.blocks import DIGEST_NBYTES, block_digest
from holdfast.launched import memory_folder
from holdfast.loading.block_reader import FileBlocks
from holdfast.ownership.process import liveness
from holdfast.staging.shared import SharedArena, SharedFolder, StagingFolder


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """One block in shared memory, which is to have a digest."""

    arena: SharedArena
    number: int
    digest: bytes
    emit: Emitter

    @property
    def memory(self) -> memoryview:
        """The memory of the block."""
        return self.arena.get_block(self.number)

    @property
    def values(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The memory of the block, as an array."""
        return np.frombuffer(self.memory, np.uint8)

    def is_right(self) -> bool:
        """Whether the memory still has that digest; if not, a warning is logged."""
        if block_digest(self.memory) == self.digest:
            return True
        self.emit(
            "warning",
            f"holdfast run --memory: block {self.number} of {self.arena.file.name} is not what was "
            "staged, so it is read from the storage. If this happens again, test the memory of "
            "this host",
        )
        return False


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks that dead processes, or closed managers, have left in shared memory."""

    found: dict[bytes, StagedBlock] = field(default_factory=dict)
    """By digest."""

    @classmethod
    def of_ended_managers(cls, emit: Emitter) -> StagedBlocks | None:
        """Find them; None if there are none."""
        path = memory_folder()
        folders = [] if path is None else SharedFolder(Path(path)).staging_folders()
        found: dict[bytes, StagedBlock] = {}
        for folder in folders:
            if is_ended(folder):
                found.update((one.digest, one) for one in _blocks_in(folder, emit))
        return cls(found) if found else None

    def find_block(self, file: FileBlocks, number: int) -> StagedBlock | None:
        """Find a block of a stored file; None: it has to be read."""
        return self.found.get(file.digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)])


def is_ended(folder: StagingFolder) -> bool:
    """Whether the manager of a folder is closed, or proven dead with its process."""
    process = folder.process
    return folder.is_closed or (process is not None and liveness(process) == "dead")


def _blocks_in(folder: StagingFolder, emit: Emitter) -> Iterator[StagedBlock]:
    # Without a record the process was killed while it staged: most blocks would be other bytes.
    for name in folder.arena_names() if folder.is_whole else ():
        with suppress(OSError):
            try:
                arena = SharedArena.open_arena(folder.path, name)
                for number, digest in enumerate(arena.known_digests()):
                    if digest is not None:
                        yield StagedBlock(arena, number, digest, emit)
            except CorruptData as error:
                emit("warning", f"holdfast run --memory: {error}; it is read from the storage")
