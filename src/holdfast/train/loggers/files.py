"""Logs of a training in files: JSON lines, which the Trainer writes by default, and CSV tables."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import msgspec
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.system import replace_file, sync
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.callbacks.measuring import rates_of, read_numbers
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
        found = without_rates(metrics, self.step_numbers)
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


def without_rates(metrics: Metrics, rates: Mapping[str, Any]) -> dict[str, float]:
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


_FIRST = ["step", "epoch"]
_COUNTS = ("samples", "tokens")
_OWN = (*_FIRST, *_COUNTS)
_MEMBERS = "metrics/"
"""Beginning of the column of a metric whose name is that of a column of the file's own."""

Row = dict[str, str]


class Csv(Logger):
    """Logger that writes a CSV file: a row for each logged step, a column for each metric.

    The columns are `step` (within a step the one under way), `epoch`, `samples` and `tokens` where
    they are counted, the metrics in the order in which they came, and with the loss of a step its
    learning rates, `lr/<group>`. A row has all that is logged of its step, whichever callback logs
    it. A metric that comes later gets a new last column, which is empty in the rows before. Texts,
    tables, pictures, histograms, and what saves and loads cost are not in it.

    When training begins or resumes, rows of steps after the checkpoint are dropped: those steps
    will be done again. A row is flushed before its step's checkpoint is begun, so a kill loses
    none that a resume needs, and the file is that of a run that was never killed, byte for byte.
    """

    @check_arguments()
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Write to the file `path`; its folder is made."""
        self.path = Path(path)
        self._columns: list[str] = []
        self._file: BinaryIO | None = None
        self._row: Row = {}
        """Row of the newest step, to which more may be added."""
        self._row_start = 0
        """Position in the file of the line of that row."""
        self._next_flush_s = 0.0

    def fit_start(self, training: Training) -> None:
        """Drop rows of steps that will be done again, and open the file."""
        now = training.counters
        self._rewrite(lambda rows: _trim_row(rows, now.step, is_validated=not now.unvalidated))

    def before_optimizer_step(self, training: Training) -> None:
        """Note the learning rates of the step, which schedulers change after it."""
        self.step_numbers = rates_of(training.optimizer)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Add metrics to the row of the step; no-op outside of `fit`."""
        if self._file is None:
            return
        found = without_rates(metrics, self.step_numbers)
        if "loss" in metrics:
            rates = read_numbers(self.step_numbers)
            found |= {f"lr/{name}": rate for name, rate in rates.items()}
        if found:
            self._merge_row(_row_of(training.present_step, training.counters.timestamp, found))

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Add the metrics of a test to the row of its step, also outside of `fit`."""
        is_in_fit = self._file is not None
        self._rewrite(lambda rows: _merged(rows, _row_of(at.step, at, metrics)))
        if not is_in_fit:
            self.close(training)

    def before_save(self, training: Training) -> None:
        """Flush the rows of all steps before the checkpoint is made."""
        self._flush()

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Sync the file, as the checkpoint is durable."""
        self._flush()
        if self._file is not None:
            sync(self._file.fileno())

    def close(self, training: Training) -> None:
        """Close the file."""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _merge_row(self, row: Row) -> None:
        """Add to the newest row if it is of the same step, else begin another one."""
        if not row.keys() <= {*self._columns}:
            self._rewrite(lambda rows: _merged(rows, row))
            return
        if self._file is not None and self._row.get("step") != row["step"]:
            self._flush()
            self._row, self._row_start = {}, self._file.tell()
        self._row |= row
        if time.monotonic() >= self._next_flush_s:
            self._flush()

    def _flush(self) -> None:
        """Write the newest row in the place of its earlier line, if it has one."""
        if self._file is not None and self._row:
            self._file.seek(self._row_start)
            self._file.write(self._line(self._row))
            self._file.truncate()
            self._file.flush()
            self._next_flush_s = time.monotonic() + FLUSH_S

    def _rewrite(self, edit: Callable[[list[Row]], list[Row]]) -> None:
        """Replace the file by one with the edited rows and all their columns, and open it."""
        self._flush()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._file is not None:
            self._file.close()
        columns, rows = _read_csv_rows(self.path)
        rows = edit(rows)
        self._columns = [*dict.fromkeys((*columns, *(name for row in rows for name in row)))]
        self._row = rows[-1] if rows else {}
        lines = [self._line({name: name for name in self._columns})] if self._columns else []
        lines += map(self._line, rows)
        replace_file(self.path, lines)
        self._row_start = sum(map(len, lines[:-1])) if rows else 0
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def _line(self, row: Row) -> bytes:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([row.get(n, "") for n in self._columns])
        return text.getvalue().encode()


def _row_of(step: int, now: Timestamp, metrics: Metrics) -> Row:
    counts = {name: getattr(now, name) for name in _COUNTS}
    row = {"step": str(step), "epoch": "" if now.epoch is None else str(now.epoch)}
    row |= {name: str(count) for name, count in counts.items() if count is not None}
    return row | {_column(name): repr(float(value)) for name, value in metrics.items()}


def _column(name: str) -> str:
    return f"{_MEMBERS}{name}" if name in _OWN else name


def _read_csv_rows(path: Path) -> tuple[list[str], list[Row]]:
    """Read the columns and the whole rows of a file that a `Csv` has written."""
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    header, *body = [*csv.reader(text.splitlines(keepends=True))] or [[]]
    if header and header[:2] != _FIRST:
        raise UsageError(
            f"Csv: {path} exists, and its first line is none of a Csv, which begins with "
            f"{','.join(_FIRST)}: name another file, or move this one away"
        )
    whole = body if text.endswith("\n") else body[:-1]
    rows = [
        dict(zip(header, cells, strict=True))
        for cells in whole
        if len(cells) == len(header) and cells[0].isdecimal()
    ]
    return header, rows


def _merged(rows: list[Row], new: Row) -> list[Row]:
    """Add to the row of the same step, or append a row."""
    for row in rows:
        if row["step"] == new["step"]:
            row.update(new)
            return rows
    return [*rows, new]


def _trim_row(rows: Sequence[Row], step: int, *, is_validated: bool) -> list[Row]:
    """Drop the rows after the step at which a run resumes, and a validation that is to be done."""
    kept = [row for row in rows if int(row["step"]) <= step]
    for row in kept:
        if int(row["step"]) == step and not is_validated:
            row.update({name: "" for name in row if name.startswith("val/")})
    return kept
