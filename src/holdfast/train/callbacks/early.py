"""Callbacks that end a training before its goal: by a condition, or without improvement."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.errors import UsageError
from holdfast.train.asked import check_range
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint

logger = logging.getLogger("holdfast")

Mode = Literal["min", "max"]


class StopWhen(Callback):
    """Ends `fit` after the step at which a condition holds.

        StopWhen(lambda training, metrics: metrics.get("val/loss", 1.0) < 0.01)

    The condition is called after each step, with the metrics of the step, and after each
    validation, with those of the validation. Reading a metric of a step waits for the
    accelerator. A rerun calls it for the checkpoint, with all metrics of its step: a stopped
    run stays stopped, unless the condition has changed by then.
    """

    def __init__(
        self, condition: Callable[[Training, Metrics], bool], reason: str = "its condition holds"
    ) -> None:
        """Stop when `condition` holds; `reason` becomes the `detail` of the outcome.

        Raises:
            UsageError: `condition` cannot be called.
        """
        if not callable(condition):
            raise UsageError(f"StopWhen: {condition!r} cannot be called")
        self._condition = condition
        self._reason = reason

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Check the condition for the step of the checkpoint, if its metrics are known."""
        if checkpoint.metrics:
            self._ask(training, checkpoint.metrics)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Check the condition after the step."""
        self._ask(training, metrics)

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Check the condition after the validation."""
        self._ask(training, metrics)

    def _ask(self, training: Training, metrics: Metrics) -> None:
        if self._condition(training, metrics):
            training.request_stop(self._reason)


class EarlyStopping(Callback):
    """Ends `fit` when a metric of validations has stopped improving.

    The best value and the count are in the checkpoints: a resumed run ends at the same step as an
    undisturbed one, and a rerun of an ended run trains nothing, unless `patience` was raised.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        *,
        mode: Mode = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Watch `metric`.

        Args:
            metric: its full name, as in the log.
            mode: whether low or high values are good.
            patience: ends at so many validations in a row without a better value; NaN is none.
            min_delta: by how much a value must be better than the best one.
            name: see `Callback`; needed if there are several.

        Raises:
            UsageError: an argument is wrong.
        """
        if mode not in get_args(Mode):
            raise UsageError(f"EarlyStopping: mode={mode!r} must be one of {get_args(Mode)}")
        check_range("EarlyStopping: patience", patience, 1, 2**31)
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise UsageError(f"EarlyStopping: min_delta={min_delta!r} must be 0 or above")
        if name is not None:
            self.name = name
        self.metric = metric
        self.patience = patience
        self.best: float | None = None
        """The best value so far."""
        self.num_waited = 0
        """Number of validations in a row without a better value."""
        self._sign = 1 if mode == "min" else -1
        self._min_delta = min_delta
        self._seen: set[str] = set()

    def fit_start(self, training: Training) -> None:
        """End at once if patience was already exhausted."""
        self._seen.clear()
        self._stop_if_over(training)

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Compare the metric with the best value, if the validation has it."""
        self._seen |= set(metrics)
        if training.manager is None or self.metric not in metrics:
            return  # a validation outside of `fit` is not part of its course
        value = metrics[self.metric]
        if self._is_better(value):
            self.best, self.num_waited = value, 0
        else:
            self.num_waited += 1
        self._stop_if_over(training)

    def fit_end(self, training: Training) -> None:
        """Log a warning if no validation had the metric."""
        if self._seen and self.metric not in self._seen:
            logger.warning(
                "EarlyStopping: no validation gave %r; there were %s",
                self.metric,
                ", ".join(sorted(self._seen)),
            )

    def state_dict(self) -> dict[str, float | None]:
        """Return the best value, and the number of validations without a better one."""
        return {"best": self.best, "num_waited": self.num_waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and the count of an earlier process.

        Raises:
            UsageError: the members are not those of this state.
        """
        if set(state) != {"best", "num_waited"}:
            raise UsageError(f"not the state of EarlyStopping: {sorted(state)}")
        self.best, self.num_waited = state["best"], state["num_waited"]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or self._sign * (self.best - value) > self._min_delta

    def _stop_if_over(self, training: Training) -> None:
        if self.num_waited >= self.patience:
            training.request_stop(
                f"{self.metric} has been no better than {self.best} in {self.num_waited} "
                "validations"
            )
