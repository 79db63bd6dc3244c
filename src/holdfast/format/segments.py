"""Encrypted form of a file: ciphertext, then tags of its segments (docs/format.md, section 10).

Tags follow the ciphertext, so that each byte has the same offset encrypted as plain: ranges are
read by their plain offsets, and aligned blocks stay aligned.
"""

from __future__ import annotations

from holdfast.errors import LimitExceeded, UsageError
from holdfast.format.suites import NONCE_NBYTES, TAG_NBYTES, Suite
from holdfast.store.base import Buffer

SEGMENT_NBYTES = 1024 * 1024
MAX_SEGMENTS = 2**32
"""Messages under one key; far below what any of the suites allows."""


def num_segments(nbytes: int) -> int:
    """Compute the number of segments of a file of `nbytes`; 0 if it is empty."""
    return -(-nbytes // SEGMENT_NBYTES)


def tags_nbytes(nbytes: int) -> int:
    """Compute the bytes of the tags of a file of `nbytes`: of its segments, and the closing one.

    Raises:
        LimitExceeded: the file would have more segments than one key may encrypt.
    """
    if num_segments(nbytes) >= MAX_SEGMENTS:
        raise LimitExceeded(f"a file of {nbytes:,} bytes cannot be sealed under one key")
    return TAG_NBYTES * (num_segments(nbytes) + 1)


def stored_nbytes(nbytes: int) -> int:
    """Compute the length of the encrypted form of a file; raises as `tags_nbytes` does."""
    return nbytes + tags_nbytes(nbytes)


class FileCipher:
    """Encrypts and decrypts segments of one file. Thread-safe; encrypts no segment twice."""

    def __init__(self, suite: Suite, secret: bytes) -> None:
        self._cipher = suite.cipher(secret, "file")
        self._tags: dict[int, bytes] = {}

    def seal(self, start: int, plain: Buffer, out: memoryview) -> None:
        """Fill `out`, 16 bytes longer than `plain`, with the ciphertext of whole segments.

        Only the last segment of the file is shorter. The last 16 bytes of `out` are undefined
        afterwards; the tags are kept.

        Raises:
            UsageError: a nonce would be used twice, or the pieces are not whole segments.
        """
        data = memoryview(plain).cast("B")
        for low in range(0, data.nbytes, SEGMENT_NBYTES):
            number, rest = divmod(start + low, SEGMENT_NBYTES)
            if rest or number in self._tags or number >= MAX_SEGMENTS - 1:
                raise UsageError(f"segment {number} is sealed once, as a whole and in its place")
            high = min(low + SEGMENT_NBYTES, data.nbytes)
            piece = out[low : high + TAG_NBYTES]
            self._cipher.encrypt_into(data[low:high], piece, nonce=_nonce(number))
            self._tags[number] = bytes(piece[-TAG_NBYTES:])

    def close(self, nbytes: int) -> bytes:
        """Return the tags of all segments and the closing one, once all `nbytes` are encrypted."""
        number = num_segments(nbytes)
        nonce = _nonce(number, closes=True)
        closing = self._cipher.encrypt(b"", _length(nbytes), nonce=nonce)
        return b"".join(self._tags[n] for n in range(number)) + closing

    def check_closed(self, nbytes: int, tags: bytes, *, what: str) -> None:
        """Raise `Tampered` unless the closing tag in `tags` is that of a file of `nbytes`."""
        nonce = _nonce(num_segments(nbytes), closes=True)
        self._cipher.decrypt(tags[-TAG_NBYTES:], _length(nbytes), nonce=nonce, what=what)

    def open(self, number: int, sealed: Buffer, out: memoryview, *, what: str) -> None:
        """Decrypt a segment into `out`, from its ciphertext followed by its tag.

        Raises:
            Tampered: the ciphertext or tag is not that of this segment of this file.
        """
        what = f"{what}, segment {number} (from byte {number * SEGMENT_NBYTES:,})"
        self._cipher.decrypt_into(sealed, out, nonce=_nonce(number), what=what)


def seal_whole(suite: Suite, secret: bytes, plain: Buffer) -> bytes:
    """Encrypt a whole file in memory."""
    data = memoryview(plain).cast("B")
    cipher = FileCipher(suite, secret)
    sealed = bytearray(data.nbytes + TAG_NBYTES)
    cipher.seal(0, data, memoryview(sealed))
    del sealed[data.nbytes :]
    return bytes(sealed) + cipher.close(data.nbytes)


def _nonce(number: int, *, closes: bool = False) -> bytes:
    """Make a nonce: the segment's number, 11 bytes big-endian, and 1 for the closing tag."""
    return number.to_bytes(NONCE_NBYTES - 1, "big") + bytes([closes])


def _length(nbytes: int) -> bytes:
    return nbytes.to_bytes(8, "little")
