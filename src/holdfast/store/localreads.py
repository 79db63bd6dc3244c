"""Bytes of an open file into the caller's memory: past the page cache, or out of it.

A direct read (O_DIRECT) takes no copy and hardly any processor time, so a file that is not in the
page cache arrives as fast as the disk gives it, and the cache keeps what others have there. What
is cached is copied in small pieces, so that whoever looks at each finds it in the processor's
cache. Knows descriptors, nothing of keys; functions raise `OSError` unless they say otherwise.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

from holdfast.store.localfiles import address_of, read_exactly
from holdfast.store.oserrors import UNSUPPORTED
from holdfast.store.syscalls import DirectAlignment, direct_alignment, is_cached

try:
    import fcntl
except ImportError:  # not everywhere; without it every read goes through the page cache
    fcntl = None  # type: ignore[assignment]

Seen = Callable[[memoryview], object]
"""Called with each piece of the memory once its bytes are there, in order."""

PIECE_NBYTES = 1 << 20
"""What is copied from the page cache at a time. With the digest taken of each at once, 1 and 2 MiB
are the fastest: 239 ms for 2.5 GB on two cores, beside 368 for 8 MiB and 331 for 512 KiB."""
DIRECT_NBYTES_MIN = 256 * 1024
"""Shorter reads are left to the page cache, whose read-ahead serves their neighbours too."""

_PAGE = mmap.PAGESIZE
_REFUSALS = UNSUPPORTED | {errno.EFAULT}
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def fill(
    fd: int, memory: memoryview, start: int, *, what: str, seen: Seen, direct: bool, afresh: bool
) -> None:
    """Fill `memory` from byte `start` of a file; errors call it `what`.

    With `direct`, whole pages that are not cached are read directly, where the file system does
    that for memory like this. With `afresh` those that are cached are read from the disk again.

    `fd` must be the caller's own: its O_DIRECT flag is set for a while.

    Raises:
        CorruptData: the file ends before.
    """
    done = 0
    if (
        direct
        and len(memory) >= DIRECT_NBYTES_MIN
        and (afresh or not _is_cached(fd, memory, start))
    ):
        done = _read_direct(fd, memory, start)
        seen(memory[:done])
    if afresh and done < len(memory):
        _forget(fd, start + done, len(memory) - done)
    for at in range(done, len(memory), PIECE_NBYTES):
        piece = memory[at : at + PIECE_NBYTES]
        read_exactly(fd, piece, start + at, what=what)
        seen(piece)


def _is_cached(fd: int, memory: memoryview, start: int) -> bool:
    """Judged by the end of what is wanted: the beginning of a file is often there alone."""
    stop = start + len(memory)
    return is_cached(fd, max(start, stop - DIRECT_NBYTES_MIN), stop)


def _read_direct(fd: int, memory: memoryview, start: int) -> int:
    """Read what can be read directly; returns how many bytes of `memory` are filled."""
    told = direct_alignment(fd) or DirectAlignment(memory=_PAGE, offset=_PAGE)
    if not (_O_DIRECT and fcntl and told.memory and told.offset):
        return 0
    if start % told.offset or address_of(memory) % told.memory:
        return 0
    stop = len(memory) - len(memory) % told.offset
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError:
        return 0
    try:
        return _read_aligned(fd, memory[:stop], start, told.offset)
    except OSError as err:
        if err.errno not in _REFUSALS:
            raise
        return 0
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _read_aligned(fd: int, memory: memoryview, start: int, offset: int) -> int:
    done = 0
    while done < len(memory) and done % offset == 0:
        got = os.preadv(fd, [memory[done:]], start + done)
        if got == 0:
            break  # whoever reads the rest through the cache says where the file ends
        done += got
    return done


def _forget(fd: int, start: int, nbytes: int) -> None:
    """Drop clean pages from the cache, where the system takes such advice."""
    if hasattr(os, "posix_fadvise"):
        before = start % _PAGE  # a page of which only a part is named stays
        with suppress(OSError):
            os.posix_fadvise(fd, start - before, nbytes + before, os.POSIX_FADV_DONTNEED)
