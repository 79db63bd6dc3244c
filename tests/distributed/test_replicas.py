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
from holdfast import CheckpointManager, Checkpoints, PerRank, load_weights
from holdfast.data import Loader
from holdfast.errors import HoldfastError, UnsupportedState
from holdfast.saving.distributed import _COMPARED_EVERY
from holdfast.train import Trainer
from marks import full
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


def plain() -> nn.Sequential:
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
    """Buffers with and without DDP."""
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
    return found


def test_buffers_come_from_rank_0_under_ddp(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(on_two_ranks, tmp_path))
    assert first is not None
    assert second is not None
    for name in ("wrapper", "inside", "average"):
        assert first[name] == second[name] == "committed", first[name]
    assert first["large"] == second["large"] != "0.0"
    for name in ("forgotten", "apart"):
        assert "hold different values" in first[name]
    assert "model.norm.running_mean: rank 0 and rank 1" in first["apart"]


class Holding:
    """A user's own object with a state, around a part of the training."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def state_dict(self) -> Any:
        return self.part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.part.load_state_dict(state)


def under_fsdp1(root: Path, rank: int) -> list[str]:
    """Refuse everything that holds FSDP1; return the weights that were loaded wrongly."""
    wrong = []
    for keeps_parameters in (False, True):
        module = FullyShardedDataParallel(
            plain(), device_id=torch.device("cpu"), use_orig_params=keeps_parameters
        )
        optimizer = torch.optim.AdamW(module.parameters())
        ways = [
            nn.Sequential(module),
            module.module,
            optimizer,
            PerRank(optimizer),
            Holding(module),
            Holding(optimizer),
        ]
        for part in ways:
            with pytest.raises(UnsupportedState, match=r"part: FullyShardedDataParallel \(FSDP1\)"):
                CheckpointManager(root / "refused", {"part": part})
        with pytest.raises(UnsupportedState, match="FSDP1"):
            Trainer(
                module,
                optimizer=optimizer,
                data=Loader(torch.ones(8, 8), batch_size=2),
                loss=lambda model, batch: model(batch).sum(),
                checkpoints=Checkpoints(root / "trainer"),
            )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        CheckpointManager(root / "scheduler", {"part": scheduler}).close()
        load_weights(root / "plain", module)
        found = module.state_dict()
        expected = load_weights(root / "plain")
        wrong += [name for name in expected if not torch.equal(found[name], expected[name])]
    return wrong


@pytest.mark.parametrize("num_ranks", [2, *full(1)])
def test_fsdp1_is_refused_however_it_is_held_and_gets_weights(
    num_ranks: int, tmp_path: Path
) -> None:
    model = plain()
    nn.init.ones_(model[0].weight)
    with CheckpointManager(tmp_path / "plain", {"model": model}) as manager:
        manager.save(1, wait=True)
    found = run_ranks(num_ranks, partial(under_fsdp1, tmp_path))
    assert found == [[]] * num_ranks


@pytest.mark.parametrize("name", ["DeepSpeedEngine", "DeepSpeedOptimizer"])
def test_deepspeed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Classes of its names stand in, as it is not installed here."""
    kind = nn.Module if name == "DeepSpeedEngine" else object
    base = type(name, (kind,), {"__module__": "deepspeed.runtime"})
    part = type("Derived", (Holding, base), {})(None) if kind is object else base()
    model = plain()
    partitioned = plain()
    partitioned[0].weight.ds_id = 0
    for state in (part, Holding(part), partitioned):
        with pytest.raises(UnsupportedState, match="part: DeepSpeed"):
            CheckpointManager(tmp_path, {"model": model, "part": state})
    with CheckpointManager(tmp_path / "plain", {"model": model}) as manager:
        manager.save(1, wait=True)
    with pytest.raises(UnsupportedState, match="DeepSpeed"):
        load_weights(tmp_path / "plain", partitioned)


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
