"""A small training that draws from every generator, for the tests of the Trainer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.train import Trainer


class Noisy:
    """Ten samples with noise from every global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.random()) + torch.rand(4)
        return noise + index / 10


class NoLength:
    """Data whose epochs end unseen."""

    def __init__(self) -> None:
        self.loader = Loader(Noisy(), batch_size=2)
        self.state_dict = self.loader.state_dict
        self.load_state_dict = self.loader.load_state_dict

    def __iter__(self) -> Any:
        return iter(self.loader)


def mean_square(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
    loss = model(batch).square().mean()
    return loss, {"draw": random.random()}


def network() -> nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def make(root: Any, *, num_workers: int = 0, **options: Any) -> Trainer:
    """A Trainer in which everything that can be resumed changes each step."""
    model = options.pop("model", None) or network()
    options = {
        "optimizer": torch.optim.AdamW(model.parameters())
        if isinstance(model, nn.Module)
        else None,
        "data": Loader(Noisy(), batch_size=2, num_workers=num_workers),
        "loss": mean_square,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "every": "2step",
        "progress": False,
        "log_every": 1,
        "log": isinstance(root, Path),
        **options,
    }
    return Trainer(model, **with_record(root, options))


def with_record(root: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Trainer, of which those of its checkpoints go into a record."""
    names = {field.name for field in fields(Checkpoints)} & options.keys()
    record = Checkpoints(root, **{name: options[name] for name in names})
    others = {name: value for name, value in options.items() if name not in names}
    return {**others, "checkpoints": record}
