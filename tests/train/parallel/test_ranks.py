"""A Trainer on several ranks: the same run after a resume, on any number of ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from distributed.run import run_ranks
from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.train import (
    FSDP2,
    Counts,
    Trainer,
    Validation,
)

GLOBAL_BATCH = 12


class Net(nn.Module):
    """A model with blocks, buffers that differ by rank until they are shared, and dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output: Tensor = self.last(hidden)
        return output


def samples(count: int = 96) -> TensorDataset:
    own = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 6, generator=own), torch.randint(3, (count,), generator=own)
    )


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(batch[0])
    return cross_entropy(output, batch[1]), {"mean": output.detach().mean()}


def make(root: Path | None, num_ranks: int, **options: Any) -> Trainer:
    model = options.pop("model", Net)
    record = {"every": options.pop("every", "2step")}
    options = {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "data": Loader(samples(), batch_size=GLOBAL_BATCH // num_ranks),
        "loss": loss,
        "validate": Validation(
            data=Loader(samples(20), batch_size=4, shuffle=False), every="3step"
        ),
        "clip": 1.0,
        "ema": 0.9,
        "counts": Counts(samples=lambda batch: len(batch[0])),
        "log_every": 2,
        "progress": False,
        **options,
    }
    return Trainer(model, checkpoints=root and Checkpoints(root, **record), **options)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a run must have in common with the undisturbed one, whole on each rank."""
    weights = {name: _whole(value) for name, value in trainer.model.state_dict().items()}
    average = {name: _whole(value) for name, value in trainer.ema.model.state_dict().items()}
    slots = [
        _whole(value) for slots in trainer.optimizer.state.values() for value in slots.values()
    ]
    return {"weights": weights, "average": average, "slots": slots, "draw": torch.rand(3).numpy()}


def _whole(tensor: Any) -> Any:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().numpy().copy()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def fit(root: Path, until: str, num_ranks: int, options: dict[str, Any], rank: int) -> Any:
    trainer = make(root, num_ranks, **options)
    trainer.fit(until)
    return state_of(trainer)


STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "ddp of windows": {"accumulate": 2},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 of windows": {"strategy": FSDP2(reshard_after_forward=False), "accumulate": 2},
    "recomputed": {"strategy": "fsdp2", "activation_checkpointing": True},
}


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_a_resumed_run_is_the_same_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """Killed in no step here: it ends at one goal, and other processes go on to the next."""
    once = run_ranks(2, partial(fit, tmp_path / "once", "7step", 2, options))
    run_ranks(2, partial(fit, tmp_path / "twice", "4step", 2, options))
    twice = run_ranks(2, partial(fit, tmp_path / "twice", "7step", 2, options))
    assert_same(twice, once)
    assert_same(once[0]["weights"], once[1]["weights"])
    assert once[0]["draw"].tolist() != once[1]["draw"].tolist()
    lines = [
        [(line["step"], line["samples"], line["metrics"]) for line in log_of(tmp_path / name)]
        for name in ("once", "twice")
    ]
    assert [line for line in lines[1] if line[0] > 4] == [line for line in lines[0] if line[0] > 4]
    assert lines[0][-1][1] == 7 * GLOBAL_BATCH * options.get("accumulate", 1)


def log_of(root: Path) -> list[Any]:
    lines = map(json.loads, (root / "log" / "train.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line["metrics"] or "val/loss" in line["metrics"]]
