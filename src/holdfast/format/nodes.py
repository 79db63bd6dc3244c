"""Leaves of typed trees: plain values, and nodes for torch values.

Each is written and read back exactly (docs/format.md, section 6). A writer or reader raises
`ValueError` for values that the grammar does not have.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar

import msgspec
import numpy as np

from holdfast.format import strictjson

_MAX_INT = 2**63 - 1
_MAX_INT_BITS = 13_606  # 2**13606 has 4,096 digits
_QUIET_NAN = 0x7FF8_0000_0000_0000
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?", re.ASCII)
_TENSOR_MEMBERS = frozenset({"$tensor", "device", "grad", "parameter", "order"})
_DTYPE = re.compile(r"[a-z0-9_]{1,40}", re.ASCII)
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?",
        "I8": "<i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
        "U8": "<u1",
        "U16": "<u2",
        "U32": "<u4",
        "U64": "<u8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "C64": "<c8",
        "C128": "<c16",
    }.items()
}
"""Types of numbers that numpy has, by their names in an index."""
_SCALAR_NAMES: dict[type, str] = {dtype.type: name for name, dtype in NUMPY_DTYPES.items()}


class TensorRef(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"key": "$tensor"}
):
    """Torch tensor in a `$tensor` node: its key, device, flags and memory order."""

    key: str
    device: str = "cpu"
    grad: bool = False
    parameter: bool = False
    order: tuple[int, ...] = ()
    """Its dimensions from the outermost to the innermost in memory; empty when row-major."""


class SubclassRef(msgspec.Struct, frozen=True):
    """A tensor subclass, stored as its inner tensors. Class and context are only compared.

    As a mapping it has its inner tensors, and behind them the others as `$type`, `$context`, ….
    """

    type: str
    """Its class, "module:Name", which is never imported."""
    shape: tuple[int, ...]
    dtype: str
    tensors: Mapping[str, Any]
    """Name of each inner tensor -> `TensorRef`, or `SubclassRef`."""
    context: Any

    items: ClassVar[Any] = Mapping.items
    values: ClassVar[Any] = Mapping.values
    __contains__ = Mapping.__contains__

    def __iter__(self) -> Iterator[str]:
        return iter((*self.tensors, "$type", "$shape", "$dtype", "$context"))

    def __len__(self) -> int:
        return len(self.tensors) + 4

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name."""
        return getattr(self, name[1:]) if name[:1] == "$" else self.tensors[name]


Mapping.register(SubclassRef)


class ArrayRef(msgspec.Struct, frozen=True, gc=False, rename={"key": "$array"}):
    """A numpy array that is stored as a tensor; encoded as an `$array` node."""

    key: str


class DtypeName(msgspec.Struct, frozen=True):
    """A torch dtype, such as "bfloat16"."""

    name: str


class DeviceName(msgspec.Struct, frozen=True):
    """A torch device, such as "cuda:0"."""

    name: str


class SizeTuple(msgspec.Struct, frozen=True):
    """The dimensions of a `torch.Size`."""

    dims: tuple[int, ...]


class GeneratorState(msgspec.Struct, frozen=True):
    """The state of a random generator; each member is a typed tree."""

    kind: str
    members: Mapping[str, Any]


class EnumValue(msgspec.Struct, frozen=True):
    """A member of an `Enum` class, `type` ("module:Name"), which is never imported."""

    type: str
    name: str | None
    value: Any


def _same_value(value: Any) -> Any:
    return value


def _write_int(value: int) -> int:
    if value.bit_length() > _MAX_INT_BITS:
        raise ValueError(f"an integer of more than {strictjson.MAX_DIGITS:,} digits")
    if value.bit_length() > 2000:
        str(value)  # raises where the interpreter is set to allow fewer digits
    return value


def _write_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits: int = struct.unpack(">Q", struct.pack(">d", value))[0]
    plain = math.isinf(value) or bits == _QUIET_NAN
    return {"$float": str(value) if plain else f"{bits:016x}"}


def _read_float(text: Any) -> float:
    if text in ("inf", "-inf", "nan"):
        return float(text)
    value: float = struct.unpack(">d", _from_hex(text, 8))[0]
    if _write_float(value) != {"$float": text}:
        raise ValueError("these bits are written in another way")
    return value


def _write_text(value: str) -> str:
    if not is_unicode(value):
        raise ValueError("text that is not Unicode (half of a surrogate pair)")
    return value


def _write_bytes(value: bytes) -> Any:
    return {"$bytes": base64.b64encode(value).decode("ascii")}


def _read_bytes(text: Any) -> bytes:
    value = base64.b64decode(_require_text(text), validate=True)
    if base64.b64encode(value) != text.encode():
        raise ValueError("base64 with bits left over")
    return value


def _write_path(value: pathlib.Path) -> Any:
    return {"$path": _write_text(value.as_posix())}


def _write_timedelta(value: datetime.timedelta) -> Any:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _read_timedelta(parts: Any) -> datetime.timedelta:
    days, seconds, microseconds = _integers(parts, count=3)
    value = datetime.timedelta(days, seconds, microseconds)
    if _write_timedelta(value) != {"$timedelta": parts}:
        raise ValueError("a time not in canonical form")
    return value


def _write_datetime(value: datetime.datetime) -> Any:
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError(f"the time zone {type(zone).__name__}; only fixed offsets can be saved")
    if zone is not None and str(zone) != str(datetime.timezone(zone.utcoffset(None))):
        raise ValueError("a time zone with a name of its own; only plain offsets can be saved")
    if value.fold:
        raise ValueError("a time with fold=1")
    return {"$datetime": value.isoformat()}


def _read_datetime(text: Any) -> datetime.datetime:
    value = datetime.datetime.fromisoformat(_require_text(text))
    if value.isoformat() != text:
        raise ValueError("a time not in canonical form")
    return value


def _write_scalar(value: np.generic) -> Any:
    name = _SCALAR_NAMES[type(value)]
    return {"$scalar": [name, np.asarray(value, dtype=NUMPY_DTYPES[name]).tobytes().hex()]}


def _read_scalar(parts: Any) -> Any:
    match parts:
        case [str() as name, str() as text] if name in NUMPY_DTYPES:
            raw = _from_hex(text, NUMPY_DTYPES[name].itemsize)
        case _:
            raise ValueError("not a dtype and hex digits")
    if name == "BOOL" and raw not in (b"\0", b"\1"):
        raise ValueError("neither true nor false")
    return np.frombuffer(raw, NUMPY_DTYPES[name])[0]


def _write_ref(value: TensorRef | ArrayRef) -> Any:
    _write_text(value.key)
    return value


def read_tensor(node: dict[str, Any]) -> TensorRef:
    """Decode a `$tensor` node; `ValueError` if the format has no such node."""
    if len(node) == 1:
        return TensorRef(_require_text(node["$tensor"]))
    if not node.keys() <= _TENSOR_MEMBERS:
        raise ValueError("another member")
    flags = [node.get(name, True) for name in ("grad", "parameter")]
    if any(flag is not True for flag in flags):
        raise ValueError("a flag that is not true")
    return TensorRef(
        _require_text(node["$tensor"]),
        _read_device(node.get("device", "cpu")).name,
        "grad" in node,
        "parameter" in node,
        _read_order(node["order"]) if "order" in node else (),
    )


def are_tensors(refs: Collection[TensorRef]) -> bool:
    """Whether the devices and dimension orders of decoded tensor nodes are valid."""
    # Not a set of orders: hashes of numbers are predictable, and could be made to collide.
    orders = filter(None, map(attrgetter("order"), refs))
    return all(map(is_device, {*map(attrgetter("device"), refs)})) and all(map(_is_order, orders))


def _is_order(order: Sequence[int]) -> bool:
    rising = list(range(len(order)))
    return sorted(order) == rising and [*order] != rising


def _read_order(parts: Any) -> tuple[int, ...]:
    order = _integers(parts)
    if not _is_order(order):
        raise ValueError("not another order of the dimensions")
    return tuple(order)


def _read_dtype(text: Any) -> DtypeName:
    if not _DTYPE.fullmatch(_require_text(text)):
        raise ValueError("not the name of a dtype")
    return DtypeName(text)


def _read_device(text: Any) -> DeviceName:
    if not is_device(_require_text(text)):
        raise ValueError("not the name of a device")
    return DeviceName(text)


def _read_size(parts: Any) -> SizeTuple:
    dims = _integers(parts)
    if not all(-_MAX_INT <= dim <= _MAX_INT for dim in dims):
        raise ValueError("a size beyond 64 bits")
    return SizeTuple(tuple(dims))


def _require_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("not text")
    return value


def _integers(value: Any, count: int | None = None) -> list[int]:
    if type(value) is not list or any(type(part) is not int for part in value):
        raise ValueError("not a list of integers")
    if count is not None and len(value) != count:
        raise ValueError(f"not {count} integers")
    return value


def _from_hex(text: Any, nbytes: int) -> bytes:
    if not re.fullmatch(r"[0-9a-f]*", _require_text(text)) or len(text) != 2 * nbytes:
        raise ValueError(f"not {2 * nbytes} hex digits")
    return bytes.fromhex(text)


def is_device(text: str) -> bool:
    """Whether `text` names a device, such as "cuda" or "cuda:0"."""
    return _DEVICE.fullmatch(text) is not None


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


WRITERS: Mapping[type, Callable[[Any], Any]] = {
    type(None): _same_value,
    bool: _same_value,
    int: _write_int,
    float: _write_float,
    str: _write_text,
    bytes: _write_bytes,
    pathlib.PosixPath: _write_path,
    pathlib.WindowsPath: _write_path,
    datetime.timedelta: _write_timedelta,
    datetime.datetime: _write_datetime,
    TensorRef: _write_ref,
    ArrayRef: _write_ref,
    DtypeName: lambda value: {"$dtype": value.name},
    DeviceName: lambda value: {"$device": value.name},
    SizeTuple: lambda value: {"$size": list(value.dims)},
    **dict.fromkeys(_SCALAR_NAMES, _write_scalar),
}
READERS: Mapping[str, Callable[[Any], Any]] = {
    "$float": _read_float,
    "$bytes": _read_bytes,
    "$path": lambda text: pathlib.Path(_require_text(text)),
    "$timedelta": _read_timedelta,
    "$datetime": _read_datetime,
    "$scalar": _read_scalar,
    "$array": lambda key: ArrayRef(_require_text(key)),
    "$dtype": _read_dtype,
    "$device": _read_device,
    "$size": _read_size,
}
