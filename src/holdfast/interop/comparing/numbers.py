"""Numbers in the bytes of a tensor, of every dtype, with numpy alone.

Types that numpy lacks are decoded exactly: bfloat16 by a shift, others by a table. The real and
the imaginary part of a complex number are two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

CHUNK = 1 << 14
"""Most numbers that are computed with at a time: they fit the processor's cache. Of larger arrays
each is mapped and unmapped by the system, which takes as long as the computation."""
CHUNK_OF_FLOAT32 = 1 << 18
"""The same of float32 numbers, which are computed with where they lie. More than fit that cache:
threads hand the interpreter to each other at every call, and with half as many numbers a call these
turns took a third of the processors."""

_NATIVE: Mapping[str, tuple[str, str]] = {
    "BOOL": ("u1", "f4"),
    "U8": ("u1", "f4"),
    "I8": ("i1", "f4"),
    "U16": ("<u2", "f4"),
    "I16": ("<i2", "f4"),
    "U32": ("<u4", "f8"),
    "I32": ("<i4", "f8"),
    "U64": ("<u8", "f8"),
    "I64": ("<i8", "f8"),
    "F16": ("<f2", "f4"),
    "F32": ("<f4", "f4"),
    "F64": ("<f8", "f8"),
    "C32": ("<f2", "f4"),
    "C64": ("<f4", "f4"),
    "C128": ("<f8", "f8"),
}
"""dtype → numpy's type of its numbers, and the float type that holds each of them. It holds 64-bit
integers rounded to 53 bits."""


@dataclass(frozen=True, slots=True)
class _Minifloat:
    """A float type of eight bits."""

    num_mantissa_bits: int
    bias: int
    has_infinity: bool = False
    nan: tuple[int, ...] = ()
    """Codes that are no number; with `has_infinity` those of the largest exponent, too."""


_MINIFLOATS: Mapping[str, _Minifloat] = {
    "F8_E4M3": _Minifloat(3, 7, nan=(0x7F, 0xFF)),
    "F8_E5M2": _Minifloat(2, 15, has_infinity=True),
    "F8_E4M3FNUZ": _Minifloat(3, 8, nan=(0x80,)),
    "F8_E5M2FNUZ": _Minifloat(2, 16, nan=(0x80,)),
}


_FLOAT4 = "F4_X2"
_FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "f4")
"""Numbers of the 16 codes of float4_e2m1fn; the first of two is in the low bits of its byte."""

_DOT = 1 << 13
"""Numbers of one product. For more than 10,000 OpenBLAS wakes threads that spin: on a busy machine
that took ten times the processor time."""


def sum_of_squares(numbers: Any) -> float:
    """Return the sum of the squares of float64 numbers."""
    stop = len(numbers) - len(numbers) % _DOT
    rows, rest = numbers[:stop].reshape(-1, _DOT), numbers[stop:]
    # One call for all products: threads hand the interpreter to each other at every call.
    return float(np.matmul(rows[:, None, :], rows[:, :, None]).sum()) + float(np.dot(rest, rest))


def number_nbytes(dtype: str) -> int:
    """Return the bytes of one number: those of an element, or half of them if it is complex."""
    native = _NATIVE.get(dtype)
    if native is not None:
        return np.dtype(native[0]).itemsize
    return 2 if dtype == "BF16" else 1


def numbers_of_element(dtype: str) -> int:
    """Return how many numbers an element holds: two if complex or packed float4, else one."""
    return 2 if dtype in ("C32", "C64", "C128", _FLOAT4) else 1


def chunks(memory: memoryview, dtype: str) -> Iterator[Any]:
    """Yield a tensor's numbers, `CHUNK` at a time, as float32 if that is exact, else float64."""
    raw = np.frombuffer(memory, np.uint8)
    is_float32 = _NATIVE.get(dtype) == ("<f4", "f4")
    step = number_nbytes(dtype) * (CHUNK_OF_FLOAT32 if is_float32 else CHUNK)
    for start in range(0, len(raw), step):
        yield floats(raw[start : start + step], dtype)


def floats(raw: Any, dtype: str) -> Any:
    """Return the numbers in some bytes, as float32 where that holds each of them, else float64."""
    native = _NATIVE.get(dtype)
    if native is not None:
        found, wide = native
        if dtype == "BOOL":
            return (raw != 0).astype(wide)
        return raw.view(found).astype(wide, copy=False)
    if dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    if dtype == _FLOAT4:
        pairs = np.empty((len(raw), 2), np.uint8)
        pairs[:, 0], pairs[:, 1] = raw & 15, raw >> 4
        return _FLOAT4_VALUES.take(pairs.reshape(-1))
    return _compute_code_values(dtype).take(raw)


@cache
def _compute_code_values(dtype: str) -> Any:
    """Return the value of each of the 256 codes of an 8-bit type."""
    if dtype == "F8_E8M0":
        return np.array([2.0 ** (code - 127) for code in range(255)] + [math.nan], np.float32)
    form = _MINIFLOATS[dtype]
    return np.array([_decode_float(code, form) for code in range(256)], np.float32)


def _decode_float(code: int, form: _Minifloat) -> float:
    if code in form.nan:
        return math.nan
    sign, rest = -1.0 if code & 0x80 else 1.0, code & 0x7F
    exponent, mantissa = divmod(rest, 1 << form.num_mantissa_bits)
    top = (0x7F >> form.num_mantissa_bits) if form.has_infinity else -1
    if exponent == top:
        return math.nan if mantissa else sign * math.inf
    if exponent:
        mantissa += 1 << form.num_mantissa_bits
    return sign * math.ldexp(mantissa, max(exponent, 1) - form.bias - form.num_mantissa_bits)
