"""Output of commands: answers, errors and tables, for terminals and as JSON.

Text from a root was written by others: it is escaped before it is printed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import click
import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError, NoCheckpoint, NotOwned, UsageError
from holdfast.events import Emitter, Event, without_secrets

SCHEMA = 1
"""Value of the member `holdfast` of every JSON answer; grows when a member changes its meaning."""


class Code(IntEnum):
    """Exit codes (docs/cli.md)."""

    OK = 0
    FOUND = 1
    """Damage was found, or the command failed."""
    USAGE = 2
    NOTHING = 3
    """No checkpoint, or not a root."""
    GAVE_UP = 4
    """`run`: too many restarts of the training without progress. `save`: no answer in time.
    `prove`: nothing is proved."""
    DIFFERS_ANYWAY = 5
    """`prove`: two undisturbed runs differ already."""
    COMMAND_FAILED = 6
    """`prove`: the training itself failed."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141


_MAX_WORD = 24
"""Characters of a word in a table from which it may be broken."""
PROGRESS: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("progress", default=None)
"""Callback that long commands report to in place of a bar, as for a page of `serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table of text with headings."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: frozenset[int] = frozenset()
    """Indices of the columns that are aligned to the right."""
    whole: frozenset[int] = frozenset()
    """Indices of the columns that are never cut or wrapped: what people copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a command: its JSON document, its text for people, and the exit code."""

    document: msgspec.Struct
    """Its JSON document, without the member `holdfast`."""
    parts: Sequence[str | TextTable]
    """Lines and tables of the answer for people, in order."""
    code: Code = Code.OK


def give(answer: Answer, *, as_json: bool) -> None:
    """Write an answer to standard output."""
    with _output_expected():
        if as_json:
            _write_json(answer.document)
        else:
            _write_parts(answer.parts)


@contextmanager
def _output_expected() -> Iterator[None]:
    """End the command with a message if its answer cannot be written, as to a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.exceptions.Exit(unwritten(error)) from error


def unwritten(error: OSError) -> Code:
    """Say that the output could not be written; return the exit code."""
    write_message(f"the answer could not be written: {error.strerror or error}")
    discard_output()
    return Code.FOUND


def discard_output() -> None:
    """Discard what is left to write. Python would write it at exit, and complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_parts(parts: Sequence[str | TextTable]) -> None:
    for part in parts:
        if isinstance(part, str):
            click.echo(printable(part))
        elif sys.stdout.isatty() and _least_width(part) <= shutil.get_terminal_size().columns:
            _print_rich(part)
        else:
            for line in aligned(part):
                click.echo(line)


def give_line(document: msgspec.Struct) -> None:
    """Write one JSON object on one line to standard output, and flush it."""
    members = json_safe(msgspec.to_builtins(document))
    click.echo(json.dumps({"holdfast": SCHEMA, **members}, allow_nan=False))
    sys.stdout.flush()


def give_error(error: HoldfastError, *, as_json: bool) -> Code:
    """Write an error to standard error, or as JSON on a line of its own; return its exit code."""
    if as_json:
        # On one line, as some commands write a line for each event.
        members = {"kind": type(error).__name__, "message": without_secrets(str(error))}
        with _output_expected():
            click.echo(json.dumps({"holdfast": SCHEMA, "error": members}))
    else:
        write_message(str(error))
    if isinstance(error, UsageError):
        return Code.USAGE
    if isinstance(error, DeadlineExceeded):
        return Code.GAVE_UP
    return Code.NOTHING if isinstance(error, NoCheckpoint | NotOwned) else Code.FOUND


def write_message(text: str) -> None:
    """Write a message to standard error, after the program's name."""
    click.echo(printable(f"holdfast: {without_secrets(text)}"), err=True)


def say_event(event: Event) -> None:
    """Write the message of an event to standard error; skip `claimed` events."""
    if event.kind != "claimed":
        click.echo(printable(event.message), err=True)


def emitter(warnings: list[str]) -> Emitter:
    """Make an emitter that calls `say_event`, and adds the warnings to a list for the answer."""

    def keep(event: Event) -> None:
        if event.kind == "warning":
            warnings.append(event.message)

    return Emitter((say_event, keep))


def printable(text: str) -> str:
    """Escape control characters that a terminal would interpret, except line breaks."""
    return "\n".join(map(one_line, text.split("\n")))


def one_line(text: str, most: int | None = None) -> str:
    """Escape all control characters of a name, and shorten it to so many characters."""
    text = "".join(
        character if character.isprintable() else f"\\x{ord(character):02x}" for character in text
    )
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def json_safe(value: Any) -> Any:
    """Replace floats that JSON cannot hold by `"nan"`, `"inf"` and `"-inf"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes for people, in binary units."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def format_time(utc: str | None, *, nchars: int = 19) -> str:
    """Format a UTC time for people: to the second, or to the minute with `nchars=16`."""
    return (utc or "?")[:nchars].replace("T", " ")


def number(value: float) -> str:
    """Format a metric for people, to six significant digits."""
    return f"{value:.6g}"


def aligned(table: TextTable) -> Iterator[str]:
    """Format the lines of a table, with columns aligned by spaces."""
    rows = [table.columns, *(tuple(map(one_line, row)) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in table.right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a progress bar; yield its callback (what, done bytes, all bytes), None off terminals.

    Where `PROGRESS` has a callback, that is yielded, and no bar is shown.
    """
    if (given := PROGRESS.get()) is not None:
        yield given
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(what: str, done_nbytes: int, total_nbytes: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(printable(what), total=total_nbytes)
            progress.update(tasks[what], completed=done_nbytes, total=total_nbytes)

        yield report


def _write_json(document: msgspec.Struct) -> None:
    whole = {"holdfast": SCHEMA, **msgspec.to_builtins(document)}
    # With `indent`, `json` encodes in Python, which took half of the time of 20,000 tensors.
    try:
        text = json.dumps(whole, allow_nan=False)
    except ValueError:  # a float that JSON cannot hold
        text = json.dumps(json_safe(whole), allow_nan=False)
    click.echo(msgspec.json.format(text, indent=2))


def _least_width(table: TextTable) -> int:
    """Return the characters of a table whose columns are as narrow as their words allow."""

    def least(number: int, cell: str) -> int:
        if number in table.whole:
            return len(cell)
        return max((min(len(word), _MAX_WORD) for word in cell.split()), default=0)

    rows = [table.columns, *(tuple(map(one_line, row)) for row in table.rows)]
    columns = enumerate(zip(*rows, strict=True))
    return sum(2 + max(least(number, cell) for cell in column) for number, column in columns)


def _print_rich(table: TextTable) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(table.columns):
        justify: Literal["left", "right"] = "right" if number in table.right else "left"
        whole = number in table.whole
        drawn.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(one_line(cell)) for cell in row))
    Console().print(drawn)
