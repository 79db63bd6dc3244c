"""Local files of other libraries, read at positions, also by several threads."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import CorruptData, StoreError


class LocalFile:
    """A local file that is open for reading. `name` is for messages."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.nbytes = os.fstat(descriptor).st_size

    @classmethod
    def open(cls, path: Path) -> LocalFile:
        """Open a regular file.

        Raises:
            StoreError: it cannot be opened, or is no regular file.
        """
        if not path.is_file():
            raise StoreError(f"{path}: not a regular file")
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            return cls(os.open(path, flags), str(path))
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
                count = self._read_some(position, left)
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

    def _read_some(self, position: int, memory: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [memory], position)
        with self._lock:  # macOS before 11, and Windows
            os.lseek(self._descriptor, position, os.SEEK_SET)
            data = os.read(self._descriptor, memory.nbytes)
        memory[: len(data)] = data
        return len(data)

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
