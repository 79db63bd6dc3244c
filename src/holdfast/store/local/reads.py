"""Reads from an open file into the caller's memory: directly, or from the page cache.

A direct read (O_DIRECT) takes no copy and hardly any processor time, so a file that is not cached
is read as fast as the disk allows, and other files stay in the cache. Cached bytes are copied in
small pieces, so that a digest finds each in the processor's cache. This module handles
descriptors, not keys; functions raise `OSError` unless they say otherwise.

To open a file takes a good part of the time to read a block of it, and threads wait for each other
there. So a file can stay open while many parts of it are read (`OpenFiles`).
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.store.base import Seen
from holdfast.store.local.folders import OWN_FDS, address_of, read_exactly
from holdfast.store.local.syscalls import (
    UNSUPPORTED,
    DirectAlignment,
    direct_alignment,
    is_all_cached,
    is_cached,
)
from holdfast.system import CLOSED_ON_EXEC, read_at

PIECE_NBYTES = 1 << 20
"""Bytes that are copied from the page cache at a time. If each piece is digested at once, 1 and
2 MiB are fastest: 239 ms for 2.5 GB on two cores; 368 ms with 8 MiB and 331 ms with 512 KiB."""
DIRECT_NBYTES_MIN = 256 * 1024
"""Least bytes of a direct read; shorter reads use the page cache and its read-ahead."""

_NUM_OPEN = 32
"""Most files that stay open; loads read few files at a time."""
_PAGE = mmap.PAGESIZE
_REFUSALS = UNSUPPORTED | {errno.EFAULT}
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_MAX_PARTS = 1024
"""Most buffers of one preadv(2): IOV_MAX of Linux."""


class OpenFile:
    """A regular file that is open for reading, with a second descriptor for direct reads.

    Owns its descriptors. Any number of threads may read; the last reference closes the file, so
    that no descriptor is closed that a thread still reads from.
    """

    def __init__(self, fd: int, alignment: DirectAlignment | None = None) -> None:
        self.fd = fd
        self.alignment = alignment
        """Alignment that reads must have; None if the file is read through the page cache."""
        self._direct: tuple[OpenFile | None] | None = None

    def __del__(self) -> None:
        if os:  # modules are None at the end of the process, which closes the file
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether the file is still open."""
        return self.fd >= 0

    def close(self) -> None:
        """Close the file now; no other thread may be reading from it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self._direct and self._direct[0]:
            self._direct[0].close()

    def direct(self) -> OpenFile | None:
        """Return the same file opened with O_DIRECT; None if that is refused."""
        # No lock, as a forked child could inherit it locked: of two threads the later one wins.
        found = self._direct
        if found is None:
            found = self._direct = (_opened_directly(self.fd),)
        return found[0]


class OpenFiles:
    """Cache of at most `_NUM_OPEN` open files, used while a caller reads many parts of them."""

    def __init__(self) -> None:
        self._readers: set[object] = set()
        self._files: dict[str, OpenFile] = {}

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep files open that any thread opens within the `with` block."""
        reader = object()
        self._readers.add(reader)
        try:
            yield
        finally:
            self._readers.discard(reader)
            # A reader that begins just now opens again what it needs.
            if not self._readers:
                self._files.clear()

    def get(self, path: str) -> OpenFile | None:
        """Return the file if it is kept open; None if not, or if the path is another file now."""
        file = self._files.get(path)
        if file is None or _is_at(path, file):
            return file
        self.forget_file(path)
        return None

    def keep(self, path: str, file: OpenFile) -> bool:
        """Keep a file open, if a caller is within `keep_open`; return whether it is kept."""
        if not self._readers:
            return False
        self._files[path] = file
        for oldest in list(self._files)[:-_NUM_OPEN]:
            self._files.pop(oldest, None)
        if not self._readers:
            # The last `keep_open` block ended just now, perhaps before the file was added. It is
            # not closed here, because other threads may read from it already.
            self._files.clear()
        return True

    def forget_file(self, path: str) -> None:
        """Forget an open file, so that the next read opens it again."""
        self._files.pop(path, None)

    def drop_all(self) -> None:
        """Forget all open files: those that no thread is reading from are closed."""
        self._files.clear()


def _is_at(path: str, file: OpenFile) -> bool:
    # Not by the link count: an unchanged file has a name in every checkpoint that lists it.
    with suppress(OSError):  # opening it again reports what is wrong
        return os.path.samestat(os.stat(path), os.fstat(file.fd))
    return False


def fill_from_file(
    file: OpenFile,
    memory: memoryview,
    start: int,
    *,
    what: str,
    seen: Seen,
    direct: bool,
    afresh: bool,
) -> None:
    """Fill `memory` from byte `start` of a file, which errors call `what`.

    With `direct`, whole pages that are not cached are read directly, if the file system does that
    for memory of this alignment. With `afresh` cached ones are read from the disk again.

    Raises:
        CorruptData: the file ends too early.
    """
    done = 0
    if (
        direct
        and len(memory) >= DIRECT_NBYTES_MIN
        and (afresh or not _is_cached(file.fd, start, len(memory)))
    ):
        done = _read_direct(file, memory, start)
        seen(memory[:done])
    if afresh and done < len(memory):
        around = _read_around(file, memory[done:], start + done) if direct else 0
        seen(memory[done : done + around])
        done += around
        _drop_pages(file.fd, start + done, len(memory) - done)
    for at in range(done, len(memory), PIECE_NBYTES):
        piece = memory[at : at + PIECE_NBYTES]
        read_exactly(file.fd, piece, start + at, what=what)
        seen(piece)


def is_at_hand(file: OpenFile, start: int, nbytes: int) -> bool:
    """Whether all bytes are in the page cache; of others a non-blocking read starts read-ahead."""
    return bool(_NO_WAIT and nbytes) and is_all_cached(file.fd, start, start + nbytes)


def fill_cached(file: OpenFile, start: int, targets: Sequence[memoryview], seen: Seen) -> bool:
    """Fill the targets from the page cache; False if a read would wait, or is not supported."""
    for piece in _pieces(targets):
        try:
            got = os.preadv(file.fd, piece, start, _NO_WAIT)
        except (OSError, NotImplementedError):
            return False
        if got < sum(map(len, piece)):
            return False
        for part in piece:
            seen(part)
        start += got
    return True


def _pieces(targets: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Split targets into pieces that fit the processor's cache and one preadv(2) call each."""
    piece: list[memoryview] = []
    left = PIECE_NBYTES
    for target in targets:
        while target:
            piece.append(target[:left])
            left -= len(piece[-1])
            target = target[len(piece[-1]) :]
            if not left or len(piece) == _MAX_PARTS:
                yield piece
                piece, left = [], PIECE_NBYTES
    if piece:
        yield piece


def _is_cached(fd: int, start: int, nbytes: int) -> bool:
    """Whether most of the range's end is cached; often only the beginning of a file is."""
    stop = start + nbytes
    return is_cached(fd, max(start, stop - DIRECT_NBYTES_MIN), stop)


def _opened_directly(fd: int) -> OpenFile | None:
    """Open a descriptor's file again with O_DIRECT, by its link in /proc; None if refused."""
    if not _O_DIRECT:
        return None
    try:
        direct_fd = os.open(f"{OWN_FDS}/{fd}", os.O_RDONLY | CLOSED_ON_EXEC | _O_DIRECT)
    except OSError:
        return None  # the file system refuses the flag, or there is no /proc
    alignment = direct_alignment(direct_fd) or DirectAlignment(memory=_PAGE, offset=_PAGE)
    found = OpenFile(direct_fd, alignment)
    return found if alignment.memory and alignment.offset else None


def _read_direct(file: OpenFile, memory: memoryview, start: int) -> int:
    """Read directly as much as the alignment allows; return the number of filled bytes."""
    direct = file.direct()
    if direct is None or direct.alignment is None:
        return 0
    alignment = direct.alignment
    if start % alignment.offset or address_of(memory) % alignment.memory:
        return 0
    stop = len(memory) - len(memory) % alignment.offset
    try:
        return _read_aligned(direct.fd, memory[:stop], start, alignment.offset)
    except OSError as err:
        if err.errno not in _REFUSALS:
            raise
        return 0


def _read_aligned(fd: int, memory: memoryview, start: int, offset: int) -> int:
    done = 0
    while done < len(memory) and done % offset == 0:
        got = read_at(fd, memory[done:], start + done)
        if got == 0:
            break  # the read of the rest, through the cache, reports where the file ends
        done += got
    return done


def _read_around(file: OpenFile, memory: memoryview, start: int) -> int:
    """Read unaligned bytes directly, through aligned memory; return their number."""
    direct = file.direct()
    if direct is None or direct.alignment is None or direct.alignment.memory > _PAGE:
        return 0
    offset = direct.alignment.offset
    scratch = memoryview(mmap.mmap(-1, PIECE_NBYTES + 2 * offset))
    done = 0
    while done < len(memory):
        skipped = (start + done) % offset
        wanted = min(len(memory) - done, PIECE_NBYTES)
        rounded = -(-(skipped + wanted) // offset) * offset
        try:
            got = read_at(direct.fd, scratch[:rounded], start + done - skipped)
        except OSError as err:
            if err.errno not in _REFUSALS:
                raise
            break
        got = min(got - skipped, wanted)
        if got <= 0:
            break
        memory[done : done + got] = scratch[skipped : skipped + got]
        done += got
    return done


def _drop_pages(fd: int, start: int, nbytes: int) -> None:
    """Drop clean pages from the page cache, if the system takes such advice."""
    if nbytes and sys.platform == "linux":
        # A page of which only a part is named would stay.
        first = start - start % _PAGE
        stop = -(-(start + nbytes) // _PAGE) * _PAGE
        with suppress(OSError):
            os.posix_fadvise(fd, first, stop - first, os.POSIX_FADV_DONTNEED)
