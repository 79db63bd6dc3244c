"""Reading and writing sealed files of a store, in pieces (docs/format.md, section 9)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from holdfast.errors import CorruptData, Tampered, UsageError
from holdfast.format.envelope import FileSeal
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.segments import (
    SEGMENT_NBYTES,
    FileCipher,
    StoredDigest,
    check_length,
    stored_nbytes,
)
from holdfast.format.suites import TAG_NBYTES, Suite
from holdfast.store.base import BlockWriter, ReadsInto, Store, ignore


class SealedFile:
    """Opens ranges of one sealed file. Thread-safe."""

    def __init__(self, inner: Store, key: str, seal: FileSeal, suite: Suite, what: str) -> None:
        self._inner = inner
        self._cipher = FileCipher(suite, bytes.fromhex(seal.secret), seal.nbytes)
        self._what = what
        self._tags: bytes | None = None
        self.key = key
        self.seal = seal
        self.nbytes = seal.nbytes

    def read(
        self,
        start: int,
        out: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        """Fill `out` with the plain bytes at `start`; nothing that was not vouched for is in it.

        Raises:
            CorruptData: the file is shorter.
            Tampered: a segment is not as it was sealed; it was read twice.
        """
        stop = start + out.nbytes
        if start < 0 or stop > self.nbytes:
            raise CorruptData(f"{self._what}: has {self.nbytes} bytes, expected at least {stop}")
        if self.nbytes == 0:
            self._cipher.open(0, self._tag(0), memoryview(bytearray()), what=self._what)
        at = start
        while at < stop:
            first = at - at % SEGMENT_NBYTES
            until = min(first + BLOCK_NBYTES, stop)
            piece = out[at - start : until - start]
            self._read_run(at, piece, seen=seen, afresh=afresh)
            at = until

    def _read_run(
        self, start: int, out: memoryview, *, seen: Callable[[memoryview], object], afresh: bool
    ) -> None:
        """At most a block and what its first and last segments have beside it."""
        stop = start + out.nbytes
        segments = [*self._cipher.split(start, stop)]
        base, end = segments[0][1], segments[-1][2]
        if afresh:
            self._tags = None
        # A tag stands behind its segment when that is opened; what was there comes back after.
        sealed = _scratch(end - base + TAG_NBYTES)
        self._fetch(base, sealed[: end - base], afresh=afresh)
        for number, first, last in segments:
            low, high = max(first, start), min(last, stop)
            held = bytes(sealed[last - base : last - base + TAG_NBYTES])
            sealed[last - base : last - base + TAG_NBYTES] = self._tag(number)
            piece = out[low - start : high - start]
            is_whole = (low, high) == (first, last)
            plain = piece if is_whole else memoryview(bytearray(last - first))
            self._open(number, sealed[first - base : last - base + TAG_NBYTES], plain)
            if not is_whole:
                piece[:] = plain[low - first : high - first]
            sealed[last - base : last - base + TAG_NBYTES] = held
            seen(piece)

    def _open(self, number: int, sealed: memoryview, plain: memoryview) -> None:
        try:
            self._cipher.open(number, sealed, plain, what=self._what)
        except Tampered:
            # One more read: a passing error on the way must not condemn a sound checkpoint.
            self._tags = None
            start = number * SEGMENT_NBYTES
            self._fetch(start, sealed[:-TAG_NBYTES], afresh=True)
            sealed[-TAG_NBYTES:] = self._tag(number)
            self._cipher.open(number, sealed, plain, what=self._what)

    def _fetch(self, start: int, out: memoryview, *, afresh: bool) -> None:
        if isinstance(self._inner, ReadsInto):
            self._inner.read_into(self.key, start, out, afresh=afresh)
        else:
            out[:] = self._inner.get(self.key, start, out.nbytes)

    def _tag(self, number: int) -> bytes:
        if self._tags is None:
            found = self._inner.head(self.key).nbytes
            check_length(found, self.nbytes, what=self._what)
            self._tags = self._inner.get(self.key, self.nbytes, found - self.nbytes)
        return self._tags[number * TAG_NBYTES : (number + 1) * TAG_NBYTES]


class SealedWriter:
    """The `BlockWriter` of a sealed file: blocks are sealed on their way to the inner one."""

    def __init__(self, inner: BlockWriter, cipher: FileCipher, done: Callable[[str], None]) -> None:
        self._inner = inner
        self._cipher = cipher
        self._digest = StoredDigest(cipher.nbytes)
        self._done = done

    def write(self, start: int, data: memoryview) -> None:
        """See `BlockWriter.write`; takes whole blocks, and the end of the file."""
        plain = memoryview(data).cast("B")
        is_end = start + plain.nbytes == self._cipher.nbytes
        if start % BLOCK_NBYTES or not (is_end or plain.nbytes % BLOCK_NBYTES == 0):
            raise UsageError(f"sealed files are written in blocks of {BLOCK_NBYTES} bytes")
        for low in range(0, plain.nbytes, BLOCK_NBYTES):
            piece = plain[low : low + BLOCK_NBYTES]
            sealed = _scratch(piece.nbytes + TAG_NBYTES)
            self._cipher.seal(start + low, piece, sealed)
            self._digest.update(start + low, sealed[: piece.nbytes])
            self._inner.write(start + low, sealed[: piece.nbytes])

    def finish(self) -> None:
        """See `BlockWriter.finish`."""
        tags = self._cipher.tags()
        self._inner.write(self._cipher.nbytes, memoryview(tags))
        self._inner.finish()
        self._done(self._digest.finish(tags))

    def abort(self) -> None:
        """See `BlockWriter.abort`."""
        self._inner.abort()


def plain_nbytes(found: int, seal: FileSeal) -> int:
    """The length to report of a stored file: the plain one exactly if the stored one is right."""
    expected = stored_nbytes(seal.nbytes)
    if found == expected:
        return seal.nbytes
    guess = found - (expected - seal.nbytes)
    return guess if guess >= 0 and guess != seal.nbytes else seal.nbytes + 1


class _Scratch(threading.local):
    """Memory on a page, as direct writes want it; one a thread, because it is used at once."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK_NBYTES + SEGMENT_NBYTES + mmap.PAGESIZE)


_SCRATCH = _Scratch()


def _scratch(nbytes: int) -> memoryview:
    return memoryview(_SCRATCH.memory)[:nbytes]
