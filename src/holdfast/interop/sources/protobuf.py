"""Reads the fields of a protobuf message in a file, without holding what they contain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import CorruptData
from holdfast.interop.files import LocalFile
from holdfast.interop.sources.mindspore_cipher import DecryptedFile

VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5
"""Wire types; groups, which have others, are refused."""

_WINDOW_NBYTES = 512
_MAX_VARINT_NBYTES = 10


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message: its number and type, and its value or the place of its bytes."""

    number: int
    wire_type: int
    value: int
    """Of a varint; 0 for other types."""
    start: int
    """First byte of the value in the file."""
    stop: int
    """The byte after its last."""


class Wire:
    """A file as a sequence of fields."""

    def __init__(self, file: LocalFile | DecryptedFile) -> None:
        self.file = file
        self._window = b""
        self._window_start = 0

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Read the fields between two bytes of the file; content is skipped, not read."""
        while start < stop:
            tag, after = self._varint(start, stop)
            number, wire_type = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise self._wrong(start, "no field has this number")
            field = self._field(number, wire_type, after, stop)
            yield field
            start = field.stop

    def read_field(self, field: Field, max_nbytes: int, what: str) -> bytes:
        """Read the content of a field."""
        nbytes = field.stop - field.start
        if field.wire_type != LEN or nbytes > max_nbytes:
            raise self._wrong(field.start, f"{what} has {nbytes:,} bytes; {max_nbytes:,} at most")
        return self._peek(field.start, nbytes)

    def _field(self, number: int, wire_type: int, start: int, stop: int) -> Field:
        value = 0
        if wire_type == VARINT:
            value, end = self._varint(start, stop)
        elif wire_type == LEN:
            nbytes, start = self._varint(start, stop)
            end = start + nbytes
        elif wire_type in (FIXED64, FIXED32):
            end = start + (8 if wire_type == FIXED64 else 4)
        else:
            raise self._wrong(start, f"wire type {wire_type}")
        if end > stop:
            raise self._wrong(start, f"a field ends at byte {end:,}, behind its message")
        return Field(number, wire_type, value, start, end)

    def _varint(self, start: int, stop: int) -> tuple[int, int]:
        """Read an integer of up to 64 bits; return it and the position after it."""
        at = start - self._window_start
        if start < stop and 0 <= at < len(self._window) and self._window[at] < 128:
            return self._window[at], start + 1
        data = self._peek(start, min(_MAX_VARINT_NBYTES, stop - start))
        value = 0
        for position, byte in enumerate(data):
            value |= (byte & 127) << 7 * position
            if byte < 128:
                return value & (1 << 64) - 1, start + position + 1
        raise self._wrong(start, "an integer without an end")

    def _peek(self, start: int, nbytes: int) -> bytes:
        at = start - self._window_start
        if at < 0 or at + nbytes > len(self._window):
            want = min(max(nbytes, _WINDOW_NBYTES), self.file.nbytes - start)
            self._window, self._window_start, at = self.file.read(start, want), start, 0
        return self._window[at : at + nbytes]

    def _wrong(self, position: int, why: str) -> CorruptData:
        return CorruptData(f"{self.file.name}: at byte {position:,}: {why}")
