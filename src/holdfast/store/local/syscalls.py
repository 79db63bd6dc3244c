"""Linux system calls that `os` does not offer, called through the C library."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import struct
from dataclasses import dataclass

from holdfast.store.local.oserrors import UNSUPPORTED
from holdfast.system import IS_LINUX

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
