"""Fixing the order of DDP's buckets before the first step, for exact resumes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.run import run_ranks
from holdfast.train.strategies import settle_buckets
from marks import full

NUM_RANKS = 3


class Mixed(nn.Module):
    """Parameters of all kinds that DDP takes, used in another order than they are registered in."""

    _ddp_params_and_buffers_to_ignore = ("own", "own_count")

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.sparse = nn.Embedding(20, 9, sparse=True)
        self.phases = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(9, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0))
        self.huge = nn.Parameter(torch.full((2,), 3e38))
        self.own = nn.Parameter(torch.ones(9))
        self.norm = nn.BatchNorm1d(9)
        self.first = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.register_buffer("own_count", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.sparse(rows)
        for layer in self.first:
            hidden = layer(hidden)
        hidden = self.norm(hidden) * self.phases.abs() * self.low.float() * self.own
        hidden = self.last(self.frozen(self.tied(hidden)))
        return hidden.square().sum() + self.empty.sum() + (self.huge * 1e-38).sum()


def gradients(wrapped: nn.Module, step: int, rank: int) -> list[Tensor]:
    rows = torch.randint(20, (7,), generator=torch.Generator().manual_seed(10 * step + rank))
    wrapped(rows).backward()
    found = [item.grad for item in wrapped.parameters() if item.grad is not None]
    wrapped.zero_grad(set_to_none=True)
    return [item.to_dense() if item.is_sparse else item for item in found]


def started_late(is_settled: bool, options: dict[str, Any], rank: int) -> tuple[bool, int]:
    """Whether a third backward pass gives what a first one of the same model gives."""
    torch.manual_seed(0)
    model = Mixed()
    long, short = (DistributedDataParallel(one, **options) for one in (model, copy.deepcopy(model)))
    for wrapped in (long, short) if is_settled else ():
        settle_buckets(wrapped)
    expected = [gradients(long, step, rank) for step in range(3)][-1]
    found = gradients(short, 2, rank)
    assert len(found) == len(expected)
    return all(map(torch.equal, found, expected)), len(found)


@pytest.mark.parametrize("options", [*full({}), {"bucket_cap_mb": 0.0005}], ids=["one", "several"])
def test_a_first_backward_pass_sums_as_a_third(options: dict[str, Any]) -> None:
    found = run_ranks(NUM_RANKS, partial(started_late, True, options))
    assert found == [(True, 19)] * NUM_RANKS


def test_a_first_backward_pass_sums_otherwise_if_buckets_are_not_settled() -> None:
    assert not any(equal for equal, _ in run_ranks(NUM_RANKS, partial(started_late, False, {})))


def settled(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Mixed()
    model.own_count.fill_(rank)
    wrapped = DistributedDataParallel(model)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        settle_buckets(wrapped)
    after = model.state_dict()
    model.norm.running_mean.fill_(rank)  # until the next call
    wrapped.eval()(torch.arange(7))
    return {
        "model": wrapped.module is model,
        "state": all(torch.equal(before[name], after[name]) for name in before),
        "gradients": [name for name, item in model.named_parameters() if item.grad is not None],
        "shared buffer": float(model.norm.running_mean[0]),
        "own buffer": float(model.own_count),
    }


def test_settling_buckets_changes_nothing_else() -> None:
    """Buffers are still copied from the leader, except those that DDP is told to ignore."""
    for rank, found in enumerate(run_ranks(NUM_RANKS, settled)):
        assert found == {
            "model": True,
            "state": True,
            "gradients": [],
            "shared buffer": 0.0,
            "own buffer": float(rank),
        }


def failed(rank: int) -> bool:
    model = nn.Linear(2, 2)
    wrapped = DistributedDataParallel(model)

    def refuse(*_: object) -> None:
        raise ValueError("a hook of the user")

    node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]
    node.register_hook(refuse)
    with pytest.raises(ValueError, match="a hook of the user"):
        settle_buckets(wrapped)
    return wrapped.module is model


def test_a_model_is_put_back_where_the_pass_fails() -> None:
    assert run_ranks(2, failed) == [True] * 2


def hooked(rank: int) -> tuple[list[str], list[str], list[str]]:
    model = nn.Linear(2, 2)
    told: list[str] = []
    handles = [
        model.weight.register_hook(lambda gradient: told.append("gradient")),
        model.bias.register_post_accumulate_grad_hook(lambda weight: told.append("after")),
    ]
    wrapped = DistributedDataParallel(model)
    settle_buckets(wrapped)
    settled = [*told]
    wrapped(torch.ones(2)).sum().backward()
    trained = sorted(told)
    for handle in handles:
        handle.remove()
    wrapped(torch.ones(2)).sum().backward()
    return settled, trained, sorted(told)


def test_hooks_of_parameters_are_called_by_the_training_alone() -> None:
    """One may be the step of an optimizer."""
    trained = ["after", "gradient"]
    assert run_ranks(2, hooked) == [([], trained, trained)] * 2
