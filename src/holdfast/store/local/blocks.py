"""Writing of large files in pieces by several threads, with O_DIRECT where it works.

A direct write (O_DIRECT) bypasses the page cache: it takes no copy, hardly any processor time, and
leaves nothing for the fsync to wait for. Only whole pages are written so; since pieces do not
overlap, no page is written both directly and through the cache, and the two stay consistent.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.errors import NotFound, StoreError, UnsupportedStore
from holdfast.events import logger
from holdfast.store.base import expect_inside, final_nbytes, flatten_buffer
from holdfast.store.local.folders import (
    FILE_MODE,
    NEW_FILE,
    NOFOLLOW,
    address_of,
    remove_quietly,
    sync_folder_fd,
    temporary_name,
    write_all,
)
from holdfast.store.local.syscalls import (
    UNSUPPORTED,
    DirectAlignment,
    Reporting,
    direct_alignment,
    preallocate,
)
from holdfast.system import CLOSED_ON_EXEC, sync

_PAGE = mmap.PAGESIZE
_REFUSED = "direct_io=True: this file system refuses O_DIRECT"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectFile:
    """A second descriptor of a file, with O_DIRECT, which takes only aligned writes.

    Addresses must be multiples of `memory` bytes, offsets and lengths of `offset` bytes.
    """

    fd: int
    memory: int
    offset: int

    def takes(self, address: int, start: int) -> bool:
        """Whether memory at `address` can be written directly to byte `start` of the file."""
        return address % self.memory == 0 and start % self.offset == 0


def open_direct(folder_fd: int, name: str) -> DirectFile | None:
    """Open the file for writing with O_DIRECT; None if the file system refuses the flag."""
    flags = os.O_WRONLY | NOFOLLOW | CLOSED_ON_EXEC | getattr(os, "O_DIRECT", 0)
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(name, flags, dir_fd=folder_fd)
    except OSError as err:
        if err.errno in UNSUPPORTED:
            return None
        raise
    alignment = direct_alignment(fd) or DirectAlignment(memory=_PAGE, offset=_PAGE)
    if not alignment.memory or not alignment.offset:
        os.close(fd)
        return None
    return DirectFile(fd=fd, memory=alignment.memory, offset=max(alignment.offset, _PAGE))


def takes_direct_writes(direct: DirectFile) -> bool:
    """Whether a direct write works: tries one of zeros at the beginning of a new file."""
    with mmap.mmap(-1, direct.offset) as zeros:
        try:
            os.pwrite(direct.fd, zeros, 0)
        except OSError as err:
            if err.errno in UNSUPPORTED:
                return False
            raise
    return True


class DirectWrites:
    """Decides whether one store writes its files with O_DIRECT: by option or by a trial.

    `wanted` is None for a trial: by `try_direct_writes`, else with the first file that is long
    enough.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._works = wanted
        self._has_warned = False
        self._lock = threading.Lock()

    def try_direct_writes(self, folder_fd: int) -> str:
        """Try direct writes with a scratch file; return a text on how files will be written."""
        if self._wanted is False:
            return "through the page cache, as direct_io=False asks"
        direct = _tried_directly(folder_fd)
        with self._lock:
            self._works = direct is not None
        if direct is not None:
            return f"bypassing the page cache (O_DIRECT), in multiples of {direct.offset} bytes"
        if self._wanted:
            raise UnsupportedStore(_REFUSED)
        return "through the page cache, because this file system refuses O_DIRECT"

    def open_direct_file(self, folder_fd: int, name: str, nbytes: int) -> DirectFile | None:
        """Open a new file of `nbytes` bytes for direct writes; None if they do not work."""
        with self._lock:
            direct = None if self._works is False else open_direct(folder_fd, name)
            if direct is not None and self._works is None and nbytes >= direct.offset:
                try:
                    self._works = takes_direct_writes(direct)
                except OSError:
                    os.close(direct.fd)
                    raise
        if direct is None and self._wanted:
            raise UnsupportedStore(_REFUSED)
        if direct is not None and not self._works:
            os.close(direct.fd)
            return None
        return direct

    def log_refusal(self, path: str, error: OSError) -> None:
        """Log once that a direct write was refused, and that the page cache is used instead."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "%s: a direct write was refused: %s. Refused writes go through the page cache, "
                "which is slower but equally safe",
                path,
                error,
            )


def _tried_directly(folder_fd: int) -> DirectFile | None:
    """Try direct writes with a scratch file in the folder; None if they do not work."""
    name = temporary_name()
    os.close(create_file(folder_fd, name, 0))
    try:
        direct = open_direct(folder_fd, name)
    finally:
        remove_quietly(folder_fd, name)
    if direct is None:
        return None
    try:
        return direct if takes_direct_writes(direct) else None
    finally:
        os.close(direct.fd)


def create_file(folder_fd: int, name: str, nbytes: int) -> int:
    """Create a file with `nbytes` bytes allocated; removed again if there is no space."""
    # Writable for now, because it may be opened once more for direct writes.
    fd = os.open(name, NEW_FILE, 0o666, dir_fd=folder_fd)
    try:
        preallocate(fd, nbytes)
    except OSError:
        os.close(fd)
        remove_quietly(folder_fd, name)
        raise
    return fd


class _WriterState(enum.Enum):
    WRITING = enum.auto()
    FINISHING = enum.auto()
    FINISHED = enum.auto()
    ABORTED = enum.auto()


class LocalBlockWriter:
    """`BlockWriter` of a local file. Owns the descriptors that are passed to it."""

    def __init__(
        self,
        folder_fd: int,
        fd: int,
        direct: DirectFile | None,
        *,
        path: str,
        nbytes: int,
        at_most: bool = False,
        warn: Callable[[str, OSError], None],
    ) -> None:
        """`warn` is called with path and error when a direct write is refused."""
        self._folder_fd = folder_fd
        self._fd = fd
        self._direct = direct
        self._path = path
        self._nbytes = nbytes
        self._at_most = at_most
        self._warn = warn
        self._lock = threading.Lock()
        self._state = _WriterState.WRITING
        self._calls_under_way = 0
        self._written_nbytes = 0
        # If a server gives files to another owner they stay writable, which does no harm.
        with suppress(PermissionError):
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & FILE_MODE)

    def write(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start`, directly from its memory where that is aligned."""
        piece = flatten_buffer(data)
        expect_inside(self._path, start, len(piece), self._nbytes)
        with self._change_state("write", becomes=_WriterState.WRITING):
            direct_nbytes = self._write_direct(start, piece)
            write_all(self._fd, piece[direct_nbytes:], start + direct_nbytes)
            with self._lock:
                self._written_nbytes += len(piece)

    def finish(self, nbytes: int | None = None) -> None:
        """Truncate the file to its length, and sync it and its folder.

        Raises:
            UsageError: `nbytes` is missing, or not what was planned, or more.
            StoreError: not every byte was written, or the sync failed, which is final.
            NotFound: somebody removed the file.
            OutcomeUnknown: the file is durable, its name may not be.
        """
        length = final_nbytes(nbytes, self._nbytes, at_most=self._at_most, what=self._path)
        with self._lock:
            missing_nbytes = length - self._written_nbytes
        if missing_nbytes:
            raise StoreError(
                f"finish {self._path}: {missing_nbytes} of {length} bytes were not written"
            )
        with self._change_state("finish", becomes=_WriterState.FINISHING) as report:
            if os.fstat(self._fd).st_size != length:
                os.ftruncate(self._fd, length)
            sync(self._fd)
            report.effect = "done"
            sync_folder_fd(self._folder_fd)
            if os.fstat(self._fd).st_nlink == 0:
                raise NotFound(f"finish {self._path}: the file was removed while it was written")
            with self._lock:
                self._state = _WriterState.FINISHED

    def abort(self) -> None:
        """Stop and remove the file, unless `finish` succeeded. Running calls may still end."""
        with self._lock:
            if self._state is _WriterState.FINISHED:
                return
            was_aborted = self._state is _WriterState.ABORTED
            self._state = _WriterState.ABORTED
            if not was_aborted and self._calls_under_way == 0:
                self._close_descriptors()

    @contextmanager
    def _change_state(self, operation: str, *, becomes: _WriterState) -> Iterator[Reporting]:
        # The last call closes the descriptors: a number closed under a running write could already
        # belong to another file.
        with self._lock:
            if self._state is not _WriterState.WRITING:
                raise StoreError(
                    f"{operation} {self._path}: the write has already been finished or aborted"
                )
            self._state = becomes
            self._calls_under_way += 1
        try:
            with Reporting(operation, self._path, nbytes=self._nbytes) as report:
                yield report
        finally:
            with self._lock:
                self._calls_under_way -= 1
                is_over = self._state in (_WriterState.FINISHED, _WriterState.ABORTED)
                if is_over and self._calls_under_way == 0:
                    self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._state is _WriterState.ABORTED:
            remove_quietly(self._folder_fd, os.path.basename(self._path))
        for fd in (self._fd, self._folder_fd, *([self._direct.fd] if self._direct else [])):
            # After the fsync there is nothing that closing could still lose.
            with suppress(OSError):
                os.close(fd)

    def _write_direct(self, start: int, piece: memoryview) -> int:
        direct = self._direct
        if direct is None or len(piece) < direct.offset:
            return 0
        if not direct.takes(address_of(piece), start):
            return 0
        stop = len(piece) - len(piece) % direct.offset
        done = 0
        while done < stop and done % direct.offset == 0:
            try:
                done += os.pwrite(direct.fd, piece[done:stop], start + done)
            except OSError as err:
                # Some kinds of mapped memory cannot be written from; the page cache can copy it.
                if err.errno not in (errno.EINVAL, errno.EFAULT):
                    raise
                self._warn(self._path, err)
                break
        return done
