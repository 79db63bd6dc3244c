"""Ranks that hold different values under one name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User
from torch import nn

import holdfast
from holdfast.errors import HoldfastError
from holdfast.testing.ranks import ThreadCoordinator

THEME = Theme("Values that differ between ranks")
State = dict[str, Any]


def differing(did: str, names: str, change: Callable[[State, int], Any]) -> None:
    """Register a case in which two ranks, threads here, save the same state but for a change."""

    @THEME.case(did, names=names)
    def _(user: User) -> None:
        ranks = ThreadCoordinator.for_ranks(2)
        states = [trained(), trained()]
        for rank, state in enumerate(states):
            change(state, rank)
        errors: dict[int, Exception] = {}

        def save(rank: int) -> None:
            try:
                with holdfast.CheckpointManager(
                    user.new, states[rank], ranks=ranks[rank], save_timeout_s=60
                ) as manager:
                    manager.save(1, wait=True)
            except HoldfastError as error:
                errors[rank] = error

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        if errors:
            raise errors[0]


def trained() -> State:
    """A model after one step: the same on each rank."""
    noise = torch.Generator().manual_seed(0)
    layers = nn.ModuleDict({"0": nn.Linear(4, 4, bias=False)})
    model = nn.ModuleDict({"layers": layers, "norm": nn.BatchNorm1d(4)})
    with torch.no_grad():
        layers["0"].weight.copy_(torch.randn(4, 4, generator=noise))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"step": 1}}


def weight_of(state: State) -> torch.Tensor:
    weight: torch.Tensor = state["model"]["layers"]["0"].weight.data
    return weight


differing(
    "each pipeline stage calls its first layer `layers.0`",
    "model.layers.0.weight: rank 0 and rank 1",
    lambda state, rank: weight_of(state).add_(2 * rank),
)
differing(
    "each rank has other experts under the name `expert`",
    "model.expert.weight",
    lambda state, rank: (
        state["model"].update({"expert": nn.utils.skip_init(nn.Linear, 2, 2, bias=False)})
        or nn.init.constant_(state["model"]["expert"].weight, 1.0 + rank)
    ),
)
differing(
    "a weight is split between ranks by hand, under one name",
    "model.layers.0.weight",
    lambda state, rank: state["model"]["layers"]["0"].weight.data.copy_(
        weight_of(state)[[2, 3, 0, 1]] if rank else weight_of(state)
    ),
)
differing(
    "the model is not wrapped in DDP, so ranks drift apart",
    "Replicas must be kept equal",
    lambda state, rank: weight_of(state).mul_(1 - 0.25 * rank),
)
differing(
    "an optimizer steps each parameter on one rank, which alone has its momentum",
    "optimizer.layers.0.weight.momentum_buffer",
    lambda state, rank: (
        state["optimizer"]
        .state[state["model"]["layers"]["0"].weight]["momentum_buffer"]
        .mul_(1 - rank)
    ),
)
differing(
    "an optimizer has no momentum at all on the other ranks",
    "absent",
    lambda state, rank: rank and state["optimizer"].state.pop(state["model"]["layers"]["0"].weight),
)
differing(
    "statistics of batch norm without DDP",
    "model.norm.running_mean",
    lambda state, rank: state["model"]["norm"].running_mean.add_(rank),
)
differing(
    "each rank counts its own samples in a dict",
    "samples is 64 and 60",
    lambda state, rank: state["progress"].update(samples=64 - 4 * rank),
)
differing(
    "each rank has its own tensor in a dict",
    "progress.losses: rank 0 and rank 1",
    lambda state, rank: state["progress"].update(losses=torch.tensor([0.5, 0.25 + rank])),
)
differing(
    "one rank has another learning rate",
    "optimizer.param_groups.0.lr: on rank 0 it is 0.1, on rank 1 0.2",
    lambda state, rank: state["optimizer"].param_groups[0].update(lr=0.1 * (1 + rank)),
)
differing(
    "a weight has another shape on one rank",
    "on rank 0 it is F32 [4, 4], on rank 1 F32 [2, 4]",
    lambda state, rank: (
        rank and setattr(state["model"]["layers"]["0"], "weight", nn.Parameter(torch.ones(2, 4)))
    ),
)
