"""Progress bar for terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.train.callbacks.hooks import Logger
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint


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
