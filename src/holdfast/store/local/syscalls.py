"""Linux system calls that `os` does not offer, and translation of `OSError`s to `StoreError`s."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import shutil
import struct
from dataclasses import dataclass
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
from holdfast.system import IS_LINUX

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
    errno.ENAMETOOLONG: "this file system allows only shorter names",
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


_RENAME_NOREPLACE = 1
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_STX_DIO_MEM_ALIGN_AT = 152
_STATFS_NBYTES = 512
_SYS_CACHESTAT = 451
"""Number of cachestat(2): the same on every architecture but alpha, which refuses this one."""
_CACHESTAT_NBYTES = 40
_NETWORK_KINDS = frozenset({0x6969, 0xFF534D42, 0xFE534D42, 0x517B})
"""File system types of NFS and of three generations of SMB: `f_type` of statfs(2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAlignment:
    """Alignment for O_DIRECT, in bytes: of memory addresses, and of offsets and lengths."""

    memory: int
    offset: int


def rename_noreplace(folder_fd: int, source: str, target: str) -> None:
    """Rename a file in its folder atomically; `OSError` EEXIST if `target` exists."""
    call = _function("renameat2")
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    names = os.fsencode(source), os.fsencode(target)
    if call(folder_fd, names[0], folder_fd, names[1], ctypes.c_uint(_RENAME_NOREPLACE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def preallocate(fd: int, nbytes: int) -> None:
    """Give a file `nbytes` of space, if the file system can without writing; `OSError` if full."""
    call = _function("fallocate64") or _function("fallocate")
    if call is None or nbytes == 0:
        return
    while call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number in UNSUPPORTED:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def is_network(fd: int) -> bool:
    """Whether an open file or folder is on a network file system, whose clients cache names."""
    call = _function("fstatfs")
    reply = ctypes.create_string_buffer(_STATFS_NBYTES)
    if call is None or call(fd, reply) != 0:
        return False
    (kind,) = struct.unpack_from("@l", reply, 0)
    return kind in _NETWORK_KINDS


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Return the alignment for O_DIRECT; zeros: refused, None: unknown (before Linux 6.1)."""
    call = _function("statx")
    if call is None:
        return None
    reply = ctypes.create_string_buffer(_STATX_NBYTES)
    if call(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), reply) != 0:
        return None
    (mask,) = struct.unpack_from("=I", reply, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", reply, _STX_DIO_MEM_ALIGN_AT)
    return DirectAlignment(memory=memory, offset=offset)


def is_cached(fd: int, start: int, stop: int) -> bool:
    """Whether most of the pages from byte `start` of a file to `stop` are in the page cache.

    True also if the system does not say: not every file can be mapped, and the kernel gives false
    answers for files that the caller neither owns nor may write.
    """
    first, num_pages = _pages(start, stop)
    found = _count_by_cachestat(fd, first, stop - first)
    if found is None:
        found = _count_by_mincore(fd, first, stop - first)
    return found is None or found * 2 > num_pages


def is_all_cached(fd: int, start: int, stop: int) -> bool:
    """Whether all pages from byte `start` of a file to `stop` are certainly in the page cache."""
    first, num_pages = _pages(start, stop)
    return _count_by_cachestat(fd, first, stop - first) == num_pages


def _pages(start: int, stop: int) -> tuple[int, int]:
    """Return the start of the first page of a range of bytes, and the number of its pages."""
    first = start - start % mmap.PAGESIZE
    return first, -(-(stop - first) // mmap.PAGESIZE)


def _count_by_cachestat(fd: int, start: int, nbytes: int) -> int | None:
    """Count cached pages by cachestat(2), since Linux 6.5; None if it is not available.

    It maps nothing. A mapping waits for the page faults of all other threads, and loading threads
    fault in all the memory that they load into.
    """
    call = _function("syscall")
    if call is None:
        return None
    wanted = struct.pack("=QQ", start, nbytes)
    reply = ctypes.create_string_buffer(_CACHESTAT_NBYTES)
    if call(ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), wanted, reply, ctypes.c_uint(0)) != 0:
        return None
    return int(struct.unpack_from("=Q", reply)[0])


def _count_by_mincore(fd: int, start: int, nbytes: int) -> int | None:
    """Count cached pages by mincore(2); None if it is not available."""
    call = _function("mincore")
    before = start % mmap.ALLOCATIONGRANULARITY
    if call is None:
        return None
    try:
        mapped = mmap.mmap(
            fd, before + nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start - before
        )
    except (OSError, ValueError):  # the file cannot be mapped, or was truncated meanwhile
        return None
    import numpy as np  # here, because commands that read documents do without

    with mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        if call(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages.ctypes) != 0:
            return None
    return int(np.count_nonzero(pages[before // mmap.PAGESIZE :] & 1))


@functools.cache
def _function(name: str) -> ctypes._NamedFuncPointer | None:
    if not IS_LINUX:
        return None
    found: ctypes._NamedFuncPointer | None
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    return found
