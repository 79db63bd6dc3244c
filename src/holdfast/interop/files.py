"""Local files of other libraries, read at positions, also by several threads."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import CorruptData, StoreError
from holdfast.system import CLOSED_ON_EXEC, read_at


class LocalFile:
    """A local file that is open for reading. `name` is for messages."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    @classmethod
    def open(cls, path: Path) -> LocalFile:
        """Open a regular file.

        Raises:
            StoreError: it cannot be opened, or is no regular file.
        """
        if not path.is_file():
            raise StoreError(f"{path}: not a regular file")
        try:
            return cls(os.open(path, os.O_RDONLY | CLOSED_ON_EXEC), str(path))
        except OSError as err:
            raise StoreError(f"{path}: cannot be opened: {err.strerror}") from err

    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes from `start` on.

        Raises:
            CorruptData: the file ends before them.
            StoreError: they cannot be read.
        """
        position, left = start, memory.cast("B")
        while left.nbytes:
            try:
                count = read_at(self._descriptor, left, position)
            except OSError as err:
                raise StoreError(f"{self.name}: cannot be read: {err.strerror}") from err
            if not count:
                raise CorruptData(f"{self.name}: ends at byte {position:,}, inside a tensor")
            position += count
            left = left[count:]

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file; raises as `read_into` does."""
        data = bytearray(nbytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def stream(self, start: int, stop: int) -> io.BufferedReader:
        """Return a reader of a part of the file, which gives positions in the whole file."""
        return io.BufferedReader(_Part(self, start, stop), 1 << 18)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Part(io.RawIOBase):
    def __init__(self, file: LocalFile, start: int, stop: int) -> None:
        self._file = file
        self._position = start
        self._stop = stop

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stop}[whence]
        self._position = min(max(base + offset, 0), 1 << 62)
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer)
        count = max(0, min(memory.nbytes, self._stop - self._position))
        if count:
            self._file.read_into(self._position, memory[:count])
        self._position += count
        return count
