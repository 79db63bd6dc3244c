"""Opens, makes and removes folders below a root, without following symbolic links.

This module handles descriptors and names, not keys. Functions raise `OSError` unless they say
otherwise; `LocalStore` turns those into store errors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.errors import StoreError, UnsupportedStore
from holdfast.store.base import is_key
from holdfast.store.local.oserrors import UNSUPPORTED, Reporting
from holdfast.system import CLOSED_ON_EXEC, sync

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
