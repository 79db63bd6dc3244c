"""Files in an open folder: opened without following links, written unnamed and then named.

This module handles descriptors and names, not keys. Functions raise `OSError` unless they say
otherwise; `LocalStore` turns those into store errors.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.errors import CorruptData, StoreError, TransientStoreError, UnsupportedStore
from holdfast.store.base import proof_of
from holdfast.store.local.syscalls import UNSUPPORTED, rename_noreplace
from holdfast.system import CLOSED_ON_EXEC, PROC, read_at, sync, write_at

TEMPORARY_PREFIX = ".tmp-"
FILE_MODE = 0o444
"""Mode of finished files: read-only, because no file is written twice."""

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# O_NONBLOCK: opening a fifo for reading would otherwise wait for a writer.
READ = os.O_RDONLY | NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | CLOSED_ON_EXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOSED_ON_EXEC
_UNNAMED = os.O_WRONLY | getattr(os, "O_TMPFILE", 0) | CLOSED_ON_EXEC
_NO_UNNAMED = UNSUPPORTED | {errno.EISDIR}
_REMOVED = "the folder was removed"
NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV}
"""Error numbers by which a file system refuses a link."""
OWN_FDS = f"{PROC}/self/fd"
"""Folder with a link from each descriptor number to its open file; not on every system."""


def temporary_name() -> str:
    """Make a random name that no key can have."""
    name = TEMPORARY_PREFIX + secrets.token_hex(8)
    return f"{name}-{proof_of(name)}"


def is_temporary_name(name: str) -> bool:
    """Whether `temporary_name` made this name, and no other program."""
    start, _, proof = name.rpartition("-")
    return start.startswith(TEMPORARY_PREFIX) and proof == proof_of(start)


def open_file(folder_fd: int, name: str) -> int:
    """Open `name`, of any file type, for reading; `regular_nbytes` checks the type."""
    return os.open(name, READ, dir_fd=folder_fd)


def regular_nbytes(found: os.stat_result, *, what: str) -> int:
    """Return the length of a regular file from its stat result; errors call it `what`."""
    if stat.S_ISREG(found.st_mode):
        return found.st_size
    if stat.S_ISDIR(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), what)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), what)
    raise StoreError(f"{what}: not a regular file ({stat.filemode(found.st_mode)})")


def link_file(source_fd: int, source: str, folder_fd: int, name: str) -> None:
    """Link a regular file into another folder; `FileExistsError` if the name is taken there."""
    os.link(source, name, src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    # Checked under the new name, which no one else gives to another file.
    if not stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder_fd)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", source)


def address_of(data: memoryview) -> int:
    """Return the memory address of a contiguous buffer."""
    # ctypes would need a writable buffer.
    # Imported here: commands only read documents, and numpy is slow to import.
    import numpy as np

    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def read_exactly(fd: int, buffer: memoryview, start: int, *, what: str) -> None:
    """Fill `buffer` from byte `start` of an open file."""
    done = 0
    while done < len(buffer):
        got = read_at(fd, buffer[done:], start + done)
        if got == 0:
            raise CorruptData(
                f"{what}: ends at byte {start + done}, expected {start + len(buffer)}"
            )
        done += got


def write_all(fd: int, data: memoryview, start: int) -> None:
    """Write all of `data` at byte `start`, in as many calls as that takes."""
    done = 0
    while done < len(data):
        done += write_at(fd, data[done:], start + done)


class Draft:
    """A temporary file whose bytes are synced, and which has no key yet."""

    def __init__(self, folder_fd: int, fd: int, temporary: str | None) -> None:
        self._folder_fd = folder_fd
        self._fd = fd
        self._temporary = temporary

    def link_draft(self, name: str) -> bool:
        """Make a hard link `name` to the draft; False if the file system has no hard links."""
        source = self._temporary or f"{OWN_FDS}/{self._fd}"
        try:
            # Follows the link in /proc, which is how an unnamed file gets a name.
            os.link(source, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        except FileNotFoundError as err:
            raise self._vanished(name) from err
        except OSError as err:
            if err.errno in NO_LINKS:
                return False
            raise
        return True

    def rename_new(self, name: str) -> None:
        """Rename the draft from its temporary name to `name`, which must be new."""
        assert self._temporary is not None
        try:
            rename_noreplace(self._folder_fd, self._temporary, name)
        except FileNotFoundError as err:
            raise self._vanished(name) from err
        except OSError as err:
            if err.errno in UNSUPPORTED:
                raise UnsupportedStore(
                    "the file system has neither hard links nor renames that refuse to replace, "
                    "so it cannot keep two writers apart; use another one for checkpoints"
                ) from err
            raise

    def rename_over(self, name: str) -> bool:
        """Rename the draft to `name`, replacing a file atomically; False: no hard links."""
        source = self._temporary or temporary_name()
        if self._temporary is None and not self.link_draft(source):
            return False
        try:
            replace_with(self._folder_fd, source, name)
        except FileNotFoundError as err:
            raise self._vanished(name) from err
        return True

    def _vanished(self, name: str) -> Exception:
        if _is_removed(self._folder_fd):
            return FileNotFoundError(errno.ENOENT, _REMOVED, name)
        return TransientStoreError(f"{name}: its temporary file was removed by somebody")


@contextmanager
def drafted(folder_fd: int, data: memoryview, *, unnamed: bool = True) -> Iterator[Draft]:
    """Write `data` to a new synced file in the folder, removed at the end unless it got a name.

    With `unnamed` the file has no name at all, where the system supports that. A failed fsync is
    final: the kernel may have dropped the pages, and a second one would report success.
    """
    fd, temporary = _create_aside(folder_fd, unnamed=unnamed)
    try:
        write_all(fd, data, 0)
        sync(fd)
        yield Draft(folder_fd, fd, temporary)
    finally:
        if temporary is not None:
            remove_quietly(folder_fd, temporary)
        os.close(fd)


def _is_removed(folder_fd: int) -> bool:
    """Whether an open folder has been removed."""
    return os.fstat(folder_fd).st_nlink == 0


def _create_aside(folder_fd: int, *, unnamed: bool) -> tuple[int, str | None]:
    if unnamed and hasattr(os, "O_TMPFILE") and os.path.isdir(OWN_FDS):
        try:
            return os.open(".", _UNNAMED, FILE_MODE, dir_fd=folder_fd), None
        except OSError as err:
            if err.errno == errno.EPERM and _is_removed(folder_fd):  # Linux: the folder was removed
                raise FileNotFoundError(errno.ENOENT, _REMOVED) from err
            if err.errno not in _NO_UNNAMED:
                raise
    name = temporary_name()
    return os.open(name, NEW_FILE, FILE_MODE, dir_fd=folder_fd), name


def replace_with(folder_fd: int, source: str, name: str) -> None:
    """Rename `source` to `name`, replacing a file atomically; on failure `source` is removed."""
    try:
        os.replace(source, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except OSError:
        remove_quietly(folder_fd, source)
        raise


def remove_quietly(folder_fd: int, name: str) -> None:
    """Remove a temporary file that may be missing; one that stays is left to `sweep`."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder_fd)
