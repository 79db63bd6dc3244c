"""What the scripts share: a tiny model, and the record of what a peer reads back.

`expected.json` has a node for each file of the sample, in the grammar of docs/format.md, section 6,
but for two: `{"$object": "module.Name"}` is a value that only the peer's own code can make, and
`$tensor` and `$array` have dtype, shape and first byte. The bytes are in `expected.npz`.
"""

from __future__ import annotations

import base64
import datetime
import importlib.metadata
import json
import math
import pathlib
import platform
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

STEPS = 3
"""Optimizer steps before a sample is saved."""


def make_model() -> Any:
    """Return a model with dropout and batch norm: 46 numbers."""
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    )


def make_batches(number: int = STEPS) -> list[Any]:
    """Return batches of 4 rows with 3 numbers."""
    import torch

    return [*torch.randn(number, 4, 3, generator=torch.Generator().manual_seed(2))]


def write_record(folder: pathlib.Path, read_back: Mapping[str, Any], *packages: str) -> None:
    """Write what a peer reads back of each file, and the versions of what has written it."""
    record = _Record()
    nodes = {name: record.node(value) for name, value in read_back.items()}
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("numpy", *packages)}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    (folder / "expected.json").write_text(json.dumps(nodes, separators=(",", ":")) + "\n")
    data = np.frombuffer(bytes(record.data), np.uint8)
    np.savez_compressed(folder / "expected.npz", bytes=data)


class _Record:
    def __init__(self) -> None:
        self.data = bytearray()

    def node(self, value: Any) -> Any:
        """Return the node of a value, and keep the bytes of its tensors."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is list:
            return [self.node(one) for one in value]
        if kind in (tuple, set, frozenset):
            return {f"${kind.__name__}": [self.node(one) for one in value]}
        if isinstance(value, dict):
            return self._dict(value)
        if kind.__module__.partition(".")[0] in ("torch", "numpy"):
            return self._of_library(value)
        return _plain(value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        pairs = [(self.node(key), self.node(one)) for key, one in value.items()]
        if type(value) is Counter:
            return {"$counter": pairs}
        if type(value) is OrderedDict:
            return {"$ordered": pairs}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": pairs}

    def _of_library(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"$array": self._kept(value, value.dtype.name)}
        if isinstance(value, np.generic):
            return {"$scalar": [_NAMES[value.dtype.name], value.tobytes().hex()]}
        import torch

        if isinstance(value, torch.Tensor):
            name = str(value.dtype).removeprefix("torch.")
            plain = value.detach().cpu().contiguous()
            if name not in _NUMPYS:
                plain = plain.view({1: torch.uint8, 2: torch.int16}[plain.element_size()])
            return {"$tensor": self._kept(plain.numpy(), name)}
        if isinstance(value, torch.Size):
            return {"$size": [*value]}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        return _plain(value)

    def _kept(self, array: Any, dtype: str) -> list[Any]:
        start = len(self.data)
        self.data += array.tobytes()
        return [_NAMES[dtype], [*array.shape], start]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, pathlib.Path):
        return {"$path": value.as_posix()}
    if type(value) is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if type(value) is datetime.datetime:
        return {"$datetime": value.isoformat()}
    made = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return {"$object": f"{made.__module__}.{made.__qualname__}"}


_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
    "complex128": "C128",
}
_NUMPYS = {name for name in _NAMES if not name.startswith(("bfloat", "float8"))}


def folder_argument() -> pathlib.Path:
    """Return the folder that the script was given to fill."""
    return pathlib.Path(sys.argv[1])
