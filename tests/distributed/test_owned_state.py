"""Optimizers whose state lies on the rank that owns a parameter resume exactly, or are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import marks
from distributed.run import run_ranks
from holdfast import CheckpointManager, PerRank
from holdfast.state.probing import digest_sample


class OwnedMomentum(torch.optim.Optimizer):
    """SGD with momentum; each rank steps every second parameter and broadcasts it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for at, parameter in enumerate(self.param_groups[0]["params"]):
            owner = at % dist.get_world_size()
            if owner == dist.get_rank():
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])
            dist.broadcast(parameter, owner)


def make_optimizer(kind: str, net: nn.Module) -> Any:
    matrices = [one for one in net.parameters() if one.shape == (8, 8)]
    others = [one for one in net.parameters() if one.shape != (8, 8)]
    if kind == "owned":
        return OwnedMomentum(net.parameters())
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return pytorch_optimizer.DistributedMuon(groups)


def train(folder: Path, kind: str, is_marked: bool, rank: int) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer, counters = make_optimizer(kind, net), {"n": 0}
    saved = PerRank(optimizer) if is_marked else optimizer
    state = {"model": net, "optimizer": saved, "data": counters}
    with CheckpointManager(folder, state) as manager:
        manager.resume()
        while counters["n"] < 7:
            source = torch.Generator().manual_seed(counters["n"])
            batch: Tensor = torch.randn(8, 6, generator=source)
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
            counters["n"] += 1
            if counters["n"] == 4:
                manager.save(4, wait=True)
    return digest_sample([parameter.detach() for parameter in net.parameters()])


KINDS = ["owned", *marks.full("distributed muon")]


@pytest.mark.parametrize("kind", KINDS)
def test_state_on_its_owners_resumes_exactly(kind: str, tmp_path: Path) -> None:
    whole = run_ranks(2, partial(train, tmp_path, kind, True))
    assert whole[0] == whole[1]
    assert run_ranks(2, partial(train, tmp_path, kind, True)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mark_it_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="UnsupportedState") as caught:
        run_ranks(2, partial(train, tmp_path, kind, False))
    assert "PerRank" in str(caught.value)
