"""Translation of an `OSError` to a `StoreError` with a helpful message."""

from __future__ import annotations

import errno
import os
import shutil
from types import TracebackType
from typing import Literal

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    StoreFull,
    TransientStoreError,
)
from holdfast.store.base import FreeSpace

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""Error numbers of operations that a file system does not support."""
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
"""Error numbers of opening a file while too many are open."""

Effect = Literal["none", "maybe", "done"]
"""What an operation has changed when it fails.

`none`: nothing that can be seen. `maybe`: the call that makes the change visible is under way, and
only an error in `_REFUSALS` proves that the change was not made. `done`: the change was made but
may not be durable, so every error leaves the outcome unknown.
"""

_REFUSALS = UNSUPPORTED | {
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
    errno.EMLINK,
    errno.EXDEV,
    errno.ENOSPC,
    errno.EDQUOT,
}
"""Errors of link(2), rename(2) and unlink(2) which prove that the change was not made. Any other
may come after it was made: from a disk, a network, or a file system in user space."""
_CLASSES: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ESTALE: TransientStoreError,
    errno.EAGAIN: TransientStoreError,
    errno.ETIMEDOUT: TransientStoreError,
    errno.EBUSY: TransientStoreError,
    errno.ENOTEMPTY: TransientStoreError,
    errno.ENOMEM: TransientStoreError,
    errno.EMFILE: TransientStoreError,
    errno.ENFILE: TransientStoreError,
}
_HINTS = {
    errno.ENOENT: "it, or the folder that it is in, does not exist",
    errno.ENOTDIR: "a part of its path is not a folder",
    errno.ELOOP: "it, or the folder that it is in, is a symbolic link, and none is followed inside "
    "a root. Put what it points to in its place (cp -r), or mount that there (mount --bind)",
    errno.ENOTEMPTY: "something was added to the folder while it was being removed",
    errno.ENAMETOOLONG: "this file system takes only shorter names",
}


class Reporting:
    """Turns an `OSError` of the block, which updates `effect`, into a `StoreError`."""

    def __init__(self, operation: str, path: str, *, nbytes: int | None = None) -> None:
        self.effect: Effect = "none"
        self._operation = operation
        self._path = path
        self._nbytes = nbytes

    def __enter__(self) -> Reporting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and error.errno is not None:
            raise self._store_error(error, error.errno) from error

    def _store_error(self, error: OSError, number: int) -> StoreError:
        name = errno.errorcode.get(number, str(number))
        message = f"{self._operation} {self._path}: {os.strerror(number)} ({name})"
        if self.effect == "done":
            return OutcomeUnknown(f"{message}, after the change and before it was durable")
        if self.effect == "maybe" and number not in _REFUSALS:
            return OutcomeUnknown(f"{message}; the change may or may not have been made")
        kind = _CLASSES.get(number, StoreError)
        if kind is StoreFull:
            return StoreFull(f"{message}; {self._describe_free_space()}")
        hint = _HINTS.get(number)
        return kind(f"{message}: {hint}" if hint else message)

    def _describe_free_space(self) -> str:
        asked = "" if self._nbytes is None else f"asked for {self._nbytes} bytes, and "
        try:
            free = free_space_at(self._path)
        except OSError as err:
            return f"{asked}the system does not report its free space ({err.strerror})"
        inodes = "" if free.inodes is None else f" and {free.inodes} inodes"
        reported = f"{asked}the system reports {free.nbytes} bytes{inodes} free"
        asked_nbytes = 1 if self._nbytes is None else self._nbytes
        if free.nbytes is None or free.nbytes < asked_nbytes or free.inodes == 0:
            return reported
        # The numbers are of the whole file system, and the refusal may be of a part of it.
        return (
            f"{reported}. Look for a quota, reserved blocks, or a full target of a file system "
            "with several (lfs df)"
        )


def free_space_at(path: str) -> FreeSpace:
    """Return the free space where `path` is, or would be; `OSError` if unknown."""
    while True:
        try:
            device = f"{os.stat(path).st_dev}"
            if not hasattr(os, "statvfs"):  # Windows
                return FreeSpace(shutil.disk_usage(path).free, None, device)
            found = os.statvfs(path)
            break
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
    # Some file systems, btrfs for one, make inodes on demand and report none at all.
    inodes = found.f_favail if found.f_files else None
    return FreeSpace(found.f_bavail * found.f_frsize, inodes, device)
