"""Reads byte ranges of a local regular file, for all formats of other libraries."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast.errors import CorruptData, FormatError, StoreError


class LocalFile:
    """A regular file that is open for reading. Several threads may read it."""

    def __init__(self, path: Path) -> None:
        """Open the file; a link is followed, as the user named it.

        Raises:
            FormatError: it is a folder, a pipe or a device.
            StoreError: it cannot be opened.
        """
        self.path = path
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer.
            self._file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(self._file)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatError(f"{path}: not a regular file")

    def read(self, start: int, nbytes: int) -> bytes:
        """Read bytes from a position on; all of them.

        Raises:
            CorruptData: the file ends before them.
            StoreError: they cannot be read.
        """
        memory = bytearray(min(nbytes, max(self.nbytes - start, 0)))
        self.read_into(start, memoryview(memory), f"{self.path}")
        if len(memory) < nbytes:
            raise CorruptData(f"{self.path}: ends at byte {self.nbytes:,}, inside its content")
        return bytes(memory)

    def read_into(self, start: int, memory: memoryview, what: str) -> None:
        """Fill `memory` with the bytes from `start` on; `what` is for messages.

        Raises:
            CorruptData: the file ends before them.
            StoreError: they cannot be read.
        """
        while memory.nbytes:
            try:
                count = os.preadv(self._file, [memory], start)
            except OSError as error:
                raise StoreError(f"{what}: cannot be read: {error.strerror}") from error
            if not count:
                raise CorruptData(f"{what}: the file ends at byte {start:,}")
            start += count
            memory = memory[count:]

    def close(self) -> None:
        """Close the file; does nothing if it is closed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def first_bytes(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file, fewer if it is shorter; none of anything else."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(nbytes)
