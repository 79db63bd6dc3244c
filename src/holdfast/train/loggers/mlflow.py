"""Logger for MLflow (the extra `mlflow`)."""

from __future__ import annotations

import time
from typing import Any

from holdfast.data.randomness import preserved
from holdfast.train.loggers.extras import RunLogger, import_extra
from holdfast.train.loggers.replays import Replays
from holdfast.train.training import Metrics, Training

_POSITION = "holdfast.position"
"""Tag of a run with the position of its newest record."""


class MLflow(RunLogger):
    """Logger to one run of MLflow, which a resume continues.

    The run's id is in the checkpoints. The position of the log is in a tag of the run, written
    together with the metrics, so that steps done again are logged once. Each record is one call
    of the tracking server, which training waits for.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        """Make the logger; `tracking_uri` is a server or "sqlite:///path.db", None: as configured.

        Raises:
            UsageError: the extra is not installed.
        """
        self._library = import_extra("mlflow", "mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._client: Any = None
        self._status = "FINISHED"
        self._replays = Replays()

    def fit_start(self, training: Training) -> None:
        """Begin the run, or continue it."""
        with preserved():
            self._client = self._library.MlflowClient(tracking_uri=self._tracking_uri)
            if self._id is None:
                self._id = self._new_run()
            else:
                self._client.update_run(self._id, status="RUNNING")
            tags = self._client.get_run(self._id).data.tags
        self._replays = Replays(tags.get(_POSITION, "0/0"), resumed_step=training.counters.step)
        self._status = "FINISHED"

    def log(self, training: Training, metrics: Metrics) -> None:
        """Log the metrics of the step."""
        if self._client is None:  # outside of `fit`, `validate` has no step to log at
            return
        step = training.present_step
        if self._replays.is_new(step):
            tag = self._library.entities.RunTag(_POSITION, self._replays.position)
            self._log(metrics, step, tags=[tag])

    def exception(self, training: Training, error: BaseException) -> None:
        """Record the status with which the run ends."""
        self._status = "FAILED" if isinstance(error, Exception) else "KILLED"

    def close(self, training: Training) -> None:
        """End the run; a resume continues it."""
        if self._client is not None:
            self._client.set_terminated(self._id, self._status)
            self._client = None

    def _new_run(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        run_id: str = self._client.create_run(experiment, run_name=self._run_name).info.run_id
        return run_id

    def _log(self, metrics: Metrics, step: int, tags: Any = ()) -> None:
        now_ms = int(time.time() * 1000)
        make = self._library.entities.Metric
        self._client.log_batch(
            self._id,
            metrics=[make(name, value, now_ms, step) for name, value in metrics.items()],
            tags=tags,
        )
