"""Log of a training as a table: a CSV file with a column for each metric."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.system import replace_file, sync
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.callbacks.measuring import rates_of, read_numbers
from holdfast.train.loggers.default import FLUSH_S, beyond_rates
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.results import Checkpoint

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
        found = beyond_rates(metrics, self.step_numbers)
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
