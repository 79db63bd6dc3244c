"""Shared-memory folder of `holdfast run --memory`, in which staged states outlive their process.

The supervisor makes the folder, with its budget. Each manager has a subfolder with its
arenas, the digests of their blocks, and a record while they hold one whole state (decision 0069).
Without torch.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from holdfast.errors import CorruptData, OutOfMemory
from holdfast.format.blocks import DIGEST_NBYTES
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.records import Process
from holdfast.format.tensors import TensorFile
from holdfast.system import CLOSED_ON_EXEC, map_reserved, try_lock

T = TypeVar("T")

SUPERVISOR = "supervisor"
STAGED = "staged"
SETTLED = "settled"
_OWNER, _CLOSED, _LOCK, _USED = "process", "closed", "lock", "used"
_ARENA, _DIGESTS, _LAYOUT, _NEW = ".arena", ".digests", ".layout", ".new"
_SUBFOLDER = re.compile(r"m[0-9]+-[0-9a-f]{16}")
_UNKNOWN = bytes(DIGEST_NBYTES)
FINISH_S = 600.0
"""Longest time to finish the saves of a dead training, in seconds."""
ALL_DEAD = "all-dead"
"""Argument of the process that finishes saves: no other process uses the folder."""
_LOCK_S = 10.0
"""Longest wait for other processes that reserve memory."""


class Supervisor(msgspec.Struct, frozen=True):
    """Record of the process that made the folder, and of the bytes that arenas may take."""

    process: Process
    budget_nbytes: int


# Made at import: threads that decode a type for the first time at once may crash (msgspec 0.22).
_SUPERVISORS = msgspec.msgpack.Decoder(Supervisor)
_PROCESSES = msgspec.msgpack.Decoder(Process)
_LAYOUTS = msgspec.msgpack.Decoder(TensorFile)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record with its digest; it appears whole or not at all."""
    data = msgspec.msgpack.encode(record)
    aside = path.with_name(f"{path.name}{_NEW}")
    aside.write_bytes(blake3(data).digest() + data)
    aside.replace(path)


def read_record(path: Path, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Read a record; raises `CorruptData` if it is damaged, and `OSError` if it is not there."""
    data = path.read_bytes()
    if blake3(data[DIGEST_NBYTES:]).digest() != data[:DIGEST_NBYTES]:
        raise CorruptData(f"{path}: its digest does not fit its bytes")
    try:
        return decoder.decode(data[DIGEST_NBYTES:])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{path}: {error}") from error


def _names_in(folder: Path) -> list[str]:
    """List the names in a folder, sorted; none if another process has removed it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))
    return []


class SharedArena:
    """Memory of one tensor file, with the digests of its blocks as far as they are known."""

    def __init__(self, folder: Path, file: TensorFile, pages: mmap.mmap) -> None:
        self.file = file
        self.pages = pages
        self.memory = memoryview(pages)[: file.nbytes]
        self._digests = folder / f"{file.name}{_DIGESTS}"

    @classmethod
    def open_arena(cls, folder: Path, name: str) -> SharedArena:
        """Map the memory of a file that another process has made."""
        file = read_record(folder / f"{name}{_LAYOUT}", _LAYOUTS)
        path = folder / f"{name}{_ARENA}"
        if path.stat().st_size < file.nbytes:
            raise CorruptData(f"{path}: shorter than the {file.nbytes} bytes of {name}")
        with path.open("r+b") as opened:
            return cls(folder, file, mmap.mmap(opened.fileno(), max(file.nbytes, 1)))

    def get_block(self, number: int) -> memoryview:
        """Return the memory of a block."""
        return self.memory[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def note_digests(self, digests: list[bytes | None]) -> None:
        """Record the digests of all blocks; None where one is not known."""
        self._digests.write_bytes(b"".join(one or _UNKNOWN for one in digests))

    def note_digest(self, number: int, digest: bytes) -> None:
        """Record the digest of one block, computed after `note_digests`."""
        with suppress(OSError):  # not there yet, or removed
            fd = os.open(self._digests, os.O_WRONLY | CLOSED_ON_EXEC)
            try:
                os.pwrite(fd, digest, number * DIGEST_NBYTES)
            finally:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """Subfolder of one manager."""

    path: Path

    @classmethod
    def make_below(cls, root: Path, process: Process) -> StagingFolder:
        """Make the folder of a manager of this process."""
        # A new name: another process may still be removing an earlier folder.
        path = root / f"m{process.pid}-{os.urandom(8).hex()}"
        path.mkdir(mode=0o700)
        write_record(path / _OWNER, process)
        return cls(path)

    @property
    def process(self) -> Process | None:
        """Process that made the folder; None if that is not recorded."""
        with suppress(OSError, CorruptData):
            return read_record(self.path / _OWNER, _PROCESSES)
        return None

    @property
    def is_closed(self) -> bool:
        """Whether its manager no longer needs the folder."""
        return (self.path / _CLOSED).exists()

    @property
    def is_whole(self) -> bool:
        """Whether its arenas hold one whole state."""
        return self.record_path is not None

    @property
    def record_path(self) -> Path | None:
        """Path of the record of the state that is staged whole; None: there is none."""
        paths = (self.path / name for name in (STAGED, SETTLED))
        return next((path for path in paths if path.exists()), None)

    @property
    def is_settled(self) -> bool:
        """Whether the save of the recorded state has ended, with or without a commit."""
        return (self.path / SETTLED).exists()

    def record_staged(self, record: msgspec.Struct) -> None:
        """Record that the arenas hold one whole state."""
        write_record(self.path / STAGED, record)

    def settle(self) -> None:
        """Record that the save is committed, or not to be finished; no-op without a record."""
        with suppress(FileNotFoundError):
            (self.path / STAGED).rename(self.path / SETTLED)

    def withdraw(self) -> None:
        """Remove the record, before the arenas change or because their save has failed."""
        for name in (STAGED, SETTLED):
            (self.path / name).unlink(missing_ok=True)

    def record_close(self) -> None:
        """Record that the manager needs the folder no more."""
        with suppress(FileNotFoundError):
            (self.path / _CLOSED).touch()

    def arena_names(self) -> list[str]:
        """List the names of the tensor files that have arenas."""
        return [one.removesuffix(_ARENA) for one in _names_in(self.path) if one.endswith(_ARENA)]

    def arena_path(self, name: str) -> Path:
        """Return the path of the memory of a tensor file."""
        return self.path / f"{name}{_ARENA}"

    @property
    def nbytes(self) -> int:
        """Bytes of its arenas; another process may be removing them."""
        total = 0
        for name in self.arena_names():
            with suppress(FileNotFoundError):
                total += self.arena_path(name).stat().st_size
        return total

    def read_digests(self, name: str) -> list[bytes | None]:
        """Return the recorded digests of the blocks of a file; None where one is not known."""
        data = (self.path / f"{name}{_DIGESTS}").read_bytes()
        found = (
            data[start : start + DIGEST_NBYTES] for start in range(0, len(data), DIGEST_NBYTES)
        )
        return [one if one != _UNKNOWN else None for one in found]

    def drop_arena(self, name: str) -> None:
        """Remove an arena; its memory is freed when no process uses it any more."""
        for suffix in (_LAYOUT, _ARENA, _DIGESTS):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, and what Holdfast has written into it."""
        self.withdraw()
        for name in _names_in(self.path):
            if name.endswith((_ARENA, _DIGESTS, _LAYOUT, _NEW)):
                (self.path / name).unlink(missing_ok=True)
        # The owner last: without it the folder is nobody's.
        for name in (_CLOSED, _OWNER):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            self.path.rmdir()


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """Folder of a supervisor."""

    path: Path

    @classmethod
    def make_at(cls, path: Path, record: Supervisor) -> tuple[SharedFolder, int]:
        """Make the files of a supervisor's empty folder; returns it, and its descriptor of `hold`.

        The record comes last: without it the folder is nobody's.
        """
        folder = cls(path)
        (path / _USED).touch(mode=0o600)
        fd = folder.hold()
        write_record(path / SUPERVISOR, record)
        return folder, fd

    def hold(self, *, alone: bool = False) -> int:
        """Mark the folder as used, until the returned descriptor is closed, here and in forks.

        With `alone`, this proves that no other process uses it, in whatever namespace.

        Raises:
            OSError: it is used by another process, or removed.
        """
        fd = os.open(self.path / _USED, os.O_RDWR | CLOSED_ON_EXEC)
        if try_lock(fd, is_shared=not alone):
            return fd
        os.close(fd)
        raise OSError(f"{self.path}: {'used' if alone else 'removed'} by another process")

    @property
    def is_unfinished(self) -> bool:
        """Whether it has saves that are staged whole and not known to be committed."""
        return any(one.is_whole and not one.is_settled for one in self.staging_folders())

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor's record; raises `OSError` or `CorruptData`."""
        return read_record(self.path / SUPERVISOR, _SUPERVISORS)

    def staging_folders(self) -> list[StagingFolder]:
        """List the subfolders of managers."""
        found = (one for one in _names_in(self.path) if _SUBFOLDER.fullmatch(one))
        return [StagingFolder(self.path / one) for one in found]

    def reserve(self, folder: StagingFolder, file: TensorFile) -> SharedArena:
        """Reserve an arena within the budget; `OutOfMemory` if it does not fit."""
        budget = self.supervisor.budget_nbytes
        with self._locked():
            used = sum(one.nbytes for one in self.staging_folders())
            if used + file.nbytes > budget:
                raise OutOfMemory(
                    f"at least {used + file.nbytes:,} bytes are needed, more than its {budget:,}"
                )
            with (folder.path / f"{file.name}{_ARENA}").open("xb") as arena:
                arena.truncate(max(file.nbytes, 1))
        # Outside of the lock: the kernel clears all pages.
        write_record(folder.path / f"{file.name}{_LAYOUT}", file)
        with (folder.path / f"{file.name}{_ARENA}").open("r+b") as arena:
            pages = map_reserved(arena.fileno(), max(file.nbytes, 1))
        return SharedArena(folder.path, file, pages)

    def remove(self) -> None:
        """Remove the folder, and what Holdfast has written into it."""
        for folder in self.staging_folders():
            folder.remove()
        for name in (_LOCK, f"{SUPERVISOR}{_NEW}", SUPERVISOR, _USED):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | CLOSED_ON_EXEC, 0o600)
        try:
            end = time.monotonic() + _LOCK_S
            while not try_lock(fd):
                if time.monotonic() > end:
                    raise OutOfMemory(f"{self.path / _LOCK}: locked for more than {_LOCK_S:g} s")
                time.sleep(0.01)
            yield
        finally:
            os.close(fd)
