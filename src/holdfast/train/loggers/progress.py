"""Progress of a training for people: a bar on a terminal, lines anywhere else; model and saves."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast.checkpoints import Checkpoints
from holdfast.events import shows_info
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Unit
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.callbacks.measuring import Clock, Pace, memory_nbytes, parts_of, rates_of
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.results import Checkpoint

MAX_METRICS = 8
"""Most metrics of a validation that are shown."""


class ProgressBar(Logger):
    """Shows how far training is: a bar on a terminal, else a line at each log, to stderr.

    Both show loss, learning rate, samples and tokens per second (where counted, else steps),
    memory, the time that is left, and the last checkpoint. Validations, saves and resumes have
    lines of their own, saves and resumes unless they are logged at INFO; and so has the model at
    the beginning.
    """

    records_log = False

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        """Show on `console`, by default the process's stderr; `clock` gives seconds."""
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._bar: Progress | None = None
        self._pace = Pace(clock, 2)
        self._is_running = False
        self._saved: int | None = None
        self._began = 0.0, 0.0
        """Time and progress at the beginning of `fit`."""

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Print the checkpoint that training resumes from."""
        self._saved = checkpoint.step
        self._print_event(training, f"resuming from step {checkpoint.step}: {checkpoint.folder}")

    def already_done(self, training: Training) -> None:
        """Print that the goal is reached already."""
        self._print_line(
            f"{training.goal} was already reached, at step {training.counters.step}: nothing is "
            "trained; a larger goal continues from there"
        )

    def fit_start(self, training: Training) -> None:
        """Print what is trained and saved, and show the bar."""
        self._is_running = True
        self._pace.clear()
        self._pace.mark(training.counters)
        self._began = self._clock(), _progress(training)
        for line in summary(training.model, training.checkpoints):
            self._print_line(line)
        if not self._console.is_terminal:
            return
        columns = ("{task.fields[at]}", BarColumn(), "{task.fields[state]}")
        self._bar = Progress(
            *(
                TextColumn(column, markup=False) if isinstance(column, str) else column
                for column in columns
            ),
            console=self._console,
        )
        self._bar.add_task("fit", total=training.goal.value, at="", state="")
        self._bar.start()
        self._move(training)

    def before_optimizer_step(self, training: Training) -> None:
        """Note the learning rate of the step, which schedulers change after it."""
        self.step_numbers = rates_of(training.optimizer)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Move the bar, without reading metrics, which may wait for the device."""
        self._move(training)

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Print the metrics of a validation."""
        if self._is_running:
            shown = [f"{key} {metrics[key]:.4g}" for key in [*metrics][:MAX_METRICS]]
            more = f", and {len(metrics) - MAX_METRICS} more" * (len(metrics) > MAX_METRICS)
            self._print_line(f"validated step {training.present_step}: {', '.join(shown)}{more}")

    def log(self, training: Training, metrics: Metrics) -> None:
        """Show the state of training; no-op for metrics that are not those of a step."""
        if "loss" not in metrics or not self._is_running:
            return
        self._pace.mark(training.counters)
        state = "  ".join(self._format_status(training, metrics))
        if self._bar is None:
            self._print_line(f"{_describe_progress(training)}  {state}")
        else:
            self._bar.update(self._bar.task_ids[0], state=state)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Print the name of a checkpoint, and what it cost."""
        self._saved = checkpoint.step
        took = f"{format_nbytes(cost['save/nbytes'])} in {cost['save/duration_s']:.2g} s"
        self._print_event(training, f"saved step {checkpoint.step}: {checkpoint.folder}, {took}")

    def close(self, training: Training) -> None:
        """Remove the bar and restore the terminal."""
        self._is_running = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print_event(self, training: Training, line: str) -> None:
        """Print a line, unless the logger shows it too."""
        if training.checkpoints is None or not shows_info(training.checkpoints.sinks):
            self._print_line(line)

    def _format_status(self, training: Training, metrics: Metrics) -> list[str]:
        found = [f"loss {metrics['loss']:.4g}"]
        rates = list(dict.fromkeys(float(rate) for rate in self.step_numbers.values()))
        found += [f"lr {', '.join(f'{rate:.3g}' for rate in rates[:3])}"] if rates else []
        speeds = self._pace.rates
        names = ("samples", "tokens") if "samples" in speeds or "tokens" in speeds else ("steps",)
        found += [f"{short(speeds[name])} {name}/s" for name in names if name in speeds]
        nbytes = memory_nbytes(training.model)
        found += [] if nbytes is None else [f"memory {format_nbytes(nbytes)}"]
        left_s = self._left_s(training)
        found += [] if left_s is None else [f"ETA {duration(left_s)}"]
        return [*found, "not saved yet" if self._saved is None else f"saved step {self._saved}"]

    def _left_s(self, training: Training) -> float | None:
        """Return the seconds that are left at the mean speed of this call; None: not known."""
        began_s, begun_at = self._began
        done = _progress(training)
        if done <= begun_at:
            return None
        per_unit_s = (self._clock() - began_s) / (done - begun_at)
        return max(float(training.goal.value) - done, 0.0) * per_unit_s

    def _move(self, training: Training) -> None:
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=_progress(training), at=_describe_progress(training))

    def _print_line(self, text: str) -> None:
        console = self._console
        if console.is_terminal or console.record or console.quiet:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:  # rich takes as long for a line as a small model for its step
            console.file.write(f"{text}\n")
            console.file.flush()


def _describe_progress(training: Training) -> str:
    """Describe the step and the epoch, with the goal: "step 20/100" or "step 20  epoch 2/3"."""
    now, goal = training.counters, training.goal
    step, epoch = f"step {now.step}", f"epoch {now.epoch}"
    if goal.unit is Unit.STEP:
        return f"{step}/{goal.value}  {epoch}"
    if goal.unit is Unit.EPOCH:
        return f"{step}  {epoch}/{goal.value}"
    done = goal.unit.read_progress(now.timestamp) or 0
    return f"{step}  {short(done)}/{short(goal.value)} {goal.unit.value}"


def _progress(training: Training) -> float:
    """Return the progress in the unit of the goal, within an epoch where its length is known."""
    now, unit = training.counters, training.goal.unit
    done = float(unit.read_progress(now.timestamp) or 0)
    if unit is not Unit.EPOCH:
        return done
    try:
        return done + min(now.batch / len(training.data), 1.0)
    except (TypeError, NotImplementedError, ZeroDivisionError):
        return done


MAX_ROWS = 12
"""Most modules that a summary lists."""


def summary(model: nn.Module, checkpoints: Checkpoints) -> list[str]:
    """Describe a model by its parts, and what will be saved where, when and for how long."""
    return [*_model_lines(model), _saves_line(checkpoints)]


def _model_lines(model: nn.Module) -> list[str]:
    children = dict(model.named_children())
    parts = {name: _count_parameters(weights) for name, weights in parts_of(model).items()}
    total, trained = (sum(sizes[at] for sizes in parts.values()) for at in (0, 1))
    lines = [f"{type(model).__name__}: {total:,} parameters, {trained:,} trainable"]
    rows = [
        (name, type(children[name]).__name__ if name in children else "", *sizes)
        for name, sizes in parts.items()
    ]
    shown = rows[:MAX_ROWS]
    if len(shown) > 1 or any(kind for _, kind, *_ in shown):
        names, kinds = (max(len(str(row[at])) for row in shown) for at in (0, 1))
        digits = max(len(f"{row[2]:,}") for row in shown)
        for name, kind, num, num_trained in shown:
            note = "" if num == num_trained else f"  {num_trained:,} trainable"
            lines.append(f"  {name:{names}}  {kind:{kinds}}  {num:>{digits},}{note}".rstrip())
    if len(rows) > MAX_ROWS:
        rest = sum(row[2] for row in rows[MAX_ROWS:])
        lines.append(f"  and {len(rows) - MAX_ROWS} more  {rest:,}")
    return lines


def _count_parameters(weights: Sequence[nn.Parameter]) -> tuple[int, int]:
    made = [weight for weight in weights if not is_lazy(weight)]
    trained = [weight.numel() for weight in made if weight.requires_grad]
    return sum(weight.numel() for weight in made), sum(trained)


def _saves_line(checkpoints: Checkpoints) -> str:
    if checkpoints.root is None:
        return "saves: none (checkpoints=None)"
    every, keep = checkpoints.every, checkpoints.keep
    when = "at the end" if every is None else f"{_when(every)}, and at the end"
    kept = "all are kept" if keep is None else f"kept: {keep}"
    others = "".join(f"; saver {saver.name}" for saver in checkpoints.savers)
    return f"saves: to {_describe_root(checkpoints.root)} {when}; {kept}{others}"


def _when(every: Any) -> str:
    if isinstance(every, str):
        return "at intervals that are measured" if every == "auto" else f"every {every}"
    if callable(every):
        return f"when {getattr(every, '__name__', type(every).__name__)} says so"
    return str(every)


def _describe_root(root: Any) -> str:
    if isinstance(root, Tiered):
        return f"{_describe_root(root.local)}, then {_describe_root(root.remote)}"
    if isinstance(root, str | os.PathLike):
        return os.fspath(root)
    return str(getattr(root, "url", root))


def short(value: float) -> str:
    """Format a count for people: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def format_nbytes(nbytes: float) -> str:
    """Format a number of bytes for people."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a duration for people: 0:07, 12:34, 3:02:01, 2d 3:02:01."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    head = f"{days}d " if days else ""
    return f"{head}{hours}:{minutes:02}:{rest:02}" if head or hours else f"{minutes}:{rest:02}"
