"""Log of a training as a table: a CSV file with a column for each metric."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from holdfast.arguments import checked
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.system import sync
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.callbacks.measuring import rates_of, read_numbers
from holdfast.train.loggers.default import FLUSH_S, beyond_rates
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from _csv import Writer

    from holdfast.engine.checkpoint import Checkpoint

_FIRST = ["step", "epoch"]
_COUNTS = ("samples", "tokens")
_OWN = (*_FIRST, *_COUNTS)
_MEMBERS = "metrics/"
"""Beginning of the column of a metric whose name is that of a column of the file's own."""

Row = Mapping[str, str]


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

    @checked()
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Write to the file `path`; its folder is made."""
        self.path = Path(path)
        self._columns: list[str] = []
        self._file: TextIO | None = None
        self._row: dict[str, str] = {}
        """Row of the newest step, to which more may be added."""
        self._row_nbytes = 0
        """Length of the row's line at the end of the file; 0: it is not written yet."""
        self._next_flush_s = 0.0

    def fit_start(self, training: Training) -> None:
        """Drop rows of steps that will be done again, and open the file."""
        now = training.counters
        self._open(lambda row: _kept(row, now.step, is_validated=not now.unvalidated))

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
            self._add(_row_of(training.present_step, training.counters.timestamp, found))

    def test_end(self, training: Training, at: Timestamp, metrics: Metrics) -> None:
        """Add the metrics of a test to the row of its step, also outside of `fit`."""
        is_in_fit = self._file is not None
        self.close(training)
        row = _row_of(at.step, at, metrics)
        self._open(lambda found: {**found, **row} if found["step"] == row["step"] else found, row)
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
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file = None

    def _open(self, edit: Callable[[Row], Row | None], new: Row | None = None) -> None:
        """Open the file to append, after removing torn rows and those for which `edit` is None.

        `new` is a row that is added if no row has its step.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, rows, num_lines = _read(self.path)
        kept = [row for row in map(edit, rows) if row is not None]
        if new is not None:
            self._columns += [name for name in new if name not in self._columns]
            if all(row["step"] != new["step"] for row in kept):
                kept.append(new)
        self._row = {name: value for name, value in kept[-1].items() if value} if kept else {}
        line = self._line(self._row).encode() if kept else b""
        self._row_nbytes = len(line)
        if len(kept) < num_lines or kept != rows or not _ends_with(self.path, line):
            self._replace(kept)
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def _add(self, row: Row) -> None:
        """Add to the newest row if it is of the same step, else begin another one."""
        if self._row and self._row["step"] != row["step"]:
            self._write()
            self._row, self._row_nbytes = {}, 0
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen(new)
        self._unwrite()
        self._row |= row
        if time.monotonic() >= self._next_flush_s:
            self._flush()

    def _write(self) -> None:
        """Write the newest row, unless its line is in the file."""
        if self._row and not self._row_nbytes and self._file is not None:
            line = self._line(self._row)
            self._file.write(line)
            self._row_nbytes = len(line.encode())

    def _unwrite(self) -> None:
        """Cut the line of the newest row off, as the row changes."""
        if self._row_nbytes and self._file is not None:
            self._file.flush()
            os.truncate(self.path, self.path.stat().st_size - self._row_nbytes)
            self._row_nbytes = 0

    def _line(self, row: Row) -> str:
        text = io.StringIO()
        _writer(text).writerow([row.get(name, "") for name in self._columns])
        return text.getvalue()

    def _widen(self, new: Sequence[str]) -> None:
        """Add columns, which are empty in all rows so far."""
        assert self._file is not None
        self._unwrite()
        self._file.close()
        _, rows, _ = _read(self.path)
        self._columns += new
        self._replace(rows)
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def _replace(self, rows: Sequence[Row]) -> None:
        """Replace the file as a whole: with the header, if any column is known, and these rows."""
        aside = self.path.with_name(f".{self.path.name}.new")
        with aside.open("w", encoding="utf-8", newline="") as file:
            if self._columns:
                lines = [[row.get(name, "") for name in self._columns] for row in rows]
                _writer(file).writerows([self._columns, *lines])
            file.flush()
            sync(file.fileno())
        aside.replace(self.path)

    def _flush(self) -> None:
        if self._file is not None:
            self._write()
            self._file.flush()
            self._next_flush_s = time.monotonic() + FLUSH_S


def _ends_with(path: Path, line: bytes) -> bool:
    if not path.exists() or path.stat().st_size < len(line):
        return not line
    with path.open("rb") as file:
        file.seek(-len(line), os.SEEK_END)
        return file.read() == line


def _row_of(step: int, now: Timestamp, metrics: Metrics) -> dict[str, str]:
    counts = {name: getattr(now, name) for name in _COUNTS}
    row = {"step": str(step), "epoch": "" if now.epoch is None else str(now.epoch)}
    row |= {name: str(count) for name, count in counts.items() if count is not None}
    return row | {_column(name): repr(float(value)) for name, value in metrics.items()}


def _writer(file: TextIO) -> Writer:
    return csv.writer(file, lineterminator="\n")


def _column(name: str) -> str:
    return f"{_MEMBERS}{name}" if name in _OWN else name


def _read(path: Path) -> tuple[list[str], list[Row], int]:
    """Read the columns, the whole rows, and how many lines there are, torn ones among them.

    Raises:
        UsageError: the file was not written by a `Csv`.
    """
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    header, *body = [*csv.reader(text.splitlines(keepends=True))] or [[]]
    if header and header[:2] != _FIRST:
        raise UsageError(
            f"Csv: {path} exists, and its first line is none of a Csv, which begins with "
            f"{','.join(_FIRST)}: name another file, or move this one away"
        )
    whole = body if text.endswith("\n") else body[:-1]
    rows: list[Row] = [
        dict(zip(header, cells, strict=True))
        for cells in whole
        if len(cells) == len(header) and cells[0].isdecimal()
    ]
    return header, rows, len(body)


def _kept(row: Row, step: int, *, is_validated: bool) -> Row | None:
    """Return what stays of a row when a run resumes from a step; None if the step is done again."""
    number = int(row["step"])
    if number != step or is_validated:
        return row if number <= step else None
    return {name: "" if name.startswith("val/") else value for name, value in row.items()}
