"""Folders of PyTorch Distributed Checkpoint: of one process, of two, with safetensors inside, and
with the metadata of torch 2.15.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sample import STEPS, folder_argument, make_batches, make_model, write_record
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter, metadata
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh


def main() -> None:
    warnings.simplefilter("ignore")
    folder = folder_argument()
    weights = make_model().state_dict()
    dcp.save(_state(), checkpoint_id=folder / "one", no_dist=True)
    with _six_properties():
        dcp.save(weights, checkpoint_id=folder / "six", no_dist=True)
    format_ = SerializationFormat.SAFETENSORS
    writer = FileSystemWriter(folder / "safetensors", serialization_format=format_)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    torch.multiprocessing.spawn(_rank, (folder,), nprocs=2)
    read_back = {name: _read(folder / name) for name in ("one", "six", "two")}
    # torch reads neither back without being given tensors of these sizes.
    read_back |= {"safetensors": weights, "sharded": _sharded()}
    write_record(folder, read_back, "torch", "safetensors")


def _state() -> dict[str, Any]:
    """Return what one saves of a training, each item of which takes more than 1 kB."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for batch in make_batches():
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
        "step": STEPS,
        "rates": [0.5, (1, "a"), {"inner": torch.arange(3, dtype=torch.bfloat16)}],
    }


def _sharded() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(15.0).view(5, 3),
        "columns": torch.arange(12).view(2, 6),
        "both": torch.arange(8.0).half(),
    }


def _rank(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}
    sharded = {
        name: distribute_tensor(tensor, mesh, [placements[name]])
        for name, tensor in _sharded().items()
    }
    dcp.save({"model": sharded, "step": STEPS}, checkpoint_id=folder / "two")
    writer = HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
    dcp.save(sharded, storage_writer=writer)
    torch.distributed.destroy_process_group()


class _six_properties:
    """Within it, tensors are pickled with six properties as by torch 2.15, the last the strides."""

    def __enter__(self) -> None:
        self._own = metadata.TensorProperties.__getstate__

        def __getstate__(properties: Any) -> tuple[Any, ...]:
            return (*self._own(properties), (3, 1))

        metadata.TensorProperties.__getstate__ = __getstate__  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        metadata.TensorProperties.__getstate__ = self._own  # type: ignore[method-assign]


def _read(folder: Path) -> Any:
    """Read a folder as torch does, which needs to know 5 properties only."""
    own = metadata.TensorProperties.__setstate__

    def __setstate__(properties: Any, state: tuple[Any, ...]) -> None:
        own(properties, state[: len(dataclasses.fields(properties))])

    metadata.TensorProperties.__setstate__ = __setstate__  # type: ignore[method-assign]
    path = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, path)
    found = torch.load(path, weights_only=False)
    path.unlink()
    metadata.TensorProperties.__setstate__ = own  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    main()
