"""Tensor files: valid safetensors files with a fixed layout (docs/format.md, section 4).

This module plans and reads headers. It never touches the data.
"""

from __future__ import annotations

import math
import re
import types
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError
from holdfast.format import strictjson
from holdfast.format.layout import (
    DATA_ALIGNMENT,
    MAX_TENSOR_FILE_NBYTES,
    MAX_TENSORS_PER_FILE,
    tensor_file,
)
from holdfast.store.base import Buffer

MAX_HEADER_NBYTES = 16 * 1024 * 1024
MAX_DIMS = 128
METADATA = "__metadata__"

_LENGTH_NBYTES = 8
_MAX_HEADER_VALUES = 2_000_000
_MAX_INT = 2**63 - 1

_SAFETENSORS_NBYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
ITEM_NBYTES: Mapping[str, int] = types.MappingProxyType(
    {**_SAFETENSORS_NBYTES, "F4_X2": 1, "C32": 4, "C128": 16}
)
"""Bytes of one element, by the name that the index uses; `F4_X2` is two 4-bit floats."""
INDEX_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "float16": "F16",
        "bfloat16": "BF16",
        "uint32": "U32",
        "int32": "I32",
        "float32": "F32",
        "complex32": "C32",
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
        "complex64": "C64",
        "complex128": "C128",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float4_e2m1fn_x2": "F4_X2",
    }
)
"""Name of a torch dtype → name in the index."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Key, dtype (by its name in the index) and shape of a tensor of a component."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the contiguous tensor in bytes."""
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


def format_record(
    dtype: str, sizes: Iterable[int], digest: str, *, nbytes: int | None = None
) -> str:
    """Return a record of a frozen parameter: dtype, sizes and digest as text.

    Of a tensor subclass `dtype` is the name of the class, and `nbytes` counts its inner tensors.
    """
    size = "" if nbytes is None else f" {nbytes}"
    return f"{dtype} [{','.join(map(str, sizes))}]{size} {digest}"


def count_record_nbytes(text: str, *, what: str) -> int:
    """Return the bytes of a frozen parameter from its record."""
    match = _RECORD.fullmatch(text)
    if match is None or (match["nbytes"] is None and match["dtype"] not in ITEM_NBYTES):
        raise FormatError(f"{what}: {text[:80]!r} is not the record of a frozen parameter")
    if match["nbytes"] is not None:
        return int(match["nbytes"])
    sizes = match["sizes"].split(",") if match["sizes"] else []
    return math.prod(map(int, sizes)) * ITEM_NBYTES[match["dtype"]]


_RECORD = re.compile(
    r"(?P<dtype>\w{1,80}) \[(?P<sizes>(?:\d{1,18}(?:,\d{1,18}){0,127})?)\]"
    r"(?: (?P<nbytes>\d{1,18}))? blake3:[0-9a-f]{64}",
    re.ASCII,
)


class TensorFile(msgspec.Struct, frozen=True):
    """Planned layout of a tensor file: its header, and the first byte of each of `specs`."""

    name: str
    header: bytes
    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    nbytes: int

    def fill_block(
        self, start: int, memory: memoryview
    ) -> Iterator[tuple[TensorSpec, int, memoryview]]:
        """Copy the header's part of a block; yield spec, first byte and memory of each tensor's."""
        header = self.header[start : start + len(memory)]
        memory[: len(header)] = header
        stop, position = start + len(memory), max(bisect_right(self.starts, start) - 1, 0)
        while position < len(self.starts) and self.starts[position] < stop:
            spec, first = self.specs[position], self.starts[position]
            low, high = max(first, start), min(first + spec.nbytes, stop)
            if low < high:
                yield spec, low - first, memory[low - start : high - start]
            position += 1


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def lay_out(
    component: str,
    specs: Sequence[TensorSpec],
    *,
    apart: Collection[str] = (),
    first_number: int = 0,
) -> list[TensorFile]:
    """Plan a component's tensor files from `first_number` on; keys in `apart` have their own."""
    if len({spec.key for spec in specs}) != len(specs):
        raise UsageError(f"component {component!r}: two tensors have the same key")
    files: list[TensorFile] = []
    for is_apart in (False, True):
        chosen = [spec for spec in specs if (spec.key in apart) == is_apart]
        chosen.sort(key=lambda spec: -ITEM_NBYTES[spec.dtype])
        for group in _groups(chosen):
            files += _plan_files(component, group, first_number=first_number + len(files))
    return files


def header_nbytes(first8: Buffer, *, file_nbytes: int, what: str) -> int:
    """Compute the length of everything before the data of a tensor file, from its first 8 bytes."""
    if memoryview(first8).nbytes < _LENGTH_NBYTES or file_nbytes < _LENGTH_NBYTES:
        raise CorruptData(f"{what}: too short for a tensor file")
    length = int.from_bytes(bytes(memoryview(first8)[:_LENGTH_NBYTES]), "little")
    if length > MAX_HEADER_NBYTES:
        raise LimitExceeded(
            f"{what}: a header of {length:,} bytes; at most {MAX_HEADER_NBYTES:,} are accepted"
        )
    if _LENGTH_NBYTES + length > file_nbytes:
        raise CorruptData(f"{what}: its header of {length:,} bytes does not fit into the file")
    return _LENGTH_NBYTES + length


def parse_header(
    head: Buffer, *, file_nbytes: int, what: str
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Parse a whole safetensors header in `head`: key → (dtype, shape, start, stop) in the file."""
    return parse_header_and_metadata(head, file_nbytes=file_nbytes, what=what)[0]


def parse_header_and_metadata(
    head: Buffer, *, file_nbytes: int, what: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], Any]:
    """Do what `parse_header` does; return also the value of `__metadata__`, unchecked, or None."""
    data_start = header_nbytes(head, file_nbytes=file_nbytes, what=what)
    text = memoryview(head)[_LENGTH_NBYTES:data_start]
    if text.nbytes != data_start - _LENGTH_NBYTES:
        raise CorruptData(f"{what}: the header is cut short")
    entries = strictjson.loads(
        text, what=what, max_nbytes=MAX_HEADER_NBYTES, max_values=_MAX_HEADER_VALUES
    )
    if not isinstance(entries, dict):
        raise FormatError(f"{what}: the header is not an object")
    metadata = entries.pop(METADATA, None)
    if len(entries) > MAX_TENSORS_PER_FILE:
        raise LimitExceeded(f"{what}: more than {MAX_TENSORS_PER_FILE:,} tensors")
    tensors = {
        key: _parse_entry(entry, data_start, what=f"{what}, tensor {key[:200]!r}")
        for key, entry in entries.items()
    }
    _check_filled(tensors, data_start, file_nbytes, what=what)
    return tensors, metadata


def in_header(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape in the header of a tensor file, for those of the index."""
    match dtype:
        case "C128":
            return "F64", (*shape, 2)
        case "C32":
            return "F16", (*shape, 2)
        case "F4_X2":  # as safetensors writes it: its last dimension counts halves of bytes
            return "F4", (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return dtype, shape


def from_header(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape in the index, for those of a header of another library."""
    return ("F4_X2", (*shape[:-1], shape[-1] // 2)) if dtype == "F4" else (dtype, shape)


def check_shape(shape: Any, item_nbytes: int, *, what: str) -> int:
    """Check a shape parsed from JSON; return the length of the tensor in bytes."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise FormatError(f"{what}: the shape is not a list of at most {MAX_DIMS} sizes")
    extent = nbytes = item_nbytes
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_INT:
            raise FormatError(f"{what}: the shape holds something that is not a size")
        nbytes *= size
        extent *= size or 1
    if extent > _MAX_INT:
        raise FormatError(f"{what}: the shape has more bytes than 64 bits can count")
    return nbytes


def _groups(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Split tensors into runs that fit one file by bytes and by number."""
    group: list[TensorSpec] = []
    room = MAX_TENSOR_FILE_NBYTES
    for spec in specs:
        nbytes = spec.nbytes
        if group and (nbytes > room or len(group) == MAX_TENSORS_PER_FILE):
            yield group
            group, room = [], MAX_TENSOR_FILE_NBYTES
        group.append(spec)
        room -= nbytes
    if group:
        yield group


def _plan_files(component: str, group: Sequence[TensorSpec], first_number: int) -> list[TensorFile]:
    """Plan the file of a group, or several if the keys are too long for one header."""
    offsets = [0]
    entries: dict[str, Any] = {METADATA: {"format": "holdfast", "component": component}}
    for spec in group:
        offsets.append(offsets[-1] + spec.nbytes)
        entries[spec.key] = _header_entry(spec, offsets[-2], offsets[-1])
    if len(entries) != len(group) + 1:
        raise UsageError(f"component {component!r}: no tensor may be called {METADATA!r}")
    header = _header(component, entries)
    if len(header) - _LENGTH_NBYTES > MAX_HEADER_NBYTES:
        return _halves(component, group, first_number)
    starts = tuple(len(header) + offset for offset in offsets[:-1])
    name = tensor_file(component, first_number)
    nbytes = len(header) + offsets[-1]
    return [TensorFile(name, header, tuple(group), starts, nbytes)]


def _halves(component: str, group: Sequence[TensorSpec], first_number: int) -> list[TensorFile]:
    if len(group) == 1:
        raise UsageError(f"component {component!r}: the key {group[0].key[:80]!r}… is too long")
    middle = len(group) // 2
    files = _plan_files(component, group[:middle], first_number)
    return files + _plan_files(component, group[middle:], first_number + len(files))


def _header_entry(spec: TensorSpec, start: int, stop: int) -> _HeaderEntry:
    dtype, shape = in_header(spec.dtype, spec.shape)
    return _HeaderEntry(dtype, shape, (start, stop))


def _header(component: str, entries: Mapping[str, Any]) -> bytes:
    try:
        text = msgspec.json.encode(entries)
    except UnicodeEncodeError as err:
        raise UsageError(f"component {component!r}: a tensor's key is not Unicode: {err}") from err
    length = len(text) + -(_LENGTH_NBYTES + len(text)) % DATA_ALIGNMENT
    return length.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(length)


def _parse_entry(
    entry: Any, data_start: int, *, what: str
) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what}: not an object of `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    nbytes = _nbytes_in_header(dtype, shape, what=what)
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise FormatError(f"{what}: `data_offsets` is not a pair of integers")
    start, stop = offsets
    if not 0 <= start <= stop <= _MAX_INT or stop - start != nbytes:
        raise FormatError(f"{what}: `data_offsets` does not fit dtype and shape")
    return dtype, tuple(shape), data_start + start, data_start + stop


def _nbytes_in_header(dtype: Any, shape: Any, *, what: str) -> int:
    if dtype == "F4":
        num_values = check_shape(shape, 1, what=what)
        if not shape or shape[-1] % 2:
            raise FormatError(
                f"{what}: F4 of shape {shape}: two values share a byte, so the last dimension must "
                "be even"
            )
        return num_values // 2
    item_nbytes = _SAFETENSORS_NBYTES.get(dtype) if isinstance(dtype, str) else None
    if item_nbytes is None:
        raise FormatError(f"{what}: unknown dtype {str(dtype)[:40]!r}")
    return check_shape(shape, item_nbytes, what=what)


def _check_filled(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]],
    data_start: int,
    file_nbytes: int,
    *,
    what: str,
) -> None:
    position = data_start
    for start, stop in sorted((start, stop) for _, _, start, stop in tensors.values()):
        if start != position:
            raise FormatError(f"{what}: a gap or an overlap at byte {min(start, position):,}")
        position = stop
    if position != file_nbytes:
        raise CorruptData(f"{what}: the tensors end at byte {position:,} of {file_nbytes:,}")
