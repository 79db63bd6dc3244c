"""Ranks that shard a small model in several ways, train it for a step and tell what each holds.

`python sharded.py SIZE FOLDER` forks the ranks, each of which writes `FOLDER/RANK.pt`: by way and
path the global shape, the boxes, their elements, and the full tensor that torch gathers.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.state.shards import LocalShards, shards_of

Make: TypeAlias = Callable[[nn.Module], None]


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)


def _tp(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _fsdp_tp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _tp(model, mesh["tp"])
    _fsdp(model, mesh["dp"])


def _uneven_fsdp_tp(model: nn.Module) -> None:
    """Seven rows over two, then over three; from left to right some ranks would differ."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model[0], mesh=mesh["dp"])  # type: ignore[index]


def _hsdp(model: nn.Module) -> None:
    _fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


WAYS: Mapping[int, Mapping[str, Make]] = {
    2: {
        "fsdp2": lambda model: _fsdp(model, init_device_mesh("cpu", (2,))),
        "tp": lambda model: _tp(model, init_device_mesh("cpu", (2,))),
    },
    4: {
        "fsdp2": lambda model: _fsdp(model, init_device_mesh("cpu", (4,))),
        "fsdp2 x tp": _fsdp_tp,
        "hsdp": _hsdp,
    },
    6: {"fsdp2 x tp": _uneven_fsdp_tp},
}
"""By number of ranks and name: shards a model of two linear layers, whose rows leave a rest."""


def trained(make: Make, width: int) -> dict[str, Tensor]:
    """The parameters and the slots of AdamW after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    make(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    tensors = dict(model.named_parameters())
    names = {parameter: name for name, parameter in tensors.items()}
    slots = {
        f"{names[parameter]}.{slot}": value
        for parameter, held in optimizer.state.items()
        for slot, value in held.items()
    }
    return {**tensors, **slots}


def distributed(size: int) -> dict[str, Tensor]:
    """Tensors in placements that no model above has."""
    line = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2))
    values = torch.arange(24 * 5.0).reshape(24, 5)
    return {
        "strided": distribute_tensor(values, line, [_StridedShard(0, split_factor=2)]),
        "columns": distribute_tensor(values, line, [Shard(1)]),
        "nested": distribute_tensor(values[:7], square, [Shard(0), Shard(0)]),
        "both": distribute_tensor(values, square, [Shard(1), Shard(0)]),
        "short": distribute_tensor(values[:1], line, [Shard(0)]),
        "none": distribute_tensor(values[:0], line, [Shard(0)]),
    }


def told(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank holds of each tensor, and all of it."""
    found = {}
    for path, tensor in tensors.items():
        shards = shards_of(tensor)
        assert isinstance(shards, LocalShards)
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        boxes = [tuple(box) for box in shards.boxes]
        views = [view.detach().clone() for view in shards.views]
        found[path] = (shards.shape, boxes, views, full.detach())
    return found


def run(rank: int, size: int, folder: Path) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = {name: told(trained(make, 7 if size == 6 else 14)) for name, make in WAYS[size].items()}
    found["distributed"] = told(distributed(size))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Fork all ranks and wait for them."""
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, size, folder)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
