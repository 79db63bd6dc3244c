"""How commands, arguments and options are declared: with click.

What each of them is called and means is in `options` and `app`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Argument(click.Argument):
    """A positional argument that says what it is for, as options do.

    click knows of that since 8.5 only, and under another heading.
    """

    def __init__(self, *names: Any, about: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.about = about


class Described(click.Command):
    """A command whose help says what its arguments are for."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        arguments = [item for item in self.params if isinstance(item, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl([(item.human_readable_name, item.about) for item in arguments])
        super().format_options(ctx, formatter)


class Commands(click.Group):
    """A group of such commands, listed in the order in which they are written."""

    command_class = Described

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return [*self.commands]


def argument(name: str, metavar: str, about: str, **attributes: Any) -> Callable[[F], F]:
    """One that must be there."""
    return click.argument(
        name, metavar=metavar, about=about, cls=Argument, required=True, **attributes
    )


def option(name: str, metavar: str, about: str, **attributes: Any) -> Callable[[F], F]:
    """An option with a value: text, unless `type` says otherwise."""
    return click.option(name, metavar=metavar, help=about, **attributes)


def several(name: str, into: str, metavar: str, about: str, **attributes: Any) -> Callable[[F], F]:
    """An option that may be given again and again; `into` names the values."""
    about = f"{about} Repeatable."
    return click.option(name, into, metavar=metavar, help=about, multiple=True, **attributes)


def flag(name: str, about: str, into: str | None = None) -> Callable[[F], F]:
    """An option without a value."""
    names = (name,) if into is None else (name, into)
    return click.option(*names, is_flag=True, help=about)
