"""CRC-32 of the members of a zip file, from pieces that are read in any order."""

from __future__ import annotations

import threading
import zlib
from functools import cache

from holdfast.errors import CorruptData

NOT_COMPUTED = 0
"""What torch writes after `torch.serialization.set_crc32_options(False)`."""
_POLYNOMIAL = 0xEDB8_8320
_ONE = 1 << 31
"""The polynomial 1: in a CRC-32 the highest power comes last."""


class MemberCrc:
    """The CRC-32 of one member; compared once every byte of it was read. Thread-safe."""

    def __init__(self, what: str, nbytes: int, crc: int) -> None:
        """`what` names file and member in the error."""
        self._what = what
        self._nbytes = nbytes
        self._crc = crc
        self._lock = threading.Lock()
        self._pieces: dict[int, tuple[int, int]] = {}
        """First byte of each piece that was read → the byte after its last one, and its CRC."""
        self._nbytes_read = 0

    def add_bytes(self, start: int, memory: memoryview) -> None:
        """Add bytes of the member that were read, from its byte `start` on.

        Pieces that overlap are not put together, so nothing is compared then.
        """
        if self._crc == NOT_COMPUTED or not memory.nbytes:
            return
        piece = start + memory.nbytes, zlib.crc32(memory)
        with self._lock:
            known, _ = self._pieces.get(start, (start, 0))
            self._pieces[start] = piece
            self._nbytes_read += piece[0] - known
            found = self._finish_crc() if self._nbytes_read >= self._nbytes else None
        if found is not None and found != self._crc:
            raise CorruptData(f"{self._what} is not what was written: its CRC-32 differs")

    def _finish_crc(self) -> int | None:
        """Return the CRC of the member if its pieces are whole, and forget them."""
        at = crc = 0
        while at < self._nbytes and at in self._pieces:
            stop, of_piece = self._pieces[at]
            crc, at = join_crcs(crc, of_piece, stop - at), stop
        if at != self._nbytes:
            return None
        self._pieces.clear()
        self._nbytes_read = 0
        return crc


def join_crcs(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two runs of bytes, one behind the other, from those of each."""
    return _product(_shift(second_nbytes), first) ^ second


@cache
def _shift(nbytes: int) -> int:
    """Return x to the power of 8 * `nbytes`, modulo the polynomial of the CRC."""
    power, square, rest = _ONE, 1 << 23, nbytes  # x to the power of 8
    while rest:
        if rest & 1:
            power = _product(square, power)
        square, rest = _product(square, square), rest >> 1
    return power


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of the CRC, as zlib's `crc32_combine` does."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
