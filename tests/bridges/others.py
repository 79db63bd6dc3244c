"""Checkpoints of loops that differ from the training of `trainers.py` in one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from bridges.trainers import Net, Parts, Rows, data
from holdfast.data import Loader

STEPS = 5


def model_named_otherwise(own: Parts) -> None:
    own.model = own.model.net  # type: ignore[assignment]


def other_groups(own: Parts) -> None:
    weights = [one for one in own.model.parameters() if one.dim() > 1]
    biases = [one for one in own.model.parameters() if one.dim() == 1]
    own.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=0.01)
    own.scheduler = torch.optim.lr_scheduler.LambdaLR(own.optimizer, lambda step: 1.0)


def other_optimizer(own: Parts) -> None:
    own.optimizer = torch.optim.SGD(own.model.parameters(), lr=0.01, momentum=0.9)
    own.scheduler = torch.optim.lr_scheduler.LambdaLR(own.optimizer, lambda step: 1.0)


def other_scheduler(own: Parts) -> None:
    own.scheduler = torch.optim.lr_scheduler.StepLR(own.optimizer, 5)  # type: ignore[assignment]


def other_batch_size(own: Parts) -> None:
    own.data = Loader(Rows(), batch_size=5, seed=3)


def without_a_scheduler(own: Parts) -> None:
    own.scheduler = None  # type: ignore[assignment]


def without_a_position(own: Parts) -> None:
    own.data = None  # type: ignore[assignment]


def with_an_average(own: Parts) -> None:
    own.more["ema"] = Net()


def with_a_scaler(own: Parts) -> None:
    own.more["scaler"] = torch.amp.GradScaler("cpu")


CASES: dict[str, Callable[[Parts], None]] = {
    one.__name__: one
    for one in (
        model_named_otherwise,
        other_groups,
        other_optimizer,
        other_scheduler,
        other_batch_size,
        without_a_scheduler,
        without_a_position,
        with_an_average,
        with_a_scaler,
    )
}


def save(root: Path, case: str) -> None:
    """Train some steps of a case, and save them."""
    own = Parts()
    own.more = {}
    CASES[case](own)
    state = {name: one for name, one in own.state.items() if one is not None}
    batches = own.data or DataLoader(Rows(), batch_size=4)
    net = own.model if isinstance(own.model, nn.Sequential) else own.model.net
    with holdfast.CheckpointManager(root, {**state, **own.more}, sinks=()) as manager:
        step = 0
        while step < STEPS:
            for batch in batches:
                (net(batch["x"]).squeeze(-1) - batch["labels"]).square().mean().backward()
                own.optimizer.step()
                if own.scheduler is not None:
                    own.scheduler.step()
                own.optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    break
        manager.save(step, wait=True)
