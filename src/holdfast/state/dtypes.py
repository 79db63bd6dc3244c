"""Names of dtypes in the format, and those of numpy. A dtype without a name cannot be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import FormatError

_INDEX_NAMES = {
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
}

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, name): index for name, index in _INDEX_NAMES.items() if hasattr(torch, name)
}
"""torch dtype -> name in the index; the 8-bit scales are absent in a torch that lacks them."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Name in the index -> torch dtype."""

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    index: np.dtype(name)
    for name, index in _INDEX_NAMES.items()
    if name not in ("bfloat16", "complex32") and not name.startswith("float8")
}
"""Name in the index -> numpy dtype in native byte order, for the types that numpy has."""

_BY_PLAIN_NAME = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def plain_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is saved as a value: `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def by_plain_name(name: str) -> torch.dtype:
    """Return the dtype with this name; the inverse of `plain_name`.

    Raises:
        FormatError: this torch has no such type.
    """
    dtype = _BY_PLAIN_NAME.get(name)
    if dtype is None:
        raise FormatError(f"this torch ({torch.__version__}) has no dtype {name[:40]!r}")
    return dtype
