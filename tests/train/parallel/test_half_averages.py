"""Averages of bfloat16 models on several ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distributed.run import run_ranks
from holdfast.data import Loader
from holdfast.train import Trainer


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def fit(strategy: str, root: Path, rank: int) -> tuple[set[torch.dtype], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(torch.bfloat16)
    rows = torch.randn(16, 4).to(torch.bfloat16)
    trainer = Trainer(
        model,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader(rows, batch_size=4),
        loss=loss,
        checkpoints=root,
        validate=[rows[:4]],
        ema=0.999,
        strategy=strategy,
        progress=False,
        log=False,
    )
    assert trainer.ema is not None
    before = [weight.detach().clone() for weight in trainer.ema.model.parameters()]
    trainer.fit(3)
    trainer.fit(5)
    after = [*trainer.ema.model.parameters()]
    changed = [
        not torch.equal(*pair) for pair in zip(map(whole, before), map(whole, after), strict=True)
    ]
    return {weight.dtype for weight in after}, any(changed)


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_they_are_float32_and_move(strategy: str, tmp_path: Path) -> None:
    found = run_ranks(2, partial(fit, strategy, tmp_path))
    assert found == [({torch.float32}, True)] * 2
