"""Writes the help of all commands to docs/cli.md: `python -m tests.cli.page`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from holdfast.cli.app import app, load_command
from holdfast.cli.options import Argument

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
MARK = (
    "<!-- From here on written by `python -m tests.cli.page`. Edit src/holdfast/cli instead. -->\n"
)
_IN_THE_INTRODUCTION = (
    *("--json", "--trust", "--version", "ROOT", "ROOT@WHICH", "ROOT[@WHICH]", "SOURCE", "A", "B"),
)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Each command with its full name, groups included."""
    yield "holdfast", app
    for name in app.commands:
        command = load_command(name)
        yield f"holdfast {name}", command
        for inner, part in getattr(command, "commands", {}).items():
            yield f"holdfast {name} {inner}", part


def page() -> str:
    """The page with the introduction that it has, and the help of all commands."""
    introduction, _, _ = PAGE.read_text("utf-8").partition(MARK)
    return introduction + MARK + "".join(_section(*one) for one in commands() if one[1].params)


def _section(name: str, command: click.Command) -> str:
    metavars = [p.human_readable_name for p in command.params if isinstance(p, Argument)]
    paragraphs = [_wrapped(_escaped(text)) for text in (command.help or "").split("\n\n")]
    items = [_wrapped(f"* {item}", indent="  ") for item in _parameters(command)]
    heading = f"### `{' '.join([name, *metavars])}`"
    return "\n" + "\n\n".join([heading, *paragraphs, "\n".join(items)]).rstrip() + "\n"


def _parameters(command: click.Command) -> Iterator[str]:
    context = click.Context(command, parent=click.Context(app, **app.context_settings))
    for parameter in command.params:
        if isinstance(parameter, Argument):
            names, text = parameter.human_readable_name, parameter.about
        else:
            names, text = parameter.get_help_record(context) or ("", "")
        if names not in _IN_THE_INTRODUCTION:
            yield f"`{names}`: {_escaped(text)}"


def _escaped(text: str) -> str:
    """The text for Markdown, in which brackets are links."""
    return re.sub(r"[*[\]]", r"\\\g<0>", text)


def _wrapped(text: str, indent: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(
        words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
