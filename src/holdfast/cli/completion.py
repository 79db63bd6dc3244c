"""`holdfast completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
import msgspec
from click.shell_completion import get_completion_class

from holdfast.cli.app import app
from holdfast.cli.options import argument, command
from holdfast.cli.output import Answer

_NAME, _VARIABLE = "holdfast", "_HOLDFAST_COMPLETE"


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast completion`."""

    shell: str
    """`bash`, `zsh` or `fish`."""
    script: str
    """What the shell has to run, such as `eval "$(holdfast completion bash)"` in its start-up
    file."""


@command(
    "completion",
    argument("shell", "SHELL", "bash, zsh or fish.", type=click.Choice(["bash", "zsh", "fish"])),
    answer=CompletionAnswer,
)
def write_completion(shell: str) -> Answer:
    """Print the completion script for a shell.

    For bash, add to ~/.bashrc: eval "$(holdfast completion bash)"
    """
    found = get_completion_class(shell)
    assert found is not None, "the option allows the shells that click knows"
    completion = found(app, {}, _NAME, _VARIABLE)
    # Not `source()`, which runs bash to look at its version.
    text = completion.source_template % completion.source_vars()
    return Answer(document=CompletionAnswer(shell=shell, script=text), parts=[text])
