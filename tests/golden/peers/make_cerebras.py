"""Checkpoints of Cerebras: one by `cstorch.save`, and one by the writer of its files alone."""

from __future__ import annotations

from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import cerebras.pytorch as cstorch
import numpy as np
import torch
from cerebras.appliance.storage.h5_storage import Compression, H5Writer
from cerebras.pytorch.storage.serializers import DeferredFullTensor
from sample import folder_argument, write_record


def make_state() -> dict[str, Any]:
    """Return a small state, and a value of each kind."""
    shared = torch.arange(3)
    return {
        "model": OrderedDict(weight=torch.ones(2, 3), bias=torch.tensor([1.5, -2.0]).bfloat16()),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.5}]},
        "global_step": 3,
        "text": "häl",
        "tuple": (True, None),
        "shared": [shared, shared],
        "array": np.arange(4.0),
        "empty": torch.zeros(0, 3),
        "filled": DeferredFullTensor(torch.Size([2, 2]), torch.bfloat16, 1.5),
        "object": complex(1, 2),
    }


def materialised(value: Any) -> Any:
    """Return plain tensors and arrays for those that are read when they are used."""
    if isinstance(value, torch.Tensor):
        return (value + 0 if value.dtype != torch.bool else value).clone().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return type(value)((key, materialised(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(materialised(one) for one in value)
    if type(value).__name__ == "DeferredNumpyArray":
        return np.asarray(value)
    if type(value).__name__ == "DeferredObject":
        return value.value
    return value


def write_alone(path: Path, compression: Compression, shape: tuple[int, int]) -> None:
    """Write an array, a scalar and a pickled object."""
    with H5Writer(str(path), compression) as writer:
        array = np.arange(shape[0] * shape[1], dtype=np.int16).reshape(shape) // 64
        writer.write_numpy("array", array, {"__TYPE__": "NumpyArraySerializer"})
        writer.write_numpy("scalar", np.array(2.5), {"__TYPE__": "NumpyArraySerializer"})
        writer.write_bytes("object", BytesIO(b"a pickle"), {"__TYPE__": "ObjectSerializer"})


def main() -> None:
    folder = folder_argument()
    cstorch.save(make_state(), str(folder / "state.mdl"))
    write_alone(folder / "lz4.mdl", Compression.LZ4, (300, 130))
    write_alone(folder / "gzip.mdl", Compression.GZIP, (6, 10))
    read_back = {"state.mdl": materialised(cstorch.load(str(folder / "state.mdl")))}
    packages = ("cerebras-pytorch", "cerebras-appliance", "torch", "h5py", "hdf5plugin")
    write_record(folder, read_back, *packages)


main()
