"""Describes numpy's values in pickles: arrays, scalars, dtypes, states of random generators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.format.nodes import NUMPY_DTYPES
from holdfast.format.tensors import ITEM_NBYTES, MAX_DIMS
from holdfast.interop.pickles.machine import Args, Constructor, Machine, Setter
from holdfast.interop.pickles.values import (
    ArrayValue,
    ByteArray,
    Generator,
    Global,
    NumpyDtype,
    Refusal,
    Seeds,
    Span,
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
        raise ValueError("no bit generator of numpy")
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
        raise ValueError("no bit generator of numpy")
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
