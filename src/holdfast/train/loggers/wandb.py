"""Logger for Weights & Biases (the extra `wandb`)."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.train.loggers.extras import RunLogger, import_extra
from holdfast.train.loggers.replays import Replays
from holdfast.train.training import Metrics, Training


class WeightsAndBiases(RunLogger):
    """Logger to one run of Weights & Biases, which a resume continues.

    The run's id is in the checkpoints. Every value is logged with its `step`, which is the axis
    of all charts. Steps that are done again are skipped: the position of the log is in a file in
    the run's `wandb` folder. Where a resume does not find that folder, as on another machine,
    they are logged twice.
    """

    def __init__(self, **settings: Any) -> None:
        """Make the logger; `settings` are those of `wandb.init`, such as `mode="offline"`.

        Raises:
            UsageError: the extra is not installed, or a setting is one that this class decides.
        """
        taken = [name for name in ("id", "resume") if name in settings]
        if taken:
            raise UsageError(f"WeightsAndBiases: {taken} come from the checkpoint")
        self._settings = settings
        self._library = import_extra("wandb", "wandb")
        self._run: Any = None
        self._replays = Replays()

    def fit_start(self, training: Training) -> None:
        """Begin the run, or continue it."""
        self._id = self._id or uuid.uuid4().hex[:12]
        with preserved():
            self._run = self._library.init(**self._settings, id=self._id, resume="allow")
        self._replays = self._replays_of_before(training.counters.step)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, training: Training, metrics: Metrics) -> None:
        """Log the metrics of the step."""
        if self._run is None:  # outside of `fit`, `validate` has no step to log at
            return
        if self._replays.is_new(training.present_step):
            self._log(metrics, training.present_step)
            self._write_position()

    def close(self, training: Training) -> None:
        """End the run; a resume continues it."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _position_file(self) -> Path:
        return Path(self._run.settings.wandb_dir) / f"holdfast-{self._id}.position"

    def _write_position(self) -> None:
        if self._run.disabled:  # it has no folder
            return
        aside = self._position_file.with_suffix(".new")
        aside.write_text(self._replays.position, "utf-8")
        aside.replace(self._position_file)

    def _replays_of_before(self, resumed_step: int) -> Replays:
        try:
            position = self._position_file.read_text("utf-8")
        except FileNotFoundError:
            return Replays()
        return Replays(position, resumed_step=resumed_step)

    def _log(self, metrics: Metrics, step: int) -> None:
        self._run.log({**metrics, "step": step})
