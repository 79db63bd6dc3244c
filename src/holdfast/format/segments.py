"""The sealed form of a file: its ciphertext, then the tags of its segments (docs/format.md, section 9).

Tags lie behind the ciphertext, so that a byte of the file lies at the same place sealed as plain:
a range of it is read by its own offsets, and aligned blocks stay aligned.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import CorruptData, LimitExceeded
from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.suites import NONCE_NBYTES, TAG_NBYTES, Suite
from holdfast.store.base import Buffer

SEGMENT_NBYTES = 1024 * 1024
MAX_SEGMENTS = 2**32
"""Messages under one key; far below what any of the suites allows."""


def num_segments(nbytes: int) -> int:
    """How many segments a file of `nbytes` has; an empty one has an empty segment."""
    return max(1, -(-nbytes // SEGMENT_NBYTES))


def stored_nbytes(nbytes: int) -> int:
    """Length of the sealed form of a file of `nbytes`.

    Raises:
        LimitExceeded: it would have more segments than one key may encrypt.
    """
    if num_segments(nbytes) > MAX_SEGMENTS:
        raise LimitExceeded(f"a file of {nbytes:,} bytes cannot be sealed under one key")
    return nbytes + TAG_NBYTES * num_segments(nbytes)


def nonce(number: int, *, is_last: bool) -> bytes:
    """The nonce of a segment: its number, 11 bytes big-endian, and whether the file ends there."""
    return number.to_bytes(NONCE_NBYTES - 1, "big") + bytes([is_last])


class FileCipher:
    """Seals and opens the segments of one file. Thread-safe; no segment is sealed twice."""

    def __init__(self, suite: Suite, secret: bytes, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes of the plain file."""
        self.stored_nbytes = stored_nbytes(nbytes)
        self.num_segments = num_segments(nbytes)
        self._cipher = suite.cipher(secret, "file")
        self._tags: dict[int, bytes] = {}

    def split(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(number, start, stop) of each segment with bytes in [start, stop) of the file."""
        for number in range(start // SEGMENT_NBYTES, -(-stop // SEGMENT_NBYTES)):
            first = number * SEGMENT_NBYTES
            yield number, first, min(first + SEGMENT_NBYTES, self.nbytes)

    def seal(self, start: int, plain: Buffer, out: memoryview) -> None:
        """Fill `out`, 16 bytes longer than `plain`, with the ciphertext of whole segments.

        What is in its last 16 bytes afterwards means nothing; the tags are kept.
        """
        data = memoryview(plain).cast("B")
        for number, first, last in self.split(start, start + data.nbytes):
            assert number not in self._tags, "a segment is sealed once"
            low, high = first - start, last - start
            piece = out[low : high + TAG_NBYTES]
            self._cipher.encrypt_into(data[low:high], piece, nonce=self._nonce(number))
            self._tags[number] = bytes(piece[-TAG_NBYTES:])

    def tags(self) -> bytes:
        """The tags of all segments, when every one was sealed."""
        if self.nbytes == 0:
            self._tags[0] = self._cipher.encrypt(b"", nonce=self._nonce(0))
        return b"".join(self._tags[number] for number in range(self.num_segments))

    def seal_whole(self, plain: Buffer) -> bytes:
        """The sealed form of a file whose bytes are all there."""
        sealed = bytearray(self.nbytes + TAG_NBYTES)
        self.seal(0, plain, memoryview(sealed))
        return bytes(sealed[: self.nbytes]) + self.tags()

    def open(self, number: int, sealed: Buffer, out: memoryview, *, what: str) -> None:
        """Fill `out` with a segment, from its ciphertext with its tag behind it.

        Raises:
            Tampered: they are not of this segment of this file.
        """
        what = f"{what}, segment {number} (from byte {number * SEGMENT_NBYTES:,})"
        self._cipher.decrypt_into(sealed, out, nonce=self._nonce(number), what=what)

    def _nonce(self, number: int) -> bytes:
        return nonce(number, is_last=number == self.num_segments - 1)


class StoredDigest:
    """The digest of a sealed file, from its pieces in any order. The caller keeps them apart."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        """Bytes of ciphertext."""
        self._digests: dict[int, bytes] = {}
        self._last = blocks.block_hasher()

    def update(self, start: int, ciphertext: memoryview) -> None:
        """Take a block of ciphertext: a whole one, or the end of it."""
        assert start % BLOCK_NBYTES == 0
        if ciphertext.nbytes == BLOCK_NBYTES:
            self._digests[start // BLOCK_NBYTES] = blocks.block_digest(ciphertext)
        else:
            self._last.update(ciphertext)

    def finish(self, tags: bytes) -> str:
        """The digest of ciphertext and tags, as of any file (section 3)."""
        room = -self._nbytes % BLOCK_NBYTES
        whole = [self._digests[number] for number in range(self._nbytes // BLOCK_NBYTES)]
        if room:
            self._last.update(tags[:room])
            whole.append(self._last.digest())
        rest = blocks.digest_blocks(tags[room:])
        return blocks.file_digest(self._nbytes + len(tags), b"".join(whole) + rest)


def check_length(found: int, nbytes: int, *, what: str) -> None:
    """Raise `CorruptData` unless the sealed form of a file of `nbytes` has `found` bytes."""
    if found != stored_nbytes(nbytes):
        raise CorruptData(f"{what}: {found} bytes, expected {stored_nbytes(nbytes)}")
