"""Finds the uncompressed members of a zip file, and refuses any others.

Nothing is decompressed. All members are checked: each lies in the file, none on another, and no
name appears twice. Their CRCs are compared as their bytes are read.
"""

from __future__ import annotations

import struct
import threading
import zlib
from dataclasses import dataclass
from functools import cache

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.interop.files import ReadableFile
from holdfast.interop.pickles.values import LIFTED, bound

MAX_DIRECTORY_NBYTES = 48 << 20
MAX_MEMBERS = 400_000
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 1 << 16
_UNKNOWN32 = 0xFFFF_FFFF
_LINK = 0o120000


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a zip file: where its header is, and its length and CRC-32."""

    name: str
    header: int
    nbytes: int
    crc: int
    packed: int
    """Bytes in the file; others than `nbytes` if it is compressed."""
    refusal: str
    """Why it cannot be read; empty if it can."""


class Zip:
    """The members of a zip file by name."""

    def __init__(self, file: ReadableFile) -> None:
        """Read the directory, which must be whole and have stored members only."""
        self._file = file
        self._directory, nbytes, count = _find_directory(file)
        if nbytes > bound(MAX_DIRECTORY_NBYTES) or count > bound(MAX_MEMBERS):
            raise LimitExceeded(f"{file.name}: a zip directory of {count:,} members; {LIFTED}")
        self.members = self._read_members(file.read(self._directory, nbytes), count)
        self._check_places()

    def _read_members(self, data: bytes, count: int) -> dict[str, Member]:
        members: dict[str, Member] = {}
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > len(data):
                raise CorruptData(f"{self._file.name}: the zip directory is cut short")
            fields = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            num_name, num_extra, num_comment = fields[10:13]
            name = data[at : at + num_name].decode("utf-8", "replace")
            extra = data[at + num_name : at + num_name + num_extra]
            at += num_name + num_extra + num_comment
            if fields[0] != b"PK\x01\x02" or at > len(data):
                raise CorruptData(f"{self._file.name}: the zip directory is damaged")
            if name in members:
                raise FormatError(f"{self._file.name}: two members are named {name[:80]!r}")
            members[name] = self._member(name, fields, extra)
        return members

    def _member(self, name: str, fields: tuple[int, ...], extra: bytes) -> Member:
        flags, method, crc = fields[3], fields[4], fields[7]
        packed, nbytes, disk, external, header = (*fields[8:10], fields[13], fields[15], fields[16])
        what = f"{self._file.name}: member {name[:80]!r}"
        nbytes, packed, header = _zip64(extra, [nbytes, packed, header], what)
        refusal = ""
        if flags & 0x2041:
            refusal = "is encrypted"
        elif method != 0:
            refusal = "is compressed; torch.save stores members as they are"
        elif (external >> 16) & 0o170000 == _LINK:
            refusal = "is a symbolic link"
        elif packed != nbytes or disk not in (0, 0xFFFF):
            refusal = f"has {packed:,} bytes and claims to have {nbytes:,}"
        return Member(name, header, nbytes, crc, packed, refusal)

    def _check_places(self) -> None:
        headers = sorted(one.header for one in self.members.values())
        self._nexts: dict[int, int] = dict(
            zip(headers, [*headers[1:], self._directory], strict=True)
        )
        end = 0
        for member in sorted(self.members.values(), key=lambda one: one.header):
            if member.header < end:
                raise FormatError(
                    f"{self._file.name}: {member.name[:80]!r} overlaps another member"
                )
            end = member.header + _LOCAL.size + len(member.name.encode()) + member.packed
            if end > self._directory:
                raise CorruptData(f"{self._file.name}: {member.name[:80]!r} ends beyond the file")

    def find_data_start(self, member: Member) -> int:
        """Return where the bytes of a member begin; checks the header in front of them."""
        if member.refusal:
            raise FormatError(f"{self._file.name}: member {member.name[:80]!r} {member.refusal}")
        head = self._file.read(member.header, _LOCAL.size)
        sign, _, flags, method, _, _, _, _, _, num_name, num_extra = _LOCAL.unpack(head)
        what = f"{self._file.name}: member {member.name[:80]!r}"
        name = self._file.read(member.header + _LOCAL.size, num_name)
        if sign != b"PK\x03\x04" or method != 0 or flags & 0x2041:
            raise CorruptData(f"{what} has no header of a stored member")
        if name.decode("utf-8", "replace") != member.name:
            raise CorruptData(f"{what} has the header of another member")
        start = member.header + _LOCAL.size + num_name + num_extra
        if start + member.nbytes > self._nexts[member.header]:
            raise CorruptData(f"{what} reaches into the next one")
        return int(start)


def _find_directory(file: ReadableFile) -> tuple[int, int, int]:
    """Return where the directory begins, its length, and the number of members."""
    tail_start = max(0, file.nbytes - _END.size - _MAX_COMMENT)
    tail = file.read(tail_start, file.nbytes - tail_start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise CorruptData(f"{file.name}: a zip file without its end; it is cut short")
    _, disk, _, _, count, nbytes, start, _ = _END.unpack_from(tail, at)
    position = tail_start + at
    if position >= _LOCATOR.size:
        sign, _, where, _ = _LOCATOR.unpack(file.read(position - _LOCATOR.size, _LOCATOR.size))
        if sign == b"PK\x06\x07":
            if where + _END64.size > position:
                raise CorruptData(f"{file.name}: the end of the zip file is damaged")
            found = _END64.unpack(file.read(where, _END64.size))
            if found[0] != b"PK\x06\x06":
                raise CorruptData(f"{file.name}: the end of the zip file is damaged")
            disk, count, nbytes, start, position = found[4], found[7], found[8], found[9], where
    if disk != 0 or start + nbytes > position:
        raise CorruptData(f"{file.name}: the zip directory does not lie in the file")
    return start, nbytes, count


def _zip64(extra: bytes, numbers: list[int], what: str) -> list[int]:
    """Replace the numbers that are too large for 32 bits by those in the extra field."""
    at = 0
    while at + 4 <= len(extra) and _UNKNOWN32 in numbers:
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            for place, number in enumerate(numbers):
                if number == _UNKNOWN32:
                    if len(field) < 8:
                        raise CorruptData(f"{what}: its 64-bit length is missing")
                    numbers[place] = int.from_bytes(field[:8], "little")
                    field = field[8:]
            return numbers
        at += 4 + length
    return numbers


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
        """Add bytes of the member that were read; pieces that overlap are not compared."""
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
