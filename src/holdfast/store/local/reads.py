"""Bytes of an open file into the caller's memory: past the page cache, or out of it.

A direct read (O_DIRECT) takes no copy and hardly any processor time, so a file that is not in the
page cache arrives as fast as the disk gives it, and the cache keeps what others have there. What
is cached is copied in small pieces, so that whoever looks at each finds it in the processor's
cache. Knows descriptors, nothing of keys; functions raise `OSError` unless they say otherwise.

Opening a file costs as much as a good part of reading a block of it, and threads that open take
turns at it. So a file can stay open for as long as somebody reads much of it (`OpenFiles`).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.store.local.files import OWN_FDS, address_of, read_exactly
from holdfast.store.local.oserrors import UNSUPPORTED
from holdfast.store.local.syscalls import (
    DirectAlignment,
    direct_alignment,
    is_all_cached,
    is_cached,
)

Seen = Callable[[memoryview], object]
"""Called with each piece of the memory once its bytes are there, in order."""

PIECE_NBYTES = 1 << 20
"""What is copied from the page cache at a time. With the digest taken of each at once, 1 and 2 MiB
are the fastest: 239 ms for 2.5 GB on two cores, beside 368 for 8 MiB and 331 for 512 KiB."""
DIRECT_NBYTES_MIN = 256 * 1024
"""Shorter reads are left to the page cache, whose read-ahead serves their neighbours too."""

_NUM_OPEN = 32
"""So many files stay open; loads read one after the other, a few at a time."""
_PAGE = mmap.PAGESIZE
_REFUSALS = UNSUPPORTED | {errno.EFAULT}
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_MAX_PARTS = 1024
"""IOV_MAX of Linux."""


class OpenFile:
    """A regular file open for reading, and once more for direct reads when the first one comes.

    Owns the descriptor. Any number of threads may read; whoever drops the file last closes it, so
    that no number is closed that a thread still reads from.
    """

    def __init__(self, fd: int, alignment: DirectAlignment | None = None) -> None:
        self.fd = fd
        self.alignment = alignment
        """What reads must keep to; None of a file that is read through the page cache."""
        self._direct: tuple[OpenFile | None] | None = None

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether nobody closed it."""
        return self.fd >= 0

    def close(self) -> None:
        """For whoever knows that nobody else reads from it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self._direct and self._direct[0]:
            self._direct[0].close()

    def direct(self) -> OpenFile | None:
        """The same file with O_DIRECT, or None where that is refused."""
        # No lock, which a forked child could inherit locked: of two threads the later one's stays.
        found = self._direct
        if found is None:
            found = self._direct = (_opened_directly(self.fd),)
        return found[0]


class OpenFiles:
    """Files that stay open while anybody reads many parts of them, at most `_NUM_OPEN`."""

    def __init__(self) -> None:
        self._readers: set[object] = set()
        self._files: dict[str, OpenFile] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep open what is opened meanwhile, by any thread."""
        reader = object()
        self._readers.add(reader)
        try:
            yield
        finally:
            self._readers.discard(reader)
            # Whoever begins just now opens again what he needs.
            if not self._readers:
                self._files.clear()

    def get(self, path: str) -> OpenFile | None:
        """File that is still open, unless the path leads to another file now, or to none."""
        file = self._files.get(path)
        if file is None or _is_at(path, file):
            return file
        self.forget(path)
        return None

    def keep(self, path: str, file: OpenFile) -> bool:
        """Have a file stay open, where anybody wants that."""
        if not self._readers:
            return False
        self._files[path] = file
        for oldest in list(self._files)[:-_NUM_OPEN]:
            self._files.pop(oldest, None)
        if not self._readers:
            # The last one ended just now, and may have looked before. Others may read already.
            self._files.clear()
        return True

    def forget(self, path: str) -> None:
        """Have whoever reads next open the file anew."""
        self._files.pop(path, None)

    def forget_all(self) -> None:
        """Have all files be closed that nobody reads from right now."""
        self._files.clear()


def _is_at(path: str, file: OpenFile) -> bool:
    # Not by the number of its names: an unchanged file has one in every checkpoint that lists it.
    with suppress(OSError):  # whoever opens it anew says what is wrong
        return os.path.samestat(os.stat(path), os.fstat(file.fd))
    return False


def fill(
    file: OpenFile,
    memory: memoryview,
    start: int,
    *,
    what: str,
    seen: Seen,
    direct: bool,
    afresh: bool,
) -> None:
    """Fill `memory` from byte `start` of a file; errors call it `what`.

    With `direct`, whole pages that are not cached are read directly, where the file system does
    that for memory like this. With `afresh` those that are cached are read from the disk again.

    Raises:
        CorruptData: the file ends before.
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
        _forget(file.fd, start + done, len(memory) - done)
    for at in range(done, len(memory), PIECE_NBYTES):
        piece = memory[at : at + PIECE_NBYTES]
        read_exactly(file.fd, piece, start + at, what=what)
        seen(piece)


def is_at_hand(file: OpenFile, start: int, nbytes: int) -> bool:
    """Whether `fill_cached` may succeed. Asked before, because even a read that does not wait has
    the kernel read ahead."""
    return bool(_NO_WAIT and nbytes) and is_all_cached(file.fd, start, start + nbytes)


def fill_cached(file: OpenFile, start: int, targets: Sequence[memoryview], seen: Seen) -> bool:
    """Fill one target of bytes after the other from the page cache; whether all of it was there.

    The kernel refuses to wait for anything, or to do this, which is no error.
    """
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
    """Split targets into pieces small enough for the processor's cache, and of so few parts that
    one call takes them."""
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
    """Judged by the end of what is wanted: the beginning of a file is often there alone."""
    stop = start + nbytes
    return is_cached(fd, max(start, stop - DIRECT_NBYTES_MIN), stop)


def _opened_directly(fd: int) -> OpenFile | None:
    """The file of a descriptor once more: by the link in /proc, so that it is the same one."""
    if not _O_DIRECT:
        return None
    try:
        direct_fd = os.open(f"{OWN_FDS}/{fd}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
    except OSError:
        return None  # the file system refuses the flag, or there is no /proc
    told = direct_alignment(direct_fd) or DirectAlignment(memory=_PAGE, offset=_PAGE)
    found = OpenFile(direct_fd, told)
    return found if told.memory and told.offset else None


def _read_direct(file: OpenFile, memory: memoryview, start: int) -> int:
    """Read what can be read directly; returns how many bytes of `memory` are filled."""
    direct = file.direct()
    if direct is None or direct.alignment is None:
        return 0
    told = direct.alignment
    if start % told.offset or address_of(memory) % told.memory:
        return 0
    stop = len(memory) - len(memory) % told.offset
    try:
        return _read_aligned(direct.fd, memory[:stop], start, told.offset)
    except OSError as err:
        if err.errno not in _REFUSALS:
            raise
        return 0


def _read_aligned(fd: int, memory: memoryview, start: int, offset: int) -> int:
    done = 0
    while done < len(memory) and done % offset == 0:
        got = os.preadv(fd, [memory[done:]], start + done)
        if got == 0:
            break  # whoever reads the rest through the cache says where the file ends
        done += got
    return done


def _read_around(file: OpenFile, memory: memoryview, start: int) -> int:
    """The same of bytes that do not lie as direct reads want it, by way of other memory.

    What is cached cannot be dropped in part where the kernel keeps many pages as one.
    """
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
            got = os.preadv(direct.fd, [scratch[:rounded]], start + done - skipped)
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


def _forget(fd: int, start: int, nbytes: int) -> None:
    """Drop clean pages from the cache, where the system takes such advice."""
    if nbytes and hasattr(os, "posix_fadvise"):
        # A page of which only a part is named stays.
        first = start - start % _PAGE
        stop = -(-(start + nbytes) // _PAGE) * _PAGE
        with suppress(OSError):
            os.posix_fadvise(fd, first, stop - first, os.POSIX_FADV_DONTNEED)
