"""DTensors whose local tensors are tensor subclasses: resumed on the same and on other ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distributed.run import run_ranks
from holdfast import CheckpointManager
from holdfast.errors import MismatchError
from holdfast.state.leaves import local_of
from quantized import Scaled, bits_of, import_torchao

BLOCK = 4
"""Elements of a scale."""


class Blocked(Scaled):
    """Codes with a scale for each block of elements, and a table that is the same for all."""

    table: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "table"], {"shape": self.codes.shape, "signed": True}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Blocked:
        made = cls(inner["codes"], inner["scale"], {})
        made.table = inner["table"]
        return made


class BlockedMomentum(torch.optim.Optimizer):
    """A moment of `Blocked` local tensors, for parameters of which all shards have whole blocks."""

    def __init__(self, parameters: Any, table: float = 0.5) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.table = table

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            local, grad = local_of(parameter), local_of(parameter.grad)
            state = self.state[parameter]
            if not state:
                state["moment"] = as_placed(parameter, self._new_moment(local))
            moment: Any = local_of(state["moment"])
            moment.codes.add_(grad.sign().to(torch.int8))
            moment.scale.add_(grad.reshape(-1, BLOCK).abs().sum(1))
            local.sub_((moment.codes * moment.table.sum()).reshape(local.shape) * 0.01)

    def _new_moment(self, local: Tensor) -> Tensor:
        inner = {
            "codes": torch.zeros(local.shape, dtype=torch.int8),
            "scale": torch.zeros(local.numel() // BLOCK),
            "table": torch.full((3,), self.table),
        }
        return Blocked.__tensor_unflatten__(inner, {}, local.shape, local.stride())


def as_placed(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def new_state(make: Any, seed: int, width: int = 8) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optimizer": make(model.parameters()), "data": {}}


def train(state: dict[str, Any], steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    width = state["model"][0].in_features
    with torch.compiler.set_stance("force_eager"):
        for _ in range(steps):
            state["model"](torch.randn(2, width, generator=generator)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()


def local_bits(state: dict[str, Any]) -> list[list[bytes]]:
    held = state["optimizer"].state
    tensors = [*state["model"].parameters()]
    tensors += [slot for one in [*tensors] for slot in held[one].values()]
    return [bits_of(tensor) for tensor in tensors]


def blocks_of(state: dict[str, Any]) -> list[list[list[float]]]:
    """Codes and scales of all ranks behind each other, and the table."""
    found = []
    for parameter in state["model"].parameters():
        moment: Any = local_of(state["optimizer"].state[parameter]["moment"])
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, (moment.codes.flatten().tolist(), moment.scale.tolist()))
        found += [[value for one in of_all for value in one[at]] for at in (0, 1)]
        found.append(moment.table.tolist())
    return found


def save_and_resume(rank: int, root: Path, make: Any, width: int) -> bool:
    state = new_state(make(), 0, width)
    train(state, 2)
    with CheckpointManager(root, state) as manager:
        manager.save(2, wait=True)
    train(state, 2)
    again = new_state(make(), 1, width)
    with CheckpointManager(root, again) as manager:
        assert manager.resume() is not None
    train(again, 2)
    return local_bits(again) == local_bits(state)


def save(rank: int, root: Path, make: Any = BlockedMomentum) -> Any:
    state = new_state(make, 0)
    train(state, 2)
    with CheckpointManager(root, state) as manager:
        manager.save(2, wait=True)
    return blocks_of(state)


def resume(rank: int, root: Path, make: Any = BlockedMomentum) -> Any:
    state = new_state(make, 1)
    with CheckpointManager(root, state) as manager:
        manager.resume()
    return blocks_of(state)


def blocked() -> Any:
    return BlockedMomentum


def of_torchao(name: str) -> Any:
    return getattr(import_torchao().optim, name)


def test_the_same_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    run = partial(save_and_resume, root=tmp_path, make=blocked, width=8)
    assert run_ranks(2, run) == [True, True]


@pytest.mark.full
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizers_of_torchao_resume_on_the_same_ranks(name: str, tmp_path: Path) -> None:
    make = partial(of_torchao, name)
    run = partial(save_and_resume, root=tmp_path, make=make, width=128)
    assert run_ranks(2, run) == [True, True]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_other_numbers_of_ranks_resume_whole_blocks(num_ranks: int, tmp_path: Path) -> None:
    saved = run_ranks(2, partial(save, root=tmp_path))
    found = run_ranks(num_ranks, partial(resume, root=tmp_path))
    assert found == [saved[0]] * num_ranks


def own_table(parameters: Any) -> Any:
    return BlockedMomentum(parameters, table=float(dist.get_rank()))


def refused(rank: int, root: Path) -> bool:
    with pytest.raises(MismatchError, match=r"table.*resume on 2 ranks"):
        resume(rank, root, BlockedMomentum)
    return True


def test_tables_that_differ_between_ranks_are_refused_on_others(tmp_path: Path) -> None:
    run_ranks(2, partial(save, root=tmp_path, make=own_table))
    assert run_ranks(1, partial(refused, root=tmp_path)) == [True]
