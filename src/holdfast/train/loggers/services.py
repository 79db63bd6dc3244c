"""Loggers that need an optional library: MLflow, TensorBoard, Weights & Biases.

`Replays` skips steps that are done again, where a service cannot delete records.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from holdfast.arguments import import_extra
from holdfast.data.randomness import preserved
from holdfast.errors import FormatError, UsageError
from holdfast.events import Event, Sink
from holdfast.sinks.trackers import (
    MLflowReferences,
    TensorBoardReferences,
    WandbReferences,
    expect_models,
)
from holdfast.train.loggers.files import EntryLogger
from holdfast.train.outputs import Entry, Histogram, Image, Table
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.format.manifest import Timestamp
    from holdfast.results import Checkpoint


_POSITION = re.compile(r"([0-9]{1,18})/([0-9]{1,18})", re.ASCII)


class Replays:
    """Distinguishes new records from those that an earlier process logged.

    A resume does the steps after its checkpoint again, in the same order. So it is enough to keep
    a position in the sequence of records, with the records. Where training differs after a resume,
    say by its learning rate, the earlier records stay.

    >>> before = Replays()
    >>> [before.is_new(step) for step in (1, 2, 2)], before.position
    ([True, True, True], '2/2')
    >>> after = Replays(before.position)
    >>> [after.is_new(step) for step in (2, 2, 2, 3)]
    [False, False, True, True]
    """

    def __init__(self, position: str = "0/0", *, resumed_step: int = 0) -> None:
        """Start after `position` of an earlier process, for a run resumed from `resumed_step`."""
        match = _POSITION.fullmatch(position)
        if match is None:
            raise FormatError(f"{position!r} is no position of a log such as '120/2'")
        self._reached = (int(match[1]), int(match[2]))
        self._now = self._reached if self._reached[0] == resumed_step else (0, 0)

    @property
    def position(self) -> str:
        """Position of the newest record: its step, and its number within that step."""
        step, count = max(self._now, self._reached)
        return f"{step}/{count}"

    def is_new(self, step: int) -> bool:
        """Count a record of `step`; returns whether it is new."""
        last, count = self._now
        self._now = (step, count + 1 if step == last else 1)
        return self._now > self._reached


class RunSink:
    """Sink that passes events to that of a tracker's present run; drops them before it begins."""

    is_for_leader = True

    def __init__(self) -> None:
        self.target: Sink | None = None

    def __call__(self, event: Event) -> None:
        """Pass an event on."""
        if self.target is not None:
            self.target(event)


class RunLogger(EntryLogger):
    """Logs to one run of a service, whose id is in checkpoints; repeated steps are logged once."""

    _id: str | None = None

    def __init__(self, *, references: bool) -> None:
        self._service: Any = None
        """The library's object to log with while `fit` runs."""
        self.sink: RunSink | None = RunSink() if references else None
        self._replays = Replays()

    def log(self, training: Training, metrics: Metrics) -> None:
        """Log the metrics of the step."""
        step = training.present_step
        # Outside of `fit`, `validate` has no step to log at.
        if self._service is not None and self._replays.is_new(step):
            self._log(metrics, step, self._replays.position)

    @override
    def _log_entry(self, training: Training, name: str, entry: Entry) -> None:
        step = training.present_step
        if self._service is not None and self._replays.is_new(step):
            self._record_entry(name, entry, step)

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Log the cost of the load."""
        self._log(cost, checkpoint.step)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Log the cost of the save."""
        self._log(cost, checkpoint.step)

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Log the metrics of a test; outside of `fit` the run is continued for that."""
        if self._service is not None:
            self._log(metrics, at.step)
            return
        self.fit_start(training)
        try:
            self._log(metrics, at.step)
        finally:
            self.close(training)

    def close(self, training: Training) -> None:
        """End the run; a resume continues it."""
        if self._service is not None:
            self._end_run()
            self._service = None
        if self.sink is not None:
            self.sink.target = None

    def state_dict(self) -> dict[str, str | None]:
        """Return the service's id of the run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the service's id of the run."""
        if set(state) != {"id"} or not isinstance(state["id"], str | None):
            raise UsageError(f"not the state of {type(self).__name__}: {sorted(state)}")
        self._id = state["id"]

    def _end_run(self) -> None:
        """End the run."""
        raise NotImplementedError

    def _log(self, metrics: Metrics, step: int, position: str | None = None) -> None:
        """Log metrics, and with them the position of the log."""
        raise NotImplementedError

    def _record_entry(self, name: str, entry: Entry, step: int) -> None:
        """Log an entry; the position of the log comes with the metrics of the step."""
        raise NotImplementedError


_POSITION_TAG = "holdfast.position"
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
        references: bool = True,
    ) -> None:
        """Make the logger; `tracking_uri` is a server or "sqlite:///path.db", None: as configured.

        `references`: whether each checkpoint gets a model of MLflow, as by `MLflowReferences`.
        """
        self._library = import_extra("mlflow", "mlflow")
        if references:
            expect_models(self._library)
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._status = "FINISHED"
        super().__init__(references=references)

    def fit_start(self, training: Training) -> None:
        """Begin the run, or continue it."""
        with preserved():
            self._service = self._library.MlflowClient(tracking_uri=self._tracking_uri)
            if self._id is None:
                self._id = self._new_run()
            else:
                self._service.update_run(self._id, status="RUNNING")
            tags = self._service.get_run(self._id).data.tags
        self._replays = Replays(tags.get(_POSITION_TAG, "0/0"), resumed_step=training.counters.step)
        self._status = "FINISHED"
        if self.sink is not None:
            self.sink.target = MLflowReferences(self._id, tracking_uri=self._tracking_uri)

    def exception(self, training: Training, error: BaseException) -> None:
        """Record the status with which the run ends."""
        self._status = "FAILED" if isinstance(error, Exception) else "KILLED"

    @override
    def _end_run(self) -> None:
        self._service.set_terminated(self._id, self._status)

    def _new_run(self) -> str:
        found = self._service.get_experiment_by_name(self._experiment)
        experiment = (
            self._service.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        run_id: str = self._service.create_run(experiment, run_name=self._run_name).info.run_id
        return run_id

    @override
    def _log(self, metrics: Metrics, step: int, position: str | None = None) -> None:
        now_ms, entities = int(time.time() * 1000), self._library.entities
        self._service.log_batch(
            self._id,
            metrics=[entities.Metric(name, value, now_ms, step) for name, value in metrics.items()],
            tags=[] if position is None else [entities.RunTag(_POSITION_TAG, position)],
        )

    @override
    def _record_entry(self, name: str, entry: Entry, step: int) -> None:
        path, log_text = f"{name}/step{step}", self._service.log_text
        match entry:
            case Image():
                self._service.log_image(self._id, entry.pixels, f"{path}.png")
            case Table():
                log_text(self._id, entry.markdown, f"{path}.md")
            case Histogram():
                log_text(self._id, json.dumps(entry.record), f"{path}.json")
            case _:
                log_text(self._id, entry, f"{path}.txt")


class TensorBoard(EntryLogger):
    """Logger of metrics, and of the costs of saves and loads, as scalars of their steps.

    When training begins or resumes, TensorBoard is asked to purge later steps, which will be done
    again.
    """

    def __init__(self, folder: str | os.PathLike[str], *, references: bool = True) -> None:
        """Log to `folder`: the argument of `tensorboard --logdir`, or a folder in it.

        `references`: whether checkpoints and their deletions are texts, as by
        `TensorBoardReferences`.
        """
        self.folder = os.fspath(folder)
        self.sink: RunSink | None = RunSink() if references else None
        import_extra("tensorboard", "tensorboard")
        self._make = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def fit_start(self, training: Training) -> None:
        """Open a file of TensorBoard events."""
        self._writer = self._make(self.folder, purge_step=training.counters.step + 1)
        if self.sink is not None:
            self.sink.target = TensorBoardReferences(self._writer)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Write the metrics of the step."""
        self._write_scalars(metrics, training.present_step)

    @override
    def _log_entry(self, training: Training, name: str, entry: Entry) -> None:
        writer, step = self._writer, training.present_step
        if writer is None:
            return
        match entry:
            case Image():
                writer.add_image(name, entry.pixels, step, dataformats="HWC")
            case Table():
                writer.add_text(name, entry.markdown, step)
            case Histogram():
                if entry.counts:
                    self._write_histogram(name, entry, step)
            case _:
                writer.add_text(name, entry, step)

    def _write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        low, *limits = histogram.edges
        counts, total = [*histogram.counts], sum(histogram.counts)
        mean, variance = histogram.mean, histogram.std**2
        self._writer.add_histogram_raw(
            name,
            min=low,
            max=limits[-1],
            num=total,
            sum=total * mean,
            sum_squares=total * (variance + mean**2),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=step,
        )

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the load."""
        self._write_scalars(cost, checkpoint.step)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the save, and flush the file."""
        self._write_scalars(cost, checkpoint.step)
        self._writer.flush()

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Write the metrics of a test; outside of `fit` into a file of events of their own."""
        if self._writer is not None:
            self._write_scalars(metrics, at.step)
            return
        self._writer = self._make(self.folder)
        self._write_scalars(metrics, at.step)
        self.close(training)

    def close(self, training: Training) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.sink is not None:
            self.sink.target = None

    def _write_scalars(self, metrics: Metrics, step: int) -> None:
        if self._writer is None:  # outside of `fit`, `validate` has no step to write at
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(RunLogger):
    """Logger to one run of Weights & Biases, which a resume continues.

    The run's id is in the checkpoints. Every value is logged with its `step`, which is the axis
    of all charts. Steps that are done again are skipped: the position of the log is in a file in
    the run's `wandb` folder. Where a resume does not find that folder, as on another machine,
    they are logged twice.
    """

    def __init__(self, *, references: bool = True, **settings: Any) -> None:
        """Make the logger; `settings` are those of `wandb.init`, such as `mode="offline"`.

        `references`: whether each checkpoint is logged as a reference artifact, as by
        `WandbReferences`.
        """
        taken = [name for name in ("id", "resume") if name in settings]
        if taken:
            raise UsageError(f"WeightsAndBiases: omit {taken}: the checkpoint sets them")
        self._settings = settings
        self._library = import_extra("wandb", "wandb")
        super().__init__(references=references)

    def fit_start(self, training: Training) -> None:
        """Begin the run, or continue it."""
        self._id = self._id or uuid.uuid4().hex[:12]
        with preserved():
            self._service = self._library.init(**self._settings, id=self._id, resume="allow")
        self._replays = self._earlier_replays(training.counters.step)
        self._service.define_metric("step")
        self._service.define_metric("*", step_metric="step")
        if self.sink is not None and not self._service.disabled:
            self.sink.target = WandbReferences(self._service)

    @override
    def _end_run(self) -> None:
        self._service.finish()

    @property
    def _position_file(self) -> Path:
        return Path(self._service.settings.wandb_dir) / f"holdfast-{self._id}.position"

    def _earlier_replays(self, resumed_step: int) -> Replays:
        try:
            position = self._position_file.read_text("utf-8")
        except FileNotFoundError:
            return Replays()
        return Replays(position, resumed_step=resumed_step)

    @override
    def _log(self, metrics: Metrics, step: int, position: str | None = None) -> None:
        self._service.log({**metrics, "step": step})
        if position is None or self._service.disabled:  # then it has no folder
            return
        self._keep_position(position)

    @override
    def _record_entry(self, name: str, entry: Entry, step: int) -> None:
        match entry:
            case Image():
                shown = self._library.Image(entry.pixels)
            case Histogram():
                if not entry.counts:
                    return
                shown = self._library.Histogram(np_histogram=(entry.counts, entry.edges))
            case _:
                table = entry if isinstance(entry, Table) else Table(["text"], [[entry]])
                rows = [[*row] for row in table.rows]
                shown = self._library.Table(columns=[*table.columns], data=rows)
        self._service.log({name: shown, "step": step})

    def _keep_position(self, position: str) -> None:
        aside = self._position_file.with_suffix(".new")
        aside.write_text(position, "utf-8")
        aside.replace(self._position_file)
