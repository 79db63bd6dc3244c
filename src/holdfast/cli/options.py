"""Declaration of commands, and the arguments and options that several of them take.

A command is a function with `command` above it, in the module that `cli.app` names for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from holdfast.cli.output import Code, discard_output, give, give_error
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from msgspec import Struct

Work = TypeVar("Work", bound=Callable[..., Any])

# Values of the options before the command


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """Files, environment variables and commands that give keys; read only when needed."""

    files: Sequence[str] = ()
    variables: Sequence[str] = ()
    commands: Sequence[str] = ()
    accepts_plain: bool = False
    file_key: Path | None = None
    """File with the key of a file of another library."""


NAMED: ContextVar[KeySources] = ContextVar("named keys")
"""Key sources given before the command, such as `--key-file`."""
PATIENCE: ContextVar[str] = ContextVar("patience", default="20s")
"""Value of `--timeout`: how long an object store may leave requests unanswered."""


# Commands


class Argument(click.Argument):
    """Positional argument with a help text, as options have; click's own needs 8.5."""

    def __init__(self, *names: Any, about: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.about = about


class DescribedCommand(click.Command):
    """A command whose help describes its arguments; it knows the structs of its JSON answers."""

    answers: Mapping[str, type[Struct]] = {}
    """Struct of its answer, by the option that it goes with; "" for the usual answer."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        arguments = [item for item in self.params if isinstance(item, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(item.human_readable_name, item.about) for item in arguments])
        super().format_options(ctx, formatter)


class Commands(click.Group):
    """A group of commands, listed in the order of the source."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the source."""
        return [*self.commands]


DECLARED = Commands()
"""The commands of the modules that were imported; `cli.app` imports those that are run."""


def command(
    name: str,
    *parameters: click.Parameter,
    answer: type[Struct],
    other_answers: Mapping[str, type[Struct]] | None = None,
    group: click.Group = DECLARED,
    json_lines: str | None = None,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    **settings: Any,
) -> Callable[[Work], Work]:
    """Decorator: declare a command. The function's docstring is its help.

    The function returns an `Answer`, which is printed, with `--json` its document. With
    `json_lines`, the help of `--json`, it prints by itself, also takes `as_json`, and returns the
    exit code. The command calls what `wrap` makes of the function.
    """
    json_help = json_lines or "Print one JSON object."

    def declare(function: Work) -> Work:
        work = wrap(function)

        def answer_command(as_json: bool, **given: Any) -> int:
            if json_lines is not None:
                return int(work(as_json=as_json, **given))
            found = work(**given)
            give(found, as_json=as_json)
            return int(found.code)

        made = DescribedCommand(
            name,
            callback=lambda **given: _end_with_code(answer_command, **given),
            params=[*parameters, flag("--json", json_help, "as_json")],
            help=inspect.getdoc(function),
            **settings,
        )
        made.answers = {"": answer, **(other_answers or {})}
        group.add_command(made)
        return function

    return declare


def _end_with_code(work: Callable[..., int], *, as_json: bool, **given: Any) -> NoReturn:
    """Run a command; print its error, if any, and exit with its code."""
    try:
        try:
            code = work(as_json, **given)
        except HoldfastError as error:
            code = give_error(error, as_json=as_json)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = Code.INTERRUPTED
    except BrokenPipeError:
        discard_output()
        code = Code.BROKEN_PIPE
    click.get_current_context().exit(code)


# Arguments and options


def argument(
    name: str, metavar: str, about: str, *, required: bool = True, **attributes: Any
) -> Argument:
    """Declare a positional argument."""
    return Argument([name], metavar=metavar, about=about, required=required, **attributes)


def option(name: str, metavar: str | None, about: str, **attributes: Any) -> click.Option:
    """Declare an option with a value: text, unless `type` says otherwise."""
    return click.Option([name], metavar=metavar, help=about, **attributes)


def several(name: str, into: str, metavar: str, about: str, **attributes: Any) -> click.Option:
    """Declare an option that may be repeated; `into` names the list of values."""
    about = f"{about} Repeatable."
    return click.Option([name, into], metavar=metavar, help=about, multiple=True, **attributes)


def flag(name: str, about: str, into: str | None = None) -> click.Option:
    """Declare an option without a value."""
    names = [name] if into is None else [name, into]
    return click.Option(names, is_flag=True, help=about)


WHICH = "WHICH is latest, step=1000, best, best:METRIC, or the name of a folder, tag or label."
SOURCE = "ROOT, ROOT@WHICH, or a file or folder of another library."
PATH = click.Path(path_type=Path)

root = argument("root", "ROOT", "Folder or URL of a run.")
target = argument("target", "ROOT[@WHICH]", WHICH)
one = argument("target", "ROOT@WHICH", WHICH)
source = argument("source", "SOURCE", SOURCE)
components = several("--component", "components", "NAME", "Only this component.")
dry_run = flag("--dry-run", "Print the changes without making them.")
trust = flag(
    "--trust", "Remove the limits on memory and time. No code in the file runs either way."
)
