"""Opens, makes and lists folders below a root, and files in them, following no symbolic links.

Files are written unnamed and then named. This module handles descriptors and names, not keys.
Functions raise `OSError` unless they say otherwise; `LocalStore` turns those into store errors.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from holdfast.errors import CorruptData, StoreError, TransientStoreError, UnsupportedStore
from holdfast.store.base import is_key, proof_of
from holdfast.store.local.syscalls import UNSUPPORTED, Reporting, rename_noreplace
from holdfast.system import CLOSED_ON_EXEC, OPENS_FOLDERS, PROC, read_at, sync, write_at

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
        return TransientStoreError(f"{name}: its temporary file was removed by another process")


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


_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | CLOSED_ON_EXEC
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def opened_folder(root: str, segments: Sequence[str]) -> Iterator[int]:
    """Open a folder and yield its descriptor; only `root` may be a symbolic link, nothing below."""
    try:
        fd = os.open(root, _FOLDER)
    except NotADirectoryError as err:
        raise StoreError(f"{root}: not a folder, so it cannot be a root") from err
    try:
        for segment in segments:
            outer, fd = fd, enter_folder(fd, segment)
            os.close(outer)
        yield fd
    finally:
        os.close(fd)


def enter_folder(folder_fd: int, name: str) -> int:
    """Open a folder inside an open one; return its descriptor."""
    try:
        return os.open(name, _FOLDER | _NOFOLLOW, dir_fd=folder_fd)
    except NotADirectoryError:
        # With O_DIRECTORY links raise ENOTDIR, too.
        if is_link(folder_fd, name):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def is_link(folder_fd: int, name: str) -> bool:
    """Whether `name` in an open folder is a symbolic link."""
    return stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)


def sync_folder_fd(fd: int) -> None:
    """Put a folder's names on stable storage."""
    try:
        sync(fd)
    except OSError as err:
        if err.errno in UNSUPPORTED:
            raise UnsupportedStore(
                f"the file system cannot sync a folder ({err.strerror}), so no name on it is "
                f"known to be durable; use another one for checkpoints"
            ) from err
        raise


def make_root(path: str, report: Reporting, *, exclusive: bool, is_known: bool) -> None:
    """Make the folder `path` and its ancestors, each durable in its parent unless it `is_known`."""
    path = os.path.realpath(path)
    missing = _missing_folders(path)
    if exclusive and not missing:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    for folder in missing:
        try:
            os.mkdir(folder)
        except FileExistsError:
            if exclusive and folder == path:
                raise
        report.effect = "done"
        with opened_folder(folder, ()) as fd:
            sync_folder_fd(fd)
        with opened_folder(os.path.dirname(folder), ()) as parent_fd:
            sync_folder_fd(parent_fd)
        report.effect = "none"
    if not missing and not is_known:
        with opened_folder(path, ()):
            _sync_name(path)


def make_folder_in(outer_fd: int, name: str, report: Reporting, *, exclusive: bool) -> None:
    """Make a folder inside an open one, durably; an existing one's name is made durable too."""
    is_new = True
    try:
        os.mkdir(name, dir_fd=outer_fd)
    except FileExistsError:
        if exclusive:
            raise
        is_new = False
    fd = enter_folder(outer_fd, name)
    try:
        report.effect = "done"
        if is_new:
            sync_folder_fd(fd)
        sync_folder_fd(outer_fd)
        report.effect = "none"
    finally:
        os.close(fd)


def _missing_folders(path: str) -> list[str]:
    missing: list[str] = []
    while not os.path.lexists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing


def _sync_name(path: str) -> None:
    # Another process made it, perhaps just now. A mount point has no name of its own to sync, and
    # without the right to read the parent the sync is left to whoever made the folder.
    parent = os.path.dirname(path)
    if os.stat(parent).st_dev == os.stat(path).st_dev:
        with suppress(PermissionError), opened_folder(parent, ()) as parent_fd:
            sync_folder_fd(parent_fd)


def scan(folder: int | str, *, sizes: bool) -> list[tuple[str, int]]:
    """List name and length of regular files and folders, whose names end with `/`.

    The folder is an open one, or a path. Lengths are 0 without `sizes`, which saves a call for
    each file. A symbolic link that leads out of the folder then counts as a folder, so that
    reading it raises. Other links and devices are left out.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.name + "/", 0))
                elif entry.is_file(follow_symlinks=False):
                    nbytes = entry.stat(follow_symlinks=False).st_size if sizes else 0
                    found.append((entry.name, nbytes))
                elif not sizes and entry.is_symlink() and _leads_out(folder, entry.name):
                    found.append((entry.name + "/", 0))
            except FileNotFoundError:
                continue  # it was removed while the folder was read
    return found


def _leads_out(folder: int | str, name: str) -> bool:
    """Whether a symbolic link points out of its own folder."""
    if isinstance(folder, str):
        return os.path.dirname(os.readlink(os.path.join(folder, name))) != ""
    return "/" in os.readlink(name, dir_fd=folder)


def names_of_no_objects(folder_fd: int) -> list[str]:
    """List what is in an open folder but regular files whose names are valid in keys, sorted."""
    with os.scandir(folder_fd) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not (is_key(entry.name) and entry.is_file(follow_symlinks=False))
        )


class Names(Protocol):
    """Lookup of names below a root. No symbolic link below the root is followed."""

    def expect_writable(self) -> None:
        """Raise `UnsupportedStore` if this system lacks what a durable write needs."""

    def open_folder(self, folder: str) -> AbstractContextManager[int]:
        """Open a folder below the root, for a write in it; yields its descriptor."""
        ...

    def open(self, key: str) -> int:
        """Open a file of any type for reading; return its descriptor."""
        ...

    def status(self, key: str) -> os.stat_result:
        """Return the status of a file, or of a symbolic link itself."""
        ...

    def scan(self, folder: str, *, sizes: bool) -> list[tuple[str, int]]:
        """List a folder, as `folders.scan` does."""
        ...

    def read_link_target(self, name: str) -> str:
        """Return the target of a symbolic link in the root itself."""
        ...


def names_below(root: str) -> Names:
    """Return the lookup that this system is capable of."""
    return OpenFolders(root) if OPENS_FOLDERS else Paths(root)


class OpenFolders:
    """Lookup inside folders that are opened one after the other, so that none can be exchanged."""

    def __init__(self, root: str) -> None:
        self._root = root

    def expect_writable(self) -> None:
        """No-op."""

    def open_folder(self, folder: str) -> AbstractContextManager[int]:
        """Open a folder below the root; yields its descriptor."""
        return opened_folder(self._root, segments_of(folder))

    def open(self, key: str) -> int:
        """Open a file of any type for reading; return its descriptor."""
        folder, _, name = key.rpartition("/")
        with self.open_folder(folder) as folder_fd:
            return open_file(folder_fd, name)

    def status(self, key: str) -> os.stat_result:
        """Return the status of a file, or of a symbolic link itself."""
        folder, _, name = key.rpartition("/")
        with self.open_folder(folder) as folder_fd:
            return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)

    def scan(self, folder: str, *, sizes: bool) -> list[tuple[str, int]]:
        """List a folder."""
        with self.open_folder(folder) as folder_fd:
            return scan(folder_fd, sizes=sizes)

    def read_link_target(self, name: str) -> str:
        """Return the target of a symbolic link in the root itself."""
        with self.open_folder("") as root_fd:
            return os.readlink(name, dir_fd=root_fd)


class Paths:
    """Lookup by paths, for reading only: no folder can be synced, so no write would be durable.

    A folder that is exchanged for a link between the check and the use is followed, which only
    someone who may write in the root can do.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def expect_writable(self) -> None:
        """Raise `UnsupportedStore`."""
        raise UnsupportedStore(
            f"{self._root}: this system cannot sync a folder, so nothing is saved or changed here; "
            "save on Linux or macOS (on Windows: in WSL), or to a bucket, such as s3://…"
        )

    def open_folder(self, folder: str) -> AbstractContextManager[int]:
        """Raise `UnsupportedStore`."""
        self.expect_writable()
        raise AssertionError

    def open(self, key: str) -> int:
        """Open a file for reading; return its descriptor."""
        return os.open(self._resolve_path(key), READ)

    def status(self, key: str) -> os.stat_result:
        """Return the status of a file, or of a symbolic link itself."""
        folder, _, name = key.rpartition("/")
        return os.lstat(os.path.join(self._resolve_path(folder), name))

    def scan(self, folder: str, *, sizes: bool) -> list[tuple[str, int]]:
        """List a folder."""
        return scan(self._resolve_path(folder), sizes=sizes)

    def read_link_target(self, name: str) -> str:
        """Return the target of a symbolic link in the root itself."""
        path = os.path.join(self._root, name)
        if not os.path.islink(path):
            os.lstat(path)  # raises if it is missing
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return os.readlink(path)

    def _resolve_path(self, key: str) -> str:
        """Return the path of a key, no part of which is a symbolic link."""
        path = self._root
        for segment in segments_of(key):
            path = os.path.join(path, segment)
            if os.path.islink(path):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return path


def segments_of(folder: str) -> Sequence[str]:
    """Split a path below a root into its names; none for the root itself."""
    return folder.split("/") if folder else ()
