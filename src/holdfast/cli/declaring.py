"""Declarations of commands, arguments and options with click.

Their names and meanings are in `options` and `app`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

Parameter: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Decorator that gives a command an argument or an option."""


class Argument(click.Argument):
    """A positional argument with a help text, as options have.

    click has this only since 8.5, and under another heading.
    """

    def __init__(self, *names: Any, about: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.about = about


class Described(click.Command):
    """A command whose help describes its arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        arguments = [item for item in self.params if isinstance(item, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(item.human_readable_name, item.about) for item in arguments])
        super().format_options(ctx, formatter)


class Commands(click.Group):
    """A group of commands with described arguments, listed in the order of the source."""

    command_class = Described

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the source."""
        return [*self.commands]


def taking(*parameters: Parameter) -> Parameter:
    """Combine the declarations of a command's arguments and options, in the order of its help."""

    def take(command: Callable[..., Any]) -> Callable[..., Any]:
        for parameter in reversed(parameters):
            command = parameter(command)
        return command

    return take


def argument(name: str, metavar: str, about: str, **attributes: Any) -> Parameter:
    """Declare a required positional argument."""
    return click.argument(
        name, metavar=metavar, about=about, cls=Argument, required=True, **attributes
    )


def option(name: str, metavar: str, about: str, **attributes: Any) -> Parameter:
    """Declare an option with a value: text, unless `type` says otherwise."""
    return click.option(name, metavar=metavar, help=about, **attributes)


def several(name: str, into: str, metavar: str, about: str, **attributes: Any) -> Parameter:
    """Declare an option that may be repeated; `into` names the list of values."""
    about = f"{about} Repeatable."
    return click.option(name, into, metavar=metavar, help=about, multiple=True, **attributes)


def flag(name: str, about: str, into: str | None = None) -> Parameter:
    """Declare an option without a value."""
    names = (name,) if into is None else (name, into)
    return click.option(*names, is_flag=True, help=about)
