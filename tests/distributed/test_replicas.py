"""What ranks hold under one name is compared, and no way to train on several ranks differs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from distributed.run import run_ranks
from holdfast import CheckpointManager, Checkpoints
from holdfast.data import Loader
from holdfast.errors import HoldfastError, UnsupportedState
from holdfast.saving.distributed import _COMPARED_EVERY
from holdfast.train import Trainer
from stages import Stage

State = dict[str, Any]


class Normed(nn.Module):
    """Two layers with batch norm, and a large buffer that counts each rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("large", torch.zeros(30_000))

    def forward(self, batch: Tensor) -> Tensor:
        """Change the buffers, as batch norm does."""
        self.large: Tensor
        self.large.add_(batch.sum())
        return self.last(self.norm(self.first(batch)))  # type: ignore[no-any-return]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def train(state: State, model: nn.Module) -> None:
    """One step on batches of this rank."""
    model(torch.randn(4, 8)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def saves(root: Path, state: State, step: Callable[[], None], num_saves: int) -> str:
    """Train and save; "committed", or the first error."""
    with CheckpointManager(root, state, preflight=False) as manager:
        try:
            for number in range(num_saves):
                step()
                manager.save(number, wait=True)
        except HoldfastError as error:
            return str(error)
    return "committed"


def optimized(model: nn.Module) -> State:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def on_two_ranks(root: Path, rank: int) -> dict[str, str]:
    """Buffers with and without DDP, and FSDP1."""
    found = {}
    for name in ("forgotten", "apart", "wrapper", "inside", "average"):
        torch.manual_seed(1)
        inside = Normed()
        model: nn.Module = inside
        if name != "forgotten":
            model = DistributedDataParallel(inside, broadcast_buffers=name != "apart")
        torch.manual_seed(rank)
        state = optimized(model if name == "wrapper" else inside)
        if name == "average":
            state["average"] = AveragedModel(inside)

        def step(
            state: State = state, model: nn.Module = model, inside: nn.Module = inside
        ) -> None:
            train(state, model)
            if "average" in state:
                state["average"].update_parameters(inside)

        found[name] = saves(root / name, state, step, 2)
        if name == "inside":
            with CheckpointManager(root / name, state, preflight=False) as manager:
                manager.resume()
            found["large"] = str(float(inside.large[0]))
        del model
    try:
        wrapped = FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))
        found["fsdp1"] = saves(root / "fsdp1", {"model": nn.Sequential(wrapped)}, lambda: None, 1)
    except UnsupportedState as error:
        found["fsdp1"] = str(error)
    try:
        Trainer(
            wrapped,
            optimizer=torch.optim.SGD(wrapped.parameters()),
            data=Loader(torch.ones(8, 8), batch_size=2),
            loss=lambda model, batch: model(batch).sum(),
            checkpoints=Checkpoints(root / "trainer"),
        )
    except UnsupportedState as error:
        found["trainer"] = str(error)
    return found


def test_buffers_come_from_rank_0_under_ddp_and_fsdp1_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(on_two_ranks, tmp_path))
    assert first is not None
    assert second is not None
    for name in ("wrapper", "inside", "average"):
        assert first[name] == second[name] == "committed", first[name]
    assert first["large"] == second["large"] != "0.0"
    for name in ("forgotten", "apart"):
        assert "hold different values" in first[name]
    assert "model.norm.running_mean: rank 0 and rank 1" in first["apart"]
    for name in ("fsdp1", "trainer"):
        assert "model: FullyShardedDataParallel (FSDP1) is not supported" in first[name]


def ddp(rank: int) -> tuple[State, nn.Module]:
    model = DistributedDataParallel(plain())
    return optimized(model), model


def fsdp2(rank: int) -> tuple[State, nn.Module]:
    model = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return optimized(model), model


def hsdp(rank: int) -> tuple[State, nn.Module]:
    model = plain()
    shape = (2, dist.get_world_size() // 2)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")))
    return optimized(model), model


def tp(rank: int) -> tuple[State, nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(plain(), mesh, styles)
    return optimized(model), model


def pp(rank: int) -> tuple[State, nn.Module]:
    stage = Stage.of(rank, dist.get_world_size())
    return stage.state, stage.model


def ep(rank: int) -> tuple[State, nn.Module]:
    stage = Stage(range(rank, 8, dist.get_world_size()), router=99)
    return stage.state, stage.model


def differing(root: Path, rank: int) -> str:
    """HSDP whose replicas were not averaged."""
    state, model = hsdp(rank)
    parameter = next(model.parameters())
    with torch.no_grad():
        parameter._local_tensor.add_(rank // 2)  # type: ignore[attr-defined]
    return saves(root / "hsdp-apart", state, lambda: None, 1)


def on_four_ranks(root: Path, rank: int) -> dict[str, str]:
    found = {}
    for way in (ddp, fsdp2, hsdp, tp, pp, ep):
        state, model = way(rank)
        torch.manual_seed(0 if way is tp else rank)  # its ranks have the same batches

        def step(state: State = state, model: nn.Module = model) -> None:
            if isinstance(model, nn.ModuleDict):
                Stage.train(_Both(state, model))  # type: ignore[arg-type]
            else:
                train(state, model)

        found[way.__name__] = saves(root / way.__name__, state, step, _COMPARED_EVERY + 3)
    found["differing"] = differing(root, rank)
    return found


class _Both:
    def __init__(self, state: State, model: nn.Module) -> None:
        self.model, self.optimizer = model, state["optimizer"]


@pytest.mark.full
def test_no_way_to_train_on_four_ranks_is_refused_unless_replicas_differ(tmp_path: Path) -> None:
    for found in run_ranks(4, partial(on_four_ranks, tmp_path)):
        assert found is not None
        assert "model.0.weight: rank 0 and rank 2 hold different values" in found.pop("differing")
        assert {*found.values()} == {"committed"}, found
