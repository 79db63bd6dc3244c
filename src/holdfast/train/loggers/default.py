"""Default loggers of a Trainer: metrics as JSON lines, and a progress bar for terminals."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.format.manifest import Timestamp
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.outputs import Image
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint

FLUSH_S = 0.5
"""Longest delay, in seconds, of lines of fast steps, which are written together."""

_encode = msgspec.json.Encoder().encode


class JsonLines(Logger):
    """Logger that writes one JSON object for each logged step: a consistent history of the run.

    When training begins or resumes, lines of steps after the checkpoint are dropped: those steps
    will be done again. A line is flushed to the system before its step's checkpoint is
    begun, so a kill loses none that a resume needs; a power cut may lose the last ones.

    Members: `step` (within a step the one under way), `epoch`, `samples`, `tokens`, `time` (ISO
    8601 UTC) and `metrics`, in which a value that is not finite is the text `nan`, `inf` or `-inf`.
    A matrix, such as a confusion matrix, has a line of its own, as a list of its rows.
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

    def log(self, training: Training, metrics: Metrics) -> None:
        """Write the line of the step; no-op outside of `fit`."""
        if self._file is None:
            return
        self._write(training.present_step, training.counters.timestamp, metrics)

    def log_image(self, training: Training, name: str, image: Image) -> None:
        """Write the matrix that a picture shows; no-op outside of `fit`."""
        if self._file is not None and image.values is not None:
            rows = [[_finite(value) for value in row] for row in image.values]
            self._write_line(training.present_step, training.counters.timestamp, {name: rows})

    def before_save(self, training: Training) -> None:
        """Flush the lines of all steps before the checkpoint is made."""
        self._flush()

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the load."""
        self._write(checkpoint.step, checkpoint.timestamp, cost)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Write the cost of the save, and sync the file, as the checkpoint is durable."""
        assert self._file is not None
        self._write(checkpoint.step, checkpoint.timestamp, cost)
        self._flush()
        os.fsync(self._file.fileno())

    def close(self, training: Training) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, now: Timestamp, metrics: Metrics) -> None:
        self._write_line(step, now, {name: _finite(value) for name, value in metrics.items()})

    def _write_line(self, step: int, now: Timestamp, metrics: Mapping[str, Any]) -> None:
        assert self._file is not None
        line = {
            "step": step,
            "epoch": now.epoch,
            "samples": now.samples,
            "tokens": now.tokens,
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "metrics": metrics,
        }
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
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, step, is_validated)]
    if len(kept) == len(lines):
        return 0
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    return len(lines) - len(kept)


def _is_kept(line: bytes, step: int, is_validated: bool) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    number = found.get("step") if isinstance(found, dict) else None
    if not (line.endswith(b"\n") and isinstance(number, int) and number <= step):
        return False
    return is_validated or number < step or not any(name.startswith("val/") for name in _of(found))


def _of(line: dict[str, Any]) -> dict[str, Any]:
    metrics = line.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class ProgressBar(Logger):
    """Progress bar of training. No-op where the console is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._loss = ""

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Print the checkpoint that training resumes from."""
        self._say(f"resumed {checkpoint.folder} at step {checkpoint.step}")

    def already_done(self, training: Training) -> None:
        """Print that the goal is reached already."""
        self._say(f"{training.goal} is reached already, at step {training.counters.step}")

    def fit_start(self, training: Training) -> None:
        """Show the bar."""
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(training.goal.unit.value),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self._console,
        )
        self._bar.add_task("fit", total=training.goal.value, epoch="", loss="")
        self._bar.start()
        self._show(training)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Move the bar, without reading metrics, which may wait for the device."""
        self._show(training)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Show the loss of training and of validation."""
        if self._bar is None:
            return
        self._loss = " ".join(
            f"{name} {metrics[name]:.4g}" for name in ("loss", "val/loss") if name in metrics
        )
        self._show(training)

    def close(self, training: Training) -> None:
        """Remove the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, training: Training) -> None:
        if self._bar is None:
            return
        done = training.goal.unit.of(training.counters.timestamp)
        task, epoch = self._bar.task_ids[0], training.counters.epoch
        self._bar.update(task, completed=done or 0, epoch=epoch, loss=self._loss)

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, highlight=False)
