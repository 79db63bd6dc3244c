"""Learning-rate finder: trains some steps with growing rates, and restores the whole state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.train.argument_checks import check_range
from holdfast.train.curves import set_rate
from holdfast.train.parts import TrainerParts
from holdfast.train.step.device_metrics import RankMeans
from holdfast.train.step.epoch_metrics import Scores
from holdfast.train.step.step import Update
from holdfast.train.step.undo import Boundary, modules_of, small
from holdfast.train.strategies import local
from holdfast.train.training import kept_modes

_DIVERGED = 4.0
"""A loss of so many times the best one ends the search, as in fast.ai's finder."""
_BETA = 0.98
"""Smoothing of losses, as there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateCurve:
    """Losses by learning rate, as `find_learning_rate` saw them."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Loss of the step with each rate, smoothed."""
    suggestion: float | None
    """The rate at which the loss falls most steeply; None: it never fell."""


def find_learning_rate(
    parts: TrainerParts, *, lowest: float, highest: float, steps: int
) -> LearningRateCurve:
    """Train `steps` steps with rates that grow from `lowest` to `highest`; undone afterwards."""
    check_range("steps", steps, 3, 2**31)
    if not 0 < lowest < highest < math.inf:
        raise UsageError(
            f"lowest={lowest!r}, highest={highest!r}: must be positive, with lowest < highest"
        )
    if parts.data is None:
        raise UsageError("find_learning_rate: the Trainer was made without data")
    if isinstance(parts.optimizer, Mapping):
        raise UsageError("find_learning_rate: it is for one optimizer")
    rates, losses, smooth, best = [], [], 0.0, math.inf
    with _trial_update(parts) as update:
        groups = update.optimizer.param_groups
        first = float(groups[0]["lr"])
        shares = [float(group["lr"]) / first if first else 1.0 for group in groups]
        for at, window in zip(range(steps), _windows(parts), strict=False):
            rate = lowest * (highest / lowest) ** (at / (steps - 1))
            for group, share in zip(groups, shares, strict=True):
                set_rate(group, rate * share)
            smooth = _BETA * smooth + (1 - _BETA) * float(update(window)["loss"])
            loss = smooth / (1 - _BETA ** (at + 1))
            if not math.isfinite(loss):
                break
            rates.append(rate)
            losses.append(loss)
            best = min(best, loss)
            if at >= steps // 5 and loss > _DIVERGED * best > 0:
                break
    return LearningRateCurve(
        rates=tuple(rates), losses=tuple(losses), suggestion=_steepest(rates, losses)
    )


@contextmanager
def _trial_update(parts: TrainerParts) -> Iterator[Update]:
    """Train in the block without callbacks and schedulers; restores the whole state after it."""
    kept, group = _StateCopy(parts.state, parts.data), parts.group
    with kept_modes(*modules_of(parts.state)):
        parts.model.train()
        try:
            yield replace(
                parts.update,
                callbacks=parts.callbacks.without_any(),
                schedulers=(),
                scores=Scores({}, group, what="metrics"),
                means=RankMeans(group),
                begin_update=lambda: None,
                nan=None,
            )
        finally:
            kept.restore_training()


def _windows(parts: TrainerParts) -> Iterator[list[Any]]:
    """Iterate over the batches of steps, from one epoch to the next."""
    while True:
        is_empty = True
        with preserved():
            rest = iter(parts.data)
        while window := list(islice(rest, parts.accumulate)):
            is_empty = False
            yield window
        if is_empty:
            raise UsageError("data gave no batch in a whole epoch")


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the loss falls most for a step on a logarithmic axis."""
    slopes = [
        (after - before, rate)
        for before, rate, after in zip(losses, rates[1:], losses[2:], strict=False)
    ]
    falling = [item for item in slopes if item[0] < 0]
    return min(falling)[1] if falling else None


class _StateCopy:
    """Copy of a whole state that can be put back bit for bit: also of weights and optimizers."""

    @torch.no_grad()
    def __init__(self, state: Mapping[str, Any], data: Any) -> None:
        modules = modules_of(state)
        self._rest = Boundary(data=data, components=_changed_by_steps(state), modules=modules)
        self._weights = [
            (item, local(item.detach()).clone())
            for module in modules
            for item in module.parameters()
        ]
        self._optimizers = [
            (
                value,
                {key: _copied(slots) for key, slots in value.state.items()},
                [
                    {name: _copied(option) for name, option in group.items() if name != "params"}
                    for group in value.param_groups
                ],
            )
            for value in state.values()
            if isinstance(value, Optimizer)
        ]

    @torch.no_grad()
    def restore_training(self) -> None:
        """Restore the state."""
        for item, kept in self._weights:
            local(item.detach()).copy_(kept)
            item.grad = None
        for optimizer, slots, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(slots)
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for name, option in options.items():
                    if isinstance(option, Tensor):
                        group[name].copy_(option)
                    else:
                        group[name] = option
        self._rest.restore_snapshot()


def _changed_by_steps(state: Mapping[str, Any]) -> dict[str, Any]:
    # Counters and callbacks are not touched by steps on trial; to load them would be a trace.
    return {
        name: value for name, value in small(state).items() if name in ("scaler", "micro_batch")
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)
