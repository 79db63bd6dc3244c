"""Checkpoints of loops that differ from the training of `trainers.py` in one thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from bridges.trainers import Net, Parts, Rows
from holdfast.data import Loader

STEPS = 5  # within an epoch


def other_names(state: dict[str, Any]) -> None:
    state["model"] = state["model"].net


def other_groups(state: dict[str, Any]) -> None:
    parameters = [*state["model"].parameters()]
    groups = [{"params": [one for one in parameters if one.dim() == dim]} for dim in (1, 2)]
    state["optimizer"] = optimizer = torch.optim.AdamW(groups)
    state["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def other_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"] = optimizer = torch.optim.SGD(state["model"].parameters(), momentum=0.9)
    state["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def other_scheduler(state: dict[str, Any]) -> None:
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 5)


def no_scheduler(state: dict[str, Any]) -> None:
    del state["scheduler"]


def other_batch_size(state: dict[str, Any]) -> None:
    state["data"] = Loader(Rows(), batch_size=5)


def other_loader(state: dict[str, Any]) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    state["data"] = StatefulDataLoader(Rows(), batch_size=4)


def no_position(state: dict[str, Any]) -> None:
    del state["data"]


def average(state: dict[str, Any]) -> None:
    state["ema"] = Net()


def scaler(state: dict[str, Any]) -> None:
    state["scaler"] = torch.amp.GradScaler("cpu")


CASES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "other names of the weights": (other_names, r"model\.net\.0\.weight"),
    "other groups of parameters": (other_groups, "optimizer: .* was grouped differently"),
    "another class of optimizer": (other_optimizer, "optimizer: saved from SGD"),
    "another class of scheduler": (other_scheduler, "scheduler: saved from another kind"),
    "no scheduler": (no_scheduler, "scheduler"),
    "another batch size, within an epoch": (other_batch_size, "batch_size: stored 5, here 4"),
    "a position of another kind of loader": (other_loader, "data"),
    "no position in the data": (no_position, "data"),
    "a component only in the old run": (average, "ema"),
    "a loss scaler": (scaler, "scaler"),
}
"""Words of docs/bridges/index.md, how to change the state, and what the refusal says."""


def save(root: Path, case: str) -> None:
    """Train the steps of a case, and save them."""
    state = Parts().state
    CASES[case][0](state)
    scheduler, batches = state.get("scheduler"), state.get("data")
    net = state["model"] if isinstance(state["model"], nn.Sequential) else state["model"].net
    with holdfast.CheckpointManager(root, state, sinks=()) as manager:
        step = 0
        while step < STEPS:
            for batch in batches or DataLoader(Rows(), batch_size=4):
                (net(batch["x"]).squeeze(-1) - batch["labels"]).square().mean().backward()
                state["optimizer"].step()
                if scheduler is not None:
                    scheduler.step()
                state["optimizer"].zero_grad()
                step += 1
                if step == STEPS:
                    break
        manager.save(step, wait=True)
