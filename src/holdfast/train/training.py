"""Interface of a training, as callbacks use it, with its counters and the average of weights.

Counters and average are components of the run: checkpoints hold them and a resume restores them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, argument_name
from holdfast.train.averages import Average

if TYPE_CHECKING:
    from holdfast.checkpoints import Checkpoints
    from holdfast.manager import CheckpointManager

logger = logging.getLogger("holdfast")

Metrics = Mapping[str, float]
"""Numbers by name, such as `{"loss": 0.3}`."""
OF_VALIDATION = "val/"
"""Beginning of the names of all metrics of validations."""


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
    def callbacks(self) -> Sequence[Any]:
        """All callbacks, in the order of their calls."""

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
        """Components that checkpoints save, by name."""

    @property
    def manager(self) -> CheckpointManager | None:
        """Checkpoint manager while `fit` runs, else None. It saves between steps only."""

    @property
    def checkpoints(self) -> Checkpoints:
        """The root of the run, and how its checkpoints are made."""

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""

    @property
    def is_log_step(self) -> bool:
        """Whether the present step is logged: each `log_every`-th, and the last one."""

    @property
    def is_first(self) -> bool:
        """Whether the present step is the first one of this call of `fit`."""

    @property
    def is_last(self) -> bool:
        """Whether the present step is the last one of this call of `fit`.

        Within a step this is known of a goal in steps only; from `step_end` on, of any.
        """

    @property
    def end_reason(self) -> str | None:
        """The `reason` of the outcome of the current or last `fit`; None while it continues."""

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the names of metrics that are logged begin with `name/`."""

    def request_stop(self, reason: str) -> None:
        """End `fit` after the current step, which is saved. Requests cannot be cancelled.

        No-op in a validation outside of `fit`.
        """

    def log(self, metrics: Mapping[str, Any], *, to: Collection[str] | None = None) -> None:
        """Log numbers and entries of the step to all loggers, or those in `to`.

        Entries are texts, `Table`, `Image` and `Histogram`; a tensor of several numbers becomes a
        histogram, and a list of dicts a table.
        """


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of the run over all resumes. Only the Trainer changes them."""

    step: int = 0
    """Completed steps."""
    epoch: int = 0
    """Epochs that have ended."""
    batch: int = 0
    """Batches of the current epoch that were trained on."""
    samples: int | None = None
    """Samples trained on; None: not counted."""
    tokens: int | None = None
    """Tokens trained on; None: not counted."""
    unvalidated: list[str] = field(default_factory=list)
    """Names of validations that are due at this step and are not done; stored only if any are."""
    only_at_goal: list[str] = field(default_factory=list)
    """Those of `unvalidated` that are due only because the goal was reached; stored likewise."""
    step_numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """For the log of the `unvalidated`: the step's metrics under "", and what callbacks noted of it
    by their names; stored likewise."""
    step_metrics: Metrics = field(default_factory=dict, compare=False, repr=False)
    """Metrics of the last completed step. Not stored."""
    cycle_length: Time | None = None
    """Length of a cycle, in a counted unit. Not stored: it is an argument of the Trainer."""
    were_loaded: bool = field(default=False, init=False, compare=False, repr=False)
    """Whether a checkpoint was loaded into these counters."""

    @property
    def cycle(self) -> int | None:
        """Number of cycles that have ended; None when the training has no cycles."""
        if self.cycle_length is None:
            return None
        count: int | None = getattr(self, argument_name(self.cycle_length.unit))
        return (count or 0) // int(self.cycle_length.value)

    @property
    def timestamp(self) -> Timestamp:
        """The counters as a checkpoint's manifest records them."""
        return Timestamp(
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            tokens=self.tokens,
            cycle=self.cycle,
        )

    @property
    def totals(self) -> dict[str, int | None]:
        """Totals that a save records in addition to its step."""
        return {
            "epoch": self.epoch,
            "cycle": self.cycle,
            "samples": self.samples,
            "tokens": self.tokens,
        }

    def add_step(self, num_batches: int, samples: int | None, tokens: int | None) -> None:
        """Count a completed step. Counts are added unless they or their total are None."""
        self.step += 1
        self.batch += num_batches
        if self.samples is not None and samples is not None:
            self.samples += samples
        if self.tokens is not None and tokens is not None:
            self.tokens += tokens

    def take_over(self, timestamp: Timestamp, data: Any) -> None:
        """Continue the totals of another trainer, by its checkpoint and the place in the data."""
        self.step, self.samples, self.tokens = timestamp.step, timestamp.samples, timestamp.tokens
        self.epoch = getattr(data, "epoch", timestamp.epoch or 0)
        self.batch = getattr(data, "batch", 0)

    def end_epoch(self) -> None:
        """Count a completed epoch."""
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counters to save, by name."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _STORED}
        more: dict[str, Any] = {name: [*getattr(self, name)] for name in _LISTS}
        if self.unvalidated:
            more[_NUMBERS] = {name: dict(of) for name, of in self.step_numbers.items()}
        return state | {name: value for name, value in more.items() if value}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a stored counter is missing, unknown or not a count."""
        if set(state) - {*_LISTS, _NUMBERS} != set(_STORED):
            raise UsageError(f"not the counters of a Trainer: {sorted(state)}")
        if not _are_numbers(numbers := state.get(_NUMBERS, {})):
            raise UsageError(
                f"stored {_NUMBERS}={numbers!r}: must be {{callback: {{name: number}}}}"
            )
        for name in _LISTS:
            if not _are_texts(names := state.get(name, [])):
                raise UsageError(f"stored {name}={names!r}: must be a list of names")
        for name, value in state.items():
            if name in (*_LISTS, _NUMBERS) or (value is None and name in ("samples", "tokens")):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"stored {name}={value!r}: must be a whole number, 0 or above")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore stored counters."""
        self.check_state_dict(state)
        lists = {name: [*state.get(name, [])] for name in _LISTS}
        for name, value in {_NUMBERS: {}, **state, **lists}.items():
            setattr(self, name, value)
        self.were_loaded = True


_LISTS = ("unvalidated", "only_at_goal")
_NUMBERS = "step_numbers"
_STORED = ("step", "epoch", "batch", "samples", "tokens")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(of, Mapping)
        and all(isinstance(key, str) and isinstance(one, float) for key, one in of.items())
        for name, of in value.items()
    )


@contextmanager
def kept_modes(*models: nn.Module) -> Iterator[None]:
    """Restore the mode of each module, training or evaluation, after the block."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Set eval mode for the block; restores the mode of each module after it."""
    with kept_modes(*models):
        for model in models:
            model.eval()
        yield
