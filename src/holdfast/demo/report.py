"""Output of the demo: live progress, a table and a verdict on the console, and the plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from holdfast.demo.record import DemoPlan, DemoRecord, Line, ProcessRecord, RunRecord
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Live:
    """Live output: a progress bar for each run, and a line for each kill and resume."""

    def __init__(self, console: Console, plan: DemoPlan) -> None:
        self._plan = plan
        self._tasks: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:5.3f}"),
            TimeElapsedColumn(),
            console=console,
        )

    def watch(self, run: RunRecord, line: Line) -> None:
        """Show one report of a worker."""
        if run.name not in self._tasks:
            self._tasks[run.name] = self.progress.add_task(
                run.name, total=self._plan.num_steps, loss=float("nan")
            )
        task = self._tasks[run.name]
        match line["kind"]:
            case "step":
                self.progress.update(task, completed=line["step"], loss=line["loss"])
            case "begins":
                self.progress.update(task, completed=line["step"])
                for text in _beginning(run.lives):
                    self._say(text)
            case "killed":
                self._say(_killing(run.lives[-1]))

    def _say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)


def _beginning(lives: list[ProcessRecord]) -> list[str]:
    life = lives[-1]
    if len(lives) == 1:
        return []
    lines = [f"  flipped {life.flipped}"] if life.flipped else []
    lines += [f"  rejected {folder}" for folder, _ in life.rejected]
    redone = lives[-2].reached - life.began_at
    return [*lines, f"  resumed at step {life.began_at}, {redone} steps to do again"]


def _killing(life: ProcessRecord) -> str:
    where = "" if life.killed_in_save is None else f", saving step {life.killed_in_save}"
    return f"  SIGKILL at step {life.reached}{where}"


def show(console: Console, record: DemoRecord) -> None:
    """Print the table of kills and whether the two runs are the same."""
    console.print(_table(record.killed))
    console.print(
        "saving: the step whose save was under way; redone: steps; stall: how long the\n"
        "loop stood still for a save (median); bytes: written since the process began\n",
        highlight=False,
    )
    for text in _damage(record.killed):
        console.print(text, highlight=False, markup=False)
    checkpoint = record.undisturbed.lives[0].checkpoint_nbytes
    seconds = sum(life.ended_s - life.began_s for life in record.undisturbed.lives)
    console.print(
        f"Each checkpoint has {decimal(checkpoint)}. The undisturbed run took {seconds:.0f} s; its "
        f"loop stood still for {1e3 * record.undisturbed.stall_s:.1f} ms a save (median).",
        highlight=False,
    )
    workers = ", ".join(str(life.num_workers) for life in record.killed.lives)
    console.print(
        f"The processes of the killed run fetched their data with {workers} workers in turn.",
        highlight=False,
    )
    num_steps = len(record.undisturbed.losses)
    console.print(
        f"Losses that differ, of {num_steps} steps: {record.num_differing_losses}\n"
        "Digests of the final states, weights, moments, generators and all:\n"
        f"undisturbed  {record.undisturbed.digest}\n"
        f"killed       {record.killed.digest}",
        highlight=False,
    )
    if record.is_identical:
        console.print("[bold green]The same run, bit for bit.[/]")
    else:
        console.print("[bold red]THE RUNS DIFFER.[/]")


def _table(run: RunRecord) -> Table:
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    titles = "kill/at step/saving/rejected/resumed/redone/saves/stall/bytes"
    for title in titles.split("/"):
        table.add_column(title, justify="right")
    for number, (life, after) in enumerate(pairwise(run.lives), start=1):
        table.add_row(
            str(number),
            str(life.reached),
            "" if life.killed_in_save is None else str(life.killed_in_save),
            str(len(after.rejected) or ""),
            str(after.began_at),
            str(life.reached - after.began_at),
            str(len(life.saves)),
            f"{1e3 * RunRecord(name='', lives=[life]).stall_s:.1f} ms",
            decimal(len(life.saves) * life.checkpoint_nbytes),
        )
    return table


def _damage(run: RunRecord) -> Iterator[str]:
    """Format lines about flipped bits and rejected checkpoints, without repeating the path."""
    for life in run.lives:
        if life.flipped:
            yield f"Flipped: {life.flipped}."
        for folder, reason in life.rejected:
            text = shorten(reason.rpartition(f"{folder}/")[2], 150, placeholder=" …")
            yield f"Rejected: {folder}: {text}"


_SMOOTHING = 0.9
_LIGHT, _DARK, _RED, _GREEN = "#9ecae1", "#08306b", "#cb181d", "#238b45"


def check_library() -> None:
    """Raise `UsageError` if matplotlib is missing; called before the demo trains."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the demo draws with matplotlib: pip install 'holdfast-torch[plot]'"
        ) from error


def draw(record: DemoRecord, path: Path) -> None:
    """Write the plot to `path`, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[1.0, 1.1])
    _draw_losses(above, record)
    _draw_progress(below, record.killed)
    verdict = "the same run, bit for bit" if record.is_identical else "THE RUNS DIFFER"
    figure.suptitle(f"Killed and resumed {record.killed.num_kills} times: {verdict}")
    figure.savefig(path)


def _draw_losses(axes: Axes, record: DemoRecord) -> None:
    styles = ((record.undisturbed, _LIGHT, 5.0), (record.killed, _DARK, 1.2))
    for run, color, width in styles:
        steps = sorted(run.losses)
        losses = _smoothed([run.losses[step] for step in steps])
        axes.plot(steps, losses, label=run.name, color=color, linewidth=width)
    for number, life in enumerate(_killed(record.killed), start=1):
        axes.axvline(life.reached, color=_RED, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"kill {number}" + (" (in a save)" if life.killed_in_save is not None else ""),
            (life.reached, 1.0 - 0.08 * number),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=_RED,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte (smoothed)")
    axes.set_xlim(left=0)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.8), frameon=False)


def _draw_progress(axes: Axes, run: RunRecord) -> None:
    """Draw the step over time: it climbs, falls back at each resume, and climbs again."""
    begin_s = run.lives[0].began_s
    for life in run.lives:
        climb = [(life.steps[0][0], life.began_at), *((at, step) for at, step, _ in life.steps)]
        axes.plot([at - begin_s for at, _ in climb], [s for _, s in climb], color=_DARK)
        saves = [(at - begin_s, step) for at, step in life.saves]
        axes.plot(*_columns(saves), "o", color=_DARK, markersize=4)
    ends = [(life.steps[-1][0] - begin_s, life.reached) for life in _killed(run)]
    starts = [(life.steps[0][0] - begin_s, life.began_at) for life in run.lives[1:]]
    for end, start in zip(ends, starts, strict=True):
        axes.annotate("", start, end, arrowprops={"arrowstyle": "->", "color": _RED})
    axes.plot([], [], "o-", color=_DARK, markersize=4, label="training, and its checkpoints")
    axes.plot(*_columns(ends), "X", color=_RED, markersize=11, label="SIGKILL")
    axes.plot(*_columns(starts), "^", color=_GREEN, markersize=9, label="resumed here")
    for life, (at, step) in zip(run.lives[1:], starts, strict=True):
        note = f"step {life.began_at}"
        if life.rejected:
            note += f"\n{len(life.rejected)} rejected:\na bit was flipped"
        axes.annotate(note, (at, step), xytext=(8, -4), textcoords="offset points", va="top")
    axes.set_xlabel("seconds, starts of processes included")
    axes.set_ylabel("step")
    axes.margins(x=0.06)
    axes.legend(loc="upper left", frameon=False)


def _columns(points: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [at for at, _ in points], [step for _, step in points]


def _killed(run: RunRecord) -> list[ProcessRecord]:
    return [life for life in run.lives if life.was_killed]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Compute an exponential moving average, corrected for its start at zero."""
    smooth, weight, result = 0.0, 0.0, []
    for value in values:
        smooth = _SMOOTHING * smooth + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        result.append(smooth / weight)
    return result
