"""Metrics for Weights & Biases (the extra `wandb`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.train.extras import import_extra
from holdfast.train.hooks import Logger
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint


class WeightsAndBiases(Logger):
    """Logs to one run of Weights & Biases, and goes on in it after a resume.

    Its id is in the checkpoints. Every value is logged with the `step` that it belongs to, which
    is the axis of all charts: steps that are done again are there twice, with the same values.
    """

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `wandb.init`, such as `project` and `mode="offline"`.

        Raises:
            UsageError: the extra is not installed, or a setting that is decided here.
        """
        taken = [name for name in ("id", "resume") if name in settings]
        if taken:
            raise UsageError(f"WeightsAndBiases: {taken} come from the checkpoint")
        self._settings = settings
        self._library = import_extra("wandb", "wandb")
        self._run: Any = None
        self._id: str | None = None

    def fit_start(self, training: Training) -> None:
        """Begin the run, or go on with it."""
        self._id = self._id or uuid.uuid4().hex[:12]
        with preserved():
            self._run = self._library.init(**self._settings, id=self._id, resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, training: Training, metrics: Metrics) -> None:
        """Log the metrics of the step."""
        self._log(metrics, training.present_step)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Log what the save cost."""
        self._log(cost, checkpoint.step)

    def close(self, training: Training) -> None:
        """End the run for now."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def state_dict(self) -> dict[str, str | None]:
        """The id of the run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the id of a run.

        Raises:
            UsageError: it is none.
        """
        if set(state) != {"id"} or not isinstance(state["id"], str | None):
            raise UsageError(f"not the state of WeightsAndBiases: {sorted(state)}")
        self._id = state["id"]

    def _log(self, metrics: Metrics, step: int) -> None:
        if self._run is not None:
            self._run.log({**metrics, "step": step})
