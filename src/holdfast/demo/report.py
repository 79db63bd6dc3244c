"""Output of the demo on the console: live progress, then a table and a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from textwrap import shorten

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

from holdfast.demo.plan import DemoPlan
from holdfast.demo.process import Line
from holdfast.demo.record import DemoRecord, ProcessRecord, RunRecord


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
