"""Log of a Trainer by default: metrics as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from typing_extensions import override

from holdfast.format.manifest import Timestamp
from holdfast.system import replace_file, sync
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.callbacks.measuring import rates_of
from holdfast.train.outputs import Entry, Histogram, Image, Table
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.results import Checkpoint

FLUSH_S = 0.5
"""Longest delay, in seconds, of lines of fast steps, which are written together."""

_NO_RATES: Mapping[str, Any] = {}

_encode = msgspec.json.Encoder().encode


class EntryLogger(Logger):
    """Logger that records entries of any kind by one method."""

    def log_image(self, training: Training, name: str, image: Image) -> None:
        """Record a picture of the step."""
        self._log_entry(training, name, image)

    def log_text(self, training: Training, name: str, text: str) -> None:
        """Record a text of the step."""
        self._log_entry(training, name, text)

    def log_table(self, training: Training, name: str, table: Table) -> None:
        """Record a table of the step."""
        self._log_entry(training, name, table)

    def log_histogram(self, training: Training, name: str, histogram: Histogram) -> None:
        """Record a histogram of the step."""
        self._log_entry(training, name, histogram)

    def _log_entry(self, training: Training, name: str, entry: Entry) -> None:
        """Record an entry; no-op outside of `fit`."""
        raise NotImplementedError


class JsonLines(EntryLogger):
    """Logger that writes one JSON object for each logged step: a consistent history of the run.

    When training begins or resumes, lines of steps after the checkpoint are dropped: those steps
    will be done again. A line is flushed to the system before its step's checkpoint is
    begun, so a kill loses none that a resume needs; a power cut may lose the last ones.

    Members: `step` (within a step the one under way), `epoch`, `samples`, `tokens`, `time` (ISO
    8601 UTC) and `metrics`, in which a value that is not finite is the text `nan`, `inf` or `-inf`;
    with the loss of a step also `lr`, its learning rates by group. A matrix, such as a confusion
    matrix, has a line of its own, as a list of its rows. So have a text, in the member `texts`,
    a table, in the member `tables`, and a histogram, in the member `histograms`.
    The cost of a save has a line of its own, written when the checkpoint is durable, and so has
    that of a load.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._next_flush_s = 0.0

    def fit_start(self, training: Training) -> None:
        """Drop lines of steps that will be done again, and open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = training.counters
        drop_beyond(self.path, now.step, is_validated=not now.unvalidated)
        self._file = self.path.open("ab")

    def before_optimizer_step(self, training: Training) -> None:
        """Note the learning rates of the step, which schedulers change after it."""
        self.step_numbers = rates_of(training.optimizer)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Write the line of the step; no-op outside of `fit`."""
        if self._file is None:
            return
        rates = self.step_numbers if "loss" in metrics else {}
        found = beyond_rates(metrics, self.step_numbers)
        if found or not metrics:
            self._write_metrics(training.present_step, training.counters.timestamp, found, rates)

    @override
    def _log_entry(self, training: Training, name: str, entry: Entry) -> None:
        if self._file is None:
            return
        found: dict[str, Any] = {}
        matrix: dict[str, Any] = {}
        match entry:
            case Image():
                if entry.values is None:
                    return
                matrix = {name: [[_finite(value) for value in row] for row in entry.values]}
            case Table():
                rows = [[_cell(value) for value in row] for row in entry.rows]
                found = {"tables": {name: {"columns": [*entry.columns], "rows": rows}}}
            case Histogram():
                found = {"histograms": {name: entry.record}}
            case _:
                found = {"texts": {name: entry}}
        self._write_line(training.present_step, training.counters.timestamp, matrix, **found)

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Write the metrics of a test; outside of `fit` in place of an earlier line like it."""
        if self._file is not None:
            self._write_metrics(at.step, at, metrics)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_tests(self.path, at.step, metrics)
        self._file = self.path.open("ab")
        self._write_metrics(at.step, at, metrics)
        self.close(training)

    def before_save(self, training: Training) -> None:
        """Flush the lines of all steps before the checkpoint is made."""
        self._flush()

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the load."""
        self._write_metrics(checkpoint.step, checkpoint.timestamp, cost)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the save, and sync the file, as the checkpoint is durable."""
        assert self._file is not None
        self._write_metrics(checkpoint.step, checkpoint.timestamp, cost)
        self._flush()
        sync(self._file.fileno())

    def close(self, training: Training) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_metrics(
        self, step: int, now: Timestamp, metrics: Metrics, rates: Mapping[str, Any] = _NO_RATES
    ) -> None:
        finite = {name: _finite(value) for name, value in metrics.items()}
        self._write_line(step, now, finite, rates)

    def _write_line(
        self,
        step: int,
        now: Timestamp,
        metrics: Mapping[str, Any],
        rates: Mapping[str, Any] = _NO_RATES,
        **more: Mapping[str, Any],
    ) -> None:
        assert self._file is not None
        line = {
            "step": step,
            "epoch": now.epoch,
            "samples": now.samples,
            "tokens": now.tokens,
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "metrics": metrics,
            **more,
        }
        if rates:
            line["lr"] = {name: float(rate) for name, rate in rates.items()}
        self._file.write(_encode(line) + b"\n")
        if time.monotonic() >= self._next_flush_s:
            self._flush()

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            self._next_flush_s = time.monotonic() + FLUSH_S


def drop_beyond(path: Path, step: int, *, is_validated: bool = True) -> int:
    """Remove lines of steps after `step`, and invalid lines; returns how many it removed.

    A validation of `step` that is still to be done (not `is_validated`) may have been logged, by a
    process killed before the save; its line is removed, as it will be logged again.
    The file is replaced as a whole, or not changed if nothing is to be removed.
    """
    return _drop_lines(path, lambda line: _is_kept(line, step, is_validated))


def drop_tests(path: Path, step: int, metrics: Metrics) -> int:
    """Remove lines of `step` with metrics of the same names; returns how many it removed."""

    def stays(line: bytes) -> bool:
        if not line.endswith(b"\n"):
            return False
        try:
            found = json.loads(line)
        except ValueError:
            return False
        is_of_step = isinstance(found, dict) and found.get("step") == step
        return not (is_of_step and _read_metrics(found).keys() == metrics.keys())

    return _drop_lines(path, stays)


def beyond_rates(metrics: Metrics, rates: Mapping[str, Any]) -> dict[str, float]:
    """Leave out what `LearningRates` logs, which the line of the step's loss has already."""
    if "loss" in metrics:
        return dict(metrics)
    own = {f"lr/{name}" for name in rates}
    return {name: value for name, value in metrics.items() if name not in own}


def _drop_lines(path: Path, stays: Callable[[bytes], bool]) -> int:
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if stays(line)]
    if len(kept) == len(lines):
        return 0
    replace_file(path, kept)
    return len(lines) - len(kept)


def _is_kept(line: bytes, step: int, is_validated: bool) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    number = found.get("step") if isinstance(found, dict) else None
    if not (line.endswith(b"\n") and isinstance(number, int) and number <= step):
        return False
    return (
        is_validated
        or number < step
        or not any(name.startswith("val/") for name in _read_metrics(found))
    )


def _read_metrics(line: dict[str, Any]) -> dict[str, Any]:
    metrics = line.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _cell(value: Any) -> Any:
    return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
