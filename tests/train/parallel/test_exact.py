"""A resume on three ranks or more is exact, also in the last digits of sums over the ranks."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distributed.run import run_ranks
from holdfast import CheckpointManager, Checkpoints
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.launched import Ranks
from holdfast.train import DDP, FSDP2, Trainer
from holdfast.train.group import Group
from holdfast.train.strategies import parallel_of

NUM_RANKS = 3


class Crossed(nn.Module):
    """Registers its layers in another order than that in which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(33, 5)
        self.norm = nn.BatchNorm1d(33)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 33), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.first = nn.Linear(6, 33)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output: Tensor = self.last(hidden)
        return output


class Branching(Crossed):
    """Has a layer that only some batches use: not the same ones on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs[0, 0] > 0:
            inputs = inputs + self.branch(inputs)
        return super().forward(inputs)


class Pruned(Crossed):
    """Has a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Alternating(Crossed):
    """Has a layer that every second call uses, from the first on."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(self.unused(inputs) if self.num_calls % 2 else inputs)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _adam_of_first(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.first.parameters(), lr=0.01)


def make(root: Path, options: dict[str, Any]) -> Trainer:
    own = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 6, generator=own), torch.randint(5, (96,), generator=own))
    return Trainer(
        options.pop("model", Crossed),
        optimizer=options.pop("optimizer", _adam),
        data=Loader(data, batch_size=4),
        loss=loss,
        clip=1.0,
        checkpoints=Checkpoints(root, every="1step"),
        progress=False,
        **options,
    )


def trained(root: Path, goal: str, options: dict[str, Any]) -> list[Tensor]:
    """Train to a goal, and return all weights and buffers, whole."""
    trainer = make(root, dict(options))
    trainer.fit(goal)
    state = trainer.model.state_dict().values()
    return [getattr(item, "full_tensor", lambda item=item: item)().clone() for item in state]


EXACT: dict[str, dict[str, Any]] = {
    "default": {},
    "windows": {"accumulate": 2},
    "small buckets": {"strategy": DDP(bucket_cap_mb=0.005)},
    "recomputed": {"activation_checkpointing": True},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "bf16": {"precision": "bf16"},
    "micro-batches": {"micro_batch": 2},
    "branches": {"strategy": DDP(find_unused_parameters=True), "model": Branching},
    "branches of windows": {
        "strategy": DDP(find_unused_parameters=True),
        "model": Branching,
        "accumulate": 2,
    },
    "fsdp2": {"strategy": "fsdp2"},
    "replicas of fsdp2": {"strategy": FSDP2(mesh=(3, 1))},
}
REBUILT = {"strategy": DDP(rebuild_buckets=True)}
QUICK = ("windows",)
"""Those that `make test` runs."""


def is_exact(root: Path, options: dict[str, Any], rank: int) -> bool:
    """Whether a run with a resume, which wraps the model anew, ends as one without."""
    once = trained(root / "once", "6step", options)
    trained(root / "twice", "3step", options)
    twice = trained(root / "twice", "6step", options)
    return all(map(torch.equal, once, twice))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, options in EXACT.items()
    ],
)
def test_a_resume_on_three_ranks_is_exact(options: dict[str, Any], tmp_path: Path) -> None:
    """Invariant 7."""
    assert run_ranks(NUM_RANKS, partial(is_exact, tmp_path, options)) == [True] * NUM_RANKS


@pytest.mark.full
def test_a_resume_is_not_exact_where_torch_rebuilds_its_buckets(tmp_path: Path) -> None:
    """So the tests above would notice it."""
    assert run_ranks(NUM_RANKS, partial(is_exact, tmp_path, REBUILT)) == [False] * NUM_RANKS


@pytest.mark.parametrize(
    ("world_size", "strategy", "rank", "is_told"),
    [
        (3, DDP(), 0, False),
        (2, DDP(rebuild_buckets=True), 0, False),
        (3, DDP(rebuild_buckets=True), 0, True),
        (3, DDP(rebuild_buckets=True), 1, False),
        (3, DDP(rebuild_buckets=True, find_unused_parameters=True), 0, False),
    ],
    ids=["default", "two ranks", "rebuilt", "a follower", "torch does not rebuild them"],
)
def test_a_resume_that_is_not_exact_says_so(
    world_size: int, strategy: DDP, rank: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parallel = parallel_of(strategy, Group(ranks, torch.device("cpu")), None)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        parallel.warn_of_inexact_resume()
    assert ("rebuild_buckets=False" in caplog.text) is is_told


def refused(root: Path, options: dict[str, Any], rank: int) -> tuple[str, list[int]]:
    trainer = make(root, dict(options))
    with pytest.raises(UsageError) as raised:
        trainer.fit("3step")
    saved = CheckpointManager(root, {"model": trainer.model}, ranks=None).list()
    return str(raised.value), [checkpoint.step for checkpoint in saved]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"model": Pruned}, []),
        ({"model": Alternating, "accumulate": 2}, []),
        ({"model": Alternating, "micro_batch": 2}, []),
        ({"model": Alternating, "optimizer": _adam_of_first}, [1]),
    ],
    ids=["any", "of the last batch", "of the last micro-batch", "but that of an earlier step"],
)
def test_parameters_without_a_gradient_are_named_before_the_update(
    options: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    for text, saved in run_ranks(2, partial(refused, tmp_path, options)):
        assert "unused.weight\n" in text
        assert "unused.bias" in text
        assert "find_unused_parameters=True" in text
        assert saved == steps
