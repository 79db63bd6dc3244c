"""Interface of a training, as callbacks use it."""

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
    """Interface of a training for its callbacks, implemented by the `Trainer`."""

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
        """The step under way; between steps, the last completed one.

        Logged metrics belong to this step: a resume from the step before does it once more.
        """

    @property
    def goal(self) -> Time:
        """Goal of the current or last `fit`; a `UsageError` before the first one."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The components of a checkpoint."""

    @property
    def manager(self) -> CheckpointManager | None:
        """Manager while `fit` runs. It saves the current step, between steps only."""

    def request_stop(self, reason: str) -> None:
        """End `fit` after the current step, which is saved. Requests cannot be cancelled.

        No-op in a validation outside of `fit`.

        Raises:
            UsageError: neither `fit` nor a validation is running.
        """

    def log(self, metrics: Metrics, *, to: Collection[str] | None = None) -> None:
        """Log metrics of the current step to all loggers, or to those named in `to`."""
