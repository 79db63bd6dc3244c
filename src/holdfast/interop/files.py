"""Files of other libraries, read at positions, also by several threads."""

from __future__ import annotations

import io
import mmap
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import Self, override

from holdfast.errors import CorruptData, FormatError, StoreError
from holdfast.store.base import ignore
from holdfast.store.local.reads import DIRECT_NBYTES_MIN, OpenFile, fill_from_file
from holdfast.system import CLOSED_ON_EXEC
from holdfast.threads.buffers import Buffers

_COPIED_NBYTES = 64 << 10
"""Least bytes of a copy by numpy, which lets other threads run meanwhile."""


class ReadableFile(ABC):
    """A file of another library that is open for reading at positions. Thread-safe."""

    name: str
    """Path or URL, for messages."""
    nbytes: int

    @abstractmethod
    def read_into(self, start: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of the file, or raise `CorruptData` or `StoreError`."""

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes of the file; raises as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def stream(self, start: int, stop: int) -> io.BufferedReader:
        """Return a reader of a part of the file, which gives positions in the whole file."""
        return io.BufferedReader(_Part(self, start, stop), 1 << 18)

    @abstractmethod
    def close(self) -> None:
        """Close the file; no thread may be reading from it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalFile(ReadableFile):
    """Open local file, which is read past the page cache unless it is in it. Thread-safe."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.name = name
        self._file = OpenFile(descriptor)
        self._buffers = Buffers()
        self._written = self._now()
        self.nbytes = self._written[0]

    @classmethod
    def open_regular(cls, path: Path) -> LocalFile:
        """Open a regular file."""
        if not path.is_file():
            raise StoreError(f"{path}: not a regular file")
        try:
            return cls(os.open(path, os.O_RDONLY | CLOSED_ON_EXEC), str(path))
        except OSError as err:
            raise StoreError(f"{path}: cannot be opened: {err.strerror}") from err

    @override
    def read_into(self, start: int, memory: memoryview) -> None:
        memory = memory.cast("B")
        try:
            if memory.nbytes < DIRECT_NBYTES_MIN:
                self._fill_from_file(memory, start, direct=False)
            else:
                self._read_pages(start, memory)
            is_same = self._now() == self._written
        except OSError as error:
            raise StoreError(f"{self.name}: cannot be read: {error.strerror}") from error
        except CorruptData:
            if self._now() == self._written:
                raise
            is_same = False
        if not is_same:
            raise StoreError(
                f"{self.name}: was written to while it was read. Read it again when its writer is "
                "done, or a copy of it"
            )

    @override
    def close(self) -> None:
        self._file.close()

    def _now(self) -> tuple[int, int]:
        """Length and time of the last write: a file may be written anew in its place."""
        found = os.fstat(self._file.fd)
        return found.st_size, found.st_mtime_ns

    def _read_pages(self, start: int, memory: memoryview) -> None:
        """Read whole pages into aligned memory, as direct reads require, and copy from there."""
        page = mmap.PAGESIZE
        skipped, stop = start % page, start + memory.nbytes
        nbytes = max(stop, min(-(-stop // page) * page, self.nbytes)) - (start - skipped)
        buffer = self._buffers.acquire_buffer(nbytes)
        try:
            self._fill_from_file(buffer[:nbytes], start - skipped, direct=True)
            copy_bytes(buffer[skipped : skipped + memory.nbytes], memory)
        finally:
            self._buffers.release_buffer(buffer)

    def _fill_from_file(self, memory: memoryview, start: int, *, direct: bool) -> None:
        fill_from_file(
            self._file, memory, start, what=self.name, seen=ignore, direct=direct, afresh=False
        )


class _Part(io.RawIOBase):
    def __init__(self, file: ReadableFile, start: int, stop: int) -> None:
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


def copy_bytes(old: memoryview, new: memoryview) -> None:
    """Copy bytes to memory of the same length; other threads run meanwhile."""
    if new.nbytes < _COPIED_NBYTES:
        new[:] = old
    else:
        np.frombuffer(new, np.uint8)[:] = np.frombuffer(old, np.uint8)


def read_small_file(path: Path, max_nbytes: int) -> bytes:
    """Return all bytes of a regular file that may not be longer."""
    with LocalFile.open_regular(path) as file:
        if file.nbytes > max_nbytes:
            raise FormatError(f"{path}: {file.nbytes:,} bytes; at most {max_nbytes:,} are read")
        return file.read(0, file.nbytes)


def first_bytes(path: Path, nbytes: int) -> bytes:
    """Return the first bytes of a regular file, fewer if it is shorter; none of anything else."""
    if not os.path.isfile(path):
        return b""
    try:
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as err:
        raise StoreError(f"{path}: cannot be opened: {err.strerror}") from err
