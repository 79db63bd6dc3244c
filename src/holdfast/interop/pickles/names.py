"""The names that a pickle may use, and what each becomes; no name outside this table is known.

Constructors of our own make descriptions from checked arguments. Nothing here imports torch.
"""

from __future__ import annotations

import datetime
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.format.nodes import (
    NUMPY_DTYPES,
    DeviceName,
    DtypeName,
    EnumValue,
    SizeTuple,
    is_device,
)
from holdfast.format.tensors import INDEX_NAMES, ITEM_NBYTES, MAX_DIMS
from holdfast.interop.pickles.machine import Args, Constructor, Machine, Setter
from holdfast.interop.pickles.values import (
    ArrayValue,
    ByteArray,
    CountedItems,
    DefaultItems,
    Generator,
    Global,
    NamespaceItems,
    NumpyDtype,
    OrderedItems,
    Refusal,
    Seeds,
    Span,
    Storage,
    StorageKind,
    TensorView,
    Unknown,
)

_INDEX_NAMES = {dtype.str.lstrip("|<"): name for name, dtype in NUMPY_DTYPES.items()}
"""Code of a numpy dtype → name in the index."""
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MAX_INT = 2**63 - 1


def _make_dtype(machine: Machine, args: Args) -> NumpyDtype:
    code = args[0]
    if type(code) is not str or len(code) > 40:
        raise ValueError("no code of a dtype")
    return NumpyDtype(code.lstrip("|<=>"), is_big_endian=code.startswith(">"))


def _set_dtype(machine: Machine, target: NumpyDtype, state: Any) -> None:
    _, order, _, names, *_ = state
    target.is_big_endian = order == ">"
    if names is not None:
        target.code = "a record"


def _refusal(dtype: NumpyDtype) -> str:
    if dtype.code not in _INDEX_NAMES:
        return f"a numpy array of {dtype.code!r}, which is no dtype of numbers"
    if dtype.is_big_endian and dtype.code[1:] != "1":
        return "a numpy array of big-endian numbers"
    return ""


def _reconstruct(machine: Machine, args: Args) -> Any:
    kind = args[0]
    if type(kind) is not Global:
        raise ValueError("no class of array")
    if kind.name != "numpy.ndarray":
        return ArrayValue(refusal=f"an array of class {kind.name}")
    return ArrayValue()


def _set_array(machine: Machine, target: ArrayValue, state: Any) -> None:
    _, shape, dtype, is_fortran, data = state
    if target.refusal.startswith("an array of class"):
        return
    _fill_array(machine, target, shape, dtype, bool(is_fortran), data)


def _fill_array(
    machine: Machine, target: ArrayValue, shape: Any, dtype: Any, is_fortran: bool, data: Any
) -> None:
    if type(dtype) is not NumpyDtype:
        raise ValueError("no dtype")
    target.refusal = _refusal(dtype)
    if target.refusal:
        return
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        raise ValueError("no shape")
    machine.charge(64 + 32 * len(shape))
    if any(type(size) is not int or not 0 <= size <= _MAX_INT for size in shape):
        raise ValueError("something that is not a size")
    target.dtype, target.shape, target.is_fortran = _INDEX_NAMES[dtype.code], shape, is_fortran
    target.data = raw(machine, data)
    nbytes = target.data.nbytes if isinstance(target.data, Span) else len(target.data)
    if math.prod(shape) * ITEM_NBYTES[target.dtype] != nbytes:
        raise ValueError(f"{nbytes:,} bytes for shape {list(shape)[:8]} of {target.dtype}")


def raw(machine: Machine, data: Any) -> bytes | Span:
    """Convert a bytearray or the `str` of Python 2 to bytes; bytes and spans stay."""
    if isinstance(data, ByteArray):
        return data.data
    if type(data) is str:  # bytes of Python 2 that happened to be UTF-8
        machine.charge(4 * len(data))
        return data.encode("utf-8", "surrogatepass")
    if not isinstance(data, bytes | Span):
        raise ValueError("no bytes")
    return data


def _frombuffer(machine: Machine, args: Args) -> ArrayValue:
    data, dtype, shape, order = args[:4]
    array = ArrayValue()
    machine.charge(160)
    _fill_array(machine, array, shape, dtype, order == "F", data)
    return array


def _scalar(machine: Machine, args: Args) -> Any:
    dtype, *rest = args
    if type(dtype) is not NumpyDtype:
        raise ValueError("no dtype")
    why = _refusal(dtype)
    if why:
        return Refusal(why.replace("array", "scalar"))
    data = raw(machine, rest[0])
    name = _INDEX_NAMES[dtype.code]
    if isinstance(data, Span) or len(data) != ITEM_NBYTES[name]:
        raise ValueError("not the bytes of a number")
    if name == "BOOL" and data not in (b"\0", b"\1"):
        raise ValueError("neither true nor false")
    return np.frombuffer(data, np.dtype(f"<{dtype.code}"))[0]


def _bit_generator(machine: Machine, args: Args) -> Generator:
    name = args[0] if args else "MT19937"
    plain = name.name.rpartition(".")[2] if type(name) is Global else name
    if plain not in _BIT_GENERATORS:
        raise ValueError("not a bit generator of NumPy")
    return Generator("numpy")


def _wrapped(kind: str, args: Args) -> Generator:
    """Describe a generator; numpy 1 gives only the name of its bit generator, and a state."""
    bits = args[0] if args else "MT19937"
    if isinstance(bits, Generator):
        members = dict(bits.members)
        if kind == "numpy-legacy":
            members.pop("seed_seq", None)
        return Generator(kind, members)
    if bits not in _BIT_GENERATORS:
        raise ValueError("not a bit generator of NumPy")
    return Generator(kind)


def _set_numpy_generator(machine: Machine, target: Generator, state: Any) -> None:
    seeds = None
    if type(state) is tuple and len(state) == 2:
        state, seeds = state
    if not isinstance(state, dict) or state.get("bit_generator") not in _BIT_GENERATORS:
        raise ValueError("not the state of a bit generator")
    target.members["state"] = state
    if isinstance(seeds, Seeds) and seeds.members is not None and target.kind == "numpy":
        target.members["seed_seq"] = seeds.members


def _set_seeds(machine: Machine, target: Seeds, state: Any) -> None:
    """Set the members of a SeedSequence, in order: entropy, children, pool, its size, key."""
    if type(state) is not tuple or len(state) < 5:
        raise ValueError("not the state of a seed sequence")
    entropy, num_children, _, pool_size, key = state[:5]
    words = [*entropy] if type(entropy) in (list, tuple) else entropy
    if not isinstance(words, int | list) or type(key) is not tuple:
        return  # such as an array; without it only what `spawn` would make is unknown
    machine.charge(8 * len(key) + 8 * (len(words) if isinstance(words, list) else 1))
    target.members = {
        "entropy": words,
        "spawn_key": [*key],
        "pool_size": pool_size,
        "n_children_spawned": num_children,
    }


ARRAY_NAMES: Mapping[str, Constructor] = {
    "numpy.dtype": _make_dtype,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _frombuffer,
    "numpy.random._pickle.__generator_ctor": lambda machine, args: _wrapped("numpy", args),
    "numpy.random._pickle.__randomstate_ctor": lambda machine, args: _wrapped("numpy-legacy", args),
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": lambda machine, args: Seeds(),
}
ARRAY_SETTERS: Mapping[type, Setter] = {
    NumpyDtype: _set_dtype,
    ArrayValue: _set_array,
    Seeds: _set_seeds,
    Generator: _set_numpy_generator,
}


_OTHER_DTYPES = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
_STORAGES: Mapping[str, str | None] = {
    "Double": "F64",
    "Float": "F32",
    "Half": "F16",
    "BFloat16": "BF16",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
    "ComplexDouble": "C128",
    "ComplexFloat": "C64",
    "ComplexHalf": "C32",
    "QUInt8": None,
    "QInt8": None,
    "QInt32": None,
    "QUInt4x2": None,
    "QUInt2x4": None,
}


def _constants() -> dict[str, Any]:
    found: dict[str, Any] = {
        f"torch.{name}": DtypeName(name) for name in (*INDEX_NAMES, *_OTHER_DTYPES)
    }
    for name, dtype in _STORAGES.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            full = f"{module}.{name}Storage"
            found[full] = StorageKind(full, dtype)
    for full in ("torch.UntypedStorage", "torch.storage.UntypedStorage"):
        found[full] = StorageKind(full, "U8")
    found["torch.storage._UntypedStorage"] = found["torch.UntypedStorage"]
    return found


# Tensors.


def _sizes(value: Any) -> tuple[int, ...]:
    dims = value.dims if type(value) is SizeTuple else value
    if type(dims) not in (tuple, list) or len(dims) > MAX_DIMS:
        raise ValueError(f"not a tuple of at most {MAX_DIMS} sizes")
    if any(type(size) is not int or not 0 <= size <= _MAX_INT for size in dims):
        raise ValueError("something that is not a size")
    return tuple(dims)


def _rebuild_tensor_v2(machine: Machine, args: Args, dtype: DtypeName | None = None) -> Any:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    storage, offset, size, stride, *more = args
    if type(storage) is Refusal:
        return storage
    shape, strides = _sizes(size), _sizes(stride)
    machine.charge(160 + 16 * len(shape))
    if type(storage) is not Storage or type(offset) is not int or len(shape) != len(strides):
        raise ValueError("not a storage, an offset, a size and as many strides")
    name = storage.dtype if dtype is None else INDEX_NAMES.get(dtype.name)
    if name is None:
        assert dtype is not None
        return Refusal(f"a tensor of torch.{dtype.name}, which this library does not read", True)
    if len(more) >= 3 and more[2] and isinstance(more[2], dict):
        return Refusal(f"a tensor with metadata {sorted(map(str, more[2]))[:3]}", True)
    _check_inside(storage, name, offset, shape, strides)
    return TensorView(storage, name, offset, shape, strides, grad=bool(more and more[0] is True))


def _check_inside(
    storage: Storage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    item = ITEM_NBYTES[dtype]
    extent = item
    for dim in shape:
        extent *= dim or 1
    if extent > _MAX_INT:
        raise ValueError("a shape of more bytes than 64 bits can count")
    last = offset + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    if offset < 0 or (0 not in shape and (last + 1) * item > storage.nbytes):
        raise ValueError(f"a tensor that reaches beyond its storage of {storage.nbytes:,} bytes")


def _rebuild_tensor_v3(machine: Machine, args: Args) -> Any:
    """The same with a dtype: `…, requires_grad, hooks, dtype[, metadata]`."""
    *first, dtype = args[:7]
    if type(dtype) is not DtypeName or len(args) < 7:
        raise ValueError("no dtype")
    return _rebuild_tensor_v2(machine, (*first, *args[7:]), dtype)


def _rebuild_parameter(machine: Machine, args: Args) -> Any:
    data, requires_grad, *_ = args
    if isinstance(data, Unknown | Refusal):
        return data
    if type(data) is not TensorView:
        raise ValueError("no tensor")
    machine.charge(160)
    return data.as_parameter(grad=requires_grad is True)


def _rebuild_from_type(machine: Machine, args: Args) -> Any:
    """`_rebuild_from_type_v2(function, type, args, state)`: a subclass, or one with attributes."""
    function, kind, inner, *_ = args
    plain = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
    if type(kind) is not Global or type(function) is not Global:
        raise ValueError("no class of tensor")
    if kind.name not in plain or not function.name.startswith("torch._utils._rebuild_"):
        return Unknown(kind.name, inner if type(inner) is tuple else ())
    return machine.describe_call(function, inner)


def _refuse_tensor(why: str) -> Constructor:
    return lambda machine, args: Refusal(why, is_tensor=True)


# Other values of torch.


def _torch_size(machine: Machine, args: Args) -> SizeTuple:
    (dims,) = args or ((),)
    sizes = _sizes(dims)
    machine.charge(64 + 32 * len(sizes))
    return SizeTuple(sizes)


def _torch_version(machine: Machine, args: Args) -> str:
    (text,) = args
    if type(text) is not str:
        raise ValueError("no text")
    return text


def _build_device(machine: Machine, args: Args) -> DeviceName:
    name = ":".join(str(part) for part in args[:2] if type(part) in (str, int))
    return DeviceName(checked_device(name))


def checked_device(name: Any) -> str:
    """Return the name of a device, checked."""
    if type(name) is not str or not is_device(name):
        raise ValueError("not the name of a device")
    return name


def _torch_generator(machine: Machine, args: Args) -> Generator:
    (device,) = args
    if type(device) is not DeviceName:
        raise ValueError("no device")
    return Generator("torch", {"device": device.name})


def _set_generator(machine: Machine, target: Generator, state: Any) -> None:
    machine.charge(8000)
    if target.kind == "torch":
        *_, tensor = state
        if type(tensor) is not TensorView or tensor.dtype != "U8":
            raise ValueError("the state is no tensor of bytes")
        target.members["state"] = tensor
    elif target.kind == "python":
        target.members.update(python_state(state))
    else:
        ARRAY_SETTERS[Generator](machine, target, state)


def python_state(state: Any) -> dict[str, Any]:
    """Return the members for a state as `random.getstate` gives it."""
    version, words, gauss_next = state
    if version != 3 or type(words) is not tuple or len(words) != 625:
        raise ValueError("not the state of random.Random")
    if any(type(word) is not int or not 0 <= word < 2**32 for word in words):
        raise ValueError("not the state of random.Random")
    data = np.array(words, dtype="<u4").tobytes()
    array = ArrayValue("U32", (625,), data=data, refusal="", is_tensor=True)
    return {"version": 3, "state": array, "gauss_next": gauss_next}


# Plain values.


def _items(machine: Machine, args: Args, items: dict[Any, Any]) -> Any:
    if len(args) > 1:
        raise ValueError("more than one argument")
    source = args[0] if args else {}
    if not isinstance(source, dict | list | tuple):
        raise ValueError(f"expected a dict or pairs, found {type(source).__name__}")
    machine.charge(150 * len(source))
    pairs = [*source.items()] if isinstance(source, dict) else [*source]
    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("not pairs")
    keys = machine.checked_keys([key for key, _ in pairs], cost=110)
    items.update(zip(keys, (value for _, value in pairs), strict=True))
    return items


def _mapping(kind: type[dict[Any, Any]]) -> Constructor:
    return lambda machine, args: _items(machine, args, kind())


def _collection(kind: type) -> Constructor:
    def make(machine: Machine, args: Args) -> Any:
        (source,) = args or ((),)
        if not isinstance(source, list | tuple | set | frozenset):
            raise ValueError("no collection")
        machine.charge(60 * len(source))
        if kind in (set, frozenset):
            machine.checked_keys([*source], cost=120)
        return kind(source)

    return make


def _encoded(machine: Machine, args: Args) -> bytes:
    """`_codecs.encode(text, "latin1")`, which stands for bytes before protocol 3."""
    text, encoding = args
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("not bytes written as text")
    machine.charge(len(text) + 40)
    return text.encode("latin-1")


def _bytes(machine: Machine, args: Args) -> bytes:
    if len(args) == 2:
        return _encoded(machine, args)
    if args not in ((), ("",)):
        raise ValueError("not bytes")
    return b""


def _bytearray(machine: Machine, args: Args) -> Any:
    if args and isinstance(args[0], Span):
        return Span(args[0].start, args[0].nbytes, is_mutable=True)
    data = args[0] if len(args) == 1 and type(args[0]) is bytes else _bytes(machine, args)
    return ByteArray(data)


def _timedelta(machine: Machine, args: Args) -> datetime.timedelta:
    days, seconds, microseconds = args
    if {type(part) for part in args} != {int}:
        raise ValueError("not three integers")
    return datetime.timedelta(days, seconds, microseconds)


def _datetime(machine: Machine, args: Args) -> Any:
    raw, *zone = args
    if type(raw) is str:
        raw = raw.encode("latin-1")
    if type(raw) is not bytes or len(raw) != 10:
        raise ValueError("not the ten bytes of a time")
    if zone and type(zone[0]) is not datetime.timezone:
        return Refusal("a time in a time zone that has rules")
    if raw[2] & 0x80:
        return Refusal("a time with fold=1")
    year = raw[0] * 256 + raw[1]
    microsecond = int.from_bytes(raw[7:], "big")
    month, day, hour, minute, second = raw[2:7]
    tzinfo = zone[0] if zone else None
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, tzinfo)


def _timezone(machine: Machine, args: Args) -> Any:
    offset, *name = args
    if type(offset) is not datetime.timedelta:
        raise ValueError("no offset")
    return Refusal("a time zone with a name of its own") if name else datetime.timezone(offset)


def _build_path(machine: Machine, args: Args) -> Any:
    machine.charge(200 + 100 * len(args))
    if any(type(part) is not str for part in args):
        raise ValueError("not parts of a path")
    machine.charge(4 * sum(map(len, args)))
    return pathlib.Path(*args)


def _windows_path(machine: Machine, args: Args) -> Any:
    _build_path(machine, args)
    return pathlib.Path(pathlib.PureWindowsPath(*args).as_posix())


def _member(machine: Machine, args: Args) -> Any:
    """`getattr(Class, "NAME")`, which is how Python writes some members of enumerations."""
    target, name = args
    if type(target) is not Global or type(name) is not str:
        return Unknown("builtins.getattr", args)
    return Unknown(f"{target.name}.{name[:80]}")


def enumerated(value: Unknown) -> EnumValue | None:
    """The member of an enumeration that a call of a class with one plain value may stand for."""
    module, _, name = value.name.rpartition(".")
    looks_so = name[:1].isupper() and value.state is None
    is_of_python = module.partition(".")[0] in (*sys.stdlib_module_names, "")
    if looks_so and not is_of_python and len(value.args) == 1 and type(value.args[0]) in (str, int):
        return EnumValue(f"{module}:{name}", None, value.args[0])
    return None


_PATHS: dict[str, Constructor] = {
    f"{module}.{name}": _windows_path if name == "WindowsPath" else _build_path
    for module in ("pathlib", "pathlib._local")
    # No PureWindowsPath: a tree has paths of this machine only, which would be other ones.
    for name in ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath")
}
CONSTANTS: Mapping[str, Any] = _constants()
CONSTRUCTORS: Mapping[str, Constructor] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_qtensor": _refuse_tensor("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _refuse_tensor("a sparse tensor"),
    "torch._utils._rebuild_sparse_csr_tensor": _refuse_tensor("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _refuse_tensor("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _refuse_tensor(
        "a meta tensor, which has no data"
    ),
    "torch.Size": _torch_size,
    "torch.device": _build_device,
    "torch.torch_version.TorchVersion": _torch_version,
    "torch._C.Generator": _torch_generator,
    "random.Random": lambda machine, args: Generator("python"),
    "collections.OrderedDict": _mapping(OrderedItems),
    "collections.Counter": _mapping(CountedItems),
    "collections.defaultdict": lambda machine, args: _items(machine, args[1:], DefaultItems()),
    "argparse.Namespace": lambda machine, args: NamespaceItems(),
    "types.SimpleNamespace": lambda machine, args: NamespaceItems(),
    "builtins.dict": _mapping(dict),
    "builtins.list": _collection(list),
    "builtins.tuple": _collection(tuple),
    "builtins.set": _collection(set),
    "builtins.frozenset": _collection(frozenset),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.getattr": _member,
    "_codecs.encode": _encoded,
    "datetime.timedelta": _timedelta,
    "datetime.datetime": _datetime,
    "datetime.timezone": _timezone,
    **_PATHS,
    **ARRAY_NAMES,
}
SETTERS: Mapping[type, Setter] = {
    **ARRAY_SETTERS,
    Generator: _set_generator,
    NamespaceItems: lambda machine, target, state: _items(machine, (state,), target),
}
