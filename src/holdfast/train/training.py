"""The interface of a training for its callbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from holdfast.policy.clock import Time
from holdfast.train.counters import Counters

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager
    from holdfast.train.ema import Average

Metrics = Mapping[str, float]


class Training(Protocol):
    """A training as its callbacks see it, such as the `Trainer`."""

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""

    @property
    def ema(self) -> Average | None:
        """The average of the weights, if one is kept."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model."""

    @property
    def data(self) -> Any:
        """The data that the batches come from."""

    @property
    def counters(self) -> Counters:
        """The counters of the training's progress."""

    @property
    def present_step(self) -> int:
        """The step that is under way, or between steps the last one that was done.

        What is logged belongs to it: a resume from the step before does it once more.
        """

    @property
    def goal(self) -> Time:
        """Where the present or last `fit` goes; a `UsageError` before the first one."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The components of a checkpoint."""

    @property
    def manager(self) -> CheckpointManager | None:
        """The manager while `fit` runs. It saves the present step, between steps only."""

    def request_stop(self, reason: str) -> None:
        """End `fit` after the present step, which is saved. Requests cannot be taken back.

        No-op in a validation outside of `fit`.

        Raises:
            UsageError: neither `fit` nor a validation is running.
        """

    def log(self, metrics: Metrics, *, to: Collection[str] | None = None) -> None:
        """Give metrics of the present step to the loggers, or to those named in `to`."""
