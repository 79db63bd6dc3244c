"""A progress bar for whoever sits at a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.policy.clock import reading
from holdfast.train.callbacks import Logger, Metrics

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint
    from holdfast.train.trainer import Trainer


class ProgressBar(Logger):
    """Shows how far training is. Silent where the console is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None

    def resumed(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """Say from where training goes on."""
        self._say(f"resumed {checkpoint.folder} at step {checkpoint.step}")

    def already_done(self, trainer: Trainer) -> None:
        """Say that there is nothing to do."""
        self._say(f"{trainer.goal} is reached already, at step {trainer.counters.step}")

    def fit_start(self, trainer: Trainer) -> None:
        """Show the bar."""
        if not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(trainer.goal.unit.value),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self._console,
        )
        self._bar.add_task("fit", total=trainer.goal.value, epoch="", loss="")
        self._bar.start()
        self._show(trainer, "")

    def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
        """Move the bar."""
        self._show(trainer, f"loss {metrics['loss']:.4g}")

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def fit_end(self, trainer: Trainer) -> None:
        """Leave the terminal as it was."""
        self._stop()

    def _show(self, trainer: Trainer, loss: str) -> None:
        if self._bar is None:
            return
        done = reading(trainer.counters.timestamp, trainer.goal.unit)
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done or 0, epoch=trainer.counters.epoch, loss=loss)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, highlight=False)
