"""Small trainings on several ranks, each parallel in one of torch's ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTHS = (10, 14, 7)
"""Of the layers: no number of ranks here divides all of them, so shards are uneven."""


@dataclass(frozen=True)
class Way:
    """A way to train in parallel, and the numbers of ranks that it takes."""

    wrap: Callable[[nn.Module, int], nn.Module]
    ranks: tuple[int, ...]


def _plain(model: nn.Module, world_size: int) -> nn.Module:
    return model


def _ddp(model: nn.Module, world_size: int) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp(model: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _hsdp(model: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


def _tp(model: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _fsdp_tp(model: nn.Module, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


WAYS: Mapping[str, Way] = {
    "plain": Way(_plain, (1, 2, 3, 4)),
    "ddp": Way(_ddp, (1, 2, 3, 4)),
    "fsdp": Way(_fsdp, (1, 2, 3, 4)),
    "hsdp": Way(_hsdp, (2, 4)),
    "tp": Way(_tp, (1, 2)),  # heads and columns have to be divisible
    "fsdp_tp": Way(_fsdp_tp, (4,)),
}


@dataclass
class Job:
    """One training on this rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        """The components."""
        return {"model": self.model, "optimizer": self.optimizer, "data": {"batches": 0}}

    def step(self) -> None:
        """Take an optimizer step on a batch that is the same on all ranks."""
        inputs = torch.linspace(-1, 1, 4 * WIDTHS[0]).reshape(4, WIDTHS[0])
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        outputs.square().mean().backward()
        self.optimizer.step()

    def whole(self) -> dict[str, bytes]:
        """Gather the bytes of all tensors of model and optimizer, whole, by name."""
        module = self.model.module if hasattr(self.model, "module") else self.model
        assert isinstance(module, nn.Module)
        found = {}
        for name, parameter in module.named_parameters():
            found[name] = _whole(parameter)
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{slot}"] = _whole(value)
        return found


def _whole(tensor: Tensor) -> bytes:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().numpy().tobytes()


def make(way: str, seed: int) -> Job:
    """Make a training whose first weights follow from a seed."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2])
    )
    model = WAYS[way].wrap(model, dist.get_world_size())
    return Job(model, torch.optim.AdamW(model.parameters(), lr=0.1))
