"""Opens, makes and lists folders below a root, and looks up names, following no symbolic links.

This module handles descriptors and names, not keys. Functions raise `OSError` unless they say
otherwise; `LocalStore` turns those into store errors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

from holdfast.errors import StoreError, UnsupportedStore
from holdfast.store.base import is_key
from holdfast.store.local.files import READ, open_file
from holdfast.store.local.syscalls import UNSUPPORTED, Reporting
from holdfast.system import CLOSED_ON_EXEC, OPENS_FOLDERS, sync

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
