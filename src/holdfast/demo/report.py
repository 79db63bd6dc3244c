"""How the demo shows itself: live progress, then a table and a verdict."""

from __future__ import annotations

from itertools import pairwise

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

from holdfast.demo.plan import Plan
from holdfast.demo.process import Line
from holdfast.demo.record import Life, Record, Run


class Live:
    """A progress bar for each run, and a line for whatever is out of the ordinary."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._plan = plan
        self._tasks: dict[str, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:5.3f}"),
            TimeElapsedColumn(),
            console=console,
        )

    def watch(self, run: Run, line: Line) -> None:
        """Show what one line of a worker says."""
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


def _beginning(lives: list[Life]) -> list[str]:
    life = lives[-1]
    if len(lives) == 1:
        return []
    lines = [f"  flipped {life.flipped}"] if life.flipped else []
    lines += [f"  rejected {folder}" for folder, _ in life.rejected]
    redone = lives[-2].reached - life.began_at
    return [*lines, f"  resumed at step {life.began_at}, {redone} steps to do again"]


def _killing(life: Life) -> str:
    where = "" if life.killed_in_save is None else f", saving step {life.killed_in_save}"
    return f"  SIGKILL at step {life.reached}{where}"


def show(console: Console, record: Record) -> None:
    """Print the table of kills and whether the two runs are the same."""
    console.print(_table(record.killed))
    checkpoint = record.undisturbed.lives[0].checkpoint_nbytes
    seconds = sum(life.ended_s - life.began_s for life in record.undisturbed.lives)
    console.print(
        f"Each checkpoint has {decimal(checkpoint)}. The undisturbed run took {seconds:.0f} s; its "
        f"loop stood still for {1e3 * record.undisturbed.stall_s:.1f} ms a save (median).",
        highlight=False,
    )
    num_steps = len(record.undisturbed.losses)
    console.print(
        f"Losses that differ, of {num_steps} steps: {record.num_differing_losses}\n"
        f"Final state, undisturbed:        {record.undisturbed.digest}\n"
        f"Final state, killed three times: {record.killed.digest}",
        highlight=False,
    )
    if record.is_identical:
        console.print("[bold green]The same run, bit for bit.[/]")
    else:
        console.print("[bold red]THE RUNS DIFFER.[/]")


def _table(run: Run) -> Table:
    table = Table(title="What the kills did", title_justify="left")
    for title in ("kill", "at step", "resumed from"):
        table.add_column(title, justify="right")
    table.add_column("rejected, and why", overflow="fold", max_width=44)
    for title in ("steps redone", "saves", "stall per save", "bytes written"):
        table.add_column(title, justify="right")
    for number, (life, after) in enumerate(pairwise(run.lives), start=1):
        in_save = "" if life.killed_in_save is None else f"\nsaving {life.killed_in_save}"
        nbytes = len(life.saves) * life.checkpoint_nbytes
        table.add_row(
            str(number),
            f"{life.reached}{in_save}",
            str(after.began_at),
            "\n".join(f"{folder}: {reason}" for folder, reason in after.rejected) or "nothing",
            str(life.reached - after.began_at),
            str(len(life.saves)),
            f"{1e3 * Run(name='', lives=[life]).stall_s:.1f} ms",
            decimal(nbytes),
        )
    return table
