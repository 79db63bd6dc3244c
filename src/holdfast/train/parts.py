"""Parts of a Trainer that its calls of `fit` and its evaluations share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from holdfast.checkpoints import Checkpoints
from holdfast.control.stop import Stop
from holdfast.policy.best import BestSaves
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Trigger
from holdfast.staging.overlap import Mode
from holdfast.state.capture.edits import StateView
from holdfast.train.argument_checks import Counts
from holdfast.train.averages import Average, EqualAverage, cast_averages, modules_of_averages
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.curves import EpochLength
from holdfast.train.group import Group
from holdfast.train.schedules import Schedules
from holdfast.train.status import FitStatus
from holdfast.train.step.batches import Limits, length_of
from holdfast.train.step.step import Update
from holdfast.train.step.undo import StepUndo
from holdfast.train.strategies import Strategy
from holdfast.train.training import Counters, Training

Policy = Literal["warn", "skip", "raise"]
"""Reaction to a loss or weights that are not finite at a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """Parts of a Trainer. A `fit` on other data replaces `data` and `config`."""

    model: nn.Module
    ema: Average | None
    swa: EqualAverage | None
    optimizer: Any
    """The optimizer, or several by name; None if nothing is trained."""
    data: Any
    """Data that is trained on, within the limits."""
    state: dict[str, Any]
    """Components that checkpoints save, by name."""
    per_rank: Collection[str]
    """Names of components of which each rank has its own."""
    config: Mapping[str, str]
    """Settings that checkpoints record."""
    checkpoints: Checkpoints
    every: Trigger | SavePolicy | None
    overlap: Mode
    best: BestSaves
    """Saves for rules `Best` about metrics of validations."""
    unhealthy: Policy
    counters: Counters
    status: FitStatus
    callbacks: Callbacks
    update: Update
    schedules: Schedules
    undo: StepUndo
    stop: Stop | None
    strategy: Strategy | None
    limits: Limits
    counts: Counts
    skip_steps: Sequence[range]
    """Steps whose batches are not trained on."""
    accumulate: int
    """Number of batches of a step."""
    log_every: int
    """Steps between two logs."""
    seed: int

    @property
    def group(self) -> Group:
        """Ranks that train together."""
        return self.update.parallel.group

    @property
    def ranks(self) -> Literal["group"] | None:
        """Argument `ranks` of managers: None if this process trains alone, beside others."""
        return None if self.group.is_alone else "group"

    @property
    def epoch(self) -> EpochLength:
        """Length of an epoch, as far as the data tells it and all epochs have the same."""
        num_batches = None if getattr(self.data, "epochs_vary", False) else length_of(self.data)
        return EpochLength(num_batches=num_batches or None, accumulate=self.accumulate)

    @property
    def weights(self) -> dict[str, nn.Module]:
        """The model and its exponential average, if one is kept, by component name."""
        return {"model": self.model, **({} if self.ema is None else {"ema": self.ema.model})}

    def share_buffers(self) -> None:
        """Give the buffers of all ranks the values of the leader's, which a checkpoint has."""
        for module in (self.model, *modules_of_averages(self.ema, self.swa)):
            self.update.parallel.share_buffers(module)

    def make_edit(
        self, hook: Callable[[Callback, Training, StateView], None]
    ) -> Callable[[StateView], None] | None:
        """Return a function that calls `hook` with a `StateView`; None if none is needed."""
        averages = {
            name: item.model
            for name, item in (("ema", self.ema), ("swa", self.swa))
            if item is not None and item.cast.differs and hook is Callback.edit_load
        }
        if not averages and not self.callbacks.listens(hook):
            return None

        def edit(view: StateView) -> None:
            cast_averages(view, averages)
            with self.status.refusing_saves():
                self.callbacks.call_hook(hook, view)

        return edit
