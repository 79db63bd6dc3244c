"""Looks up names below a root: inside open folders, or by paths on systems that lack those.

This module handles names, not keys. Functions raise `OSError` unless they say otherwise;
`LocalStore` turns those into store errors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast.errors import UnsupportedStore
from holdfast.store.local.files import READ, open_file
from holdfast.store.local.folders import opened_folder, scan
from holdfast.system import OPENS_FOLDERS


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
