"""The command line: its entry point, the options before a command, and the list of commands."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from holdfast.cli.options import (
    DECLARED,
    NAMED,
    PATH,
    PATIENCE,
    Commands,
    KeySources,
    flag,
    option,
    several,
)
from holdfast.cli.output import Code, discard_output, give_error, unwritten
from holdfast.errors import UsageError
from holdfast.version import __version__


def run_command_line() -> NoReturn:
    """Run the command line of this process and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&- in a shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
    try:
        code = _run_command()
    except BrokenPipeError:
        discard_output()
        code = Code.BROKEN_PIPE
    sys.exit(code)


def _run_command() -> int:
    try:
        return int(app.main(prog_name="holdfast", standalone_mode=False) or 0)
    except SystemExit as end:
        if not end.code:
            raise
        # click exits by itself, with an error, only if the reader of its help went away (and
        # after a completion, with 0).
        raise BrokenPipeError from end
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        return unwritten(error)  # help, which click writes
    except click.Abort as abort:
        if isinstance(abort.__cause__, EOFError):
            raise  # a fault of ours; at a question click aborts without a cause, also at Ctrl-D
        return Code.INTERRUPTED
    except click.ClickException as error:
        if _asks_for_json():
            give_error(UsageError(error.format_message()), as_json=True)
        else:
            error.show()
        return error.exit_code


def _asks_for_json() -> bool:
    """Whether the command line has --json, for one that click could not read."""
    arguments = sys.argv[1:]
    return "--json" in arguments[: arguments.index("--") if "--" in arguments else None]


SECTIONS = {
    "Look at a run": {
        "ls": ("ls", "List the checkpoints of a root, newest first."),
        "log": ("log", "List the sessions of a run, oldest first."),
        "show": ("show", "Show the manifest of one checkpoint."),
        "du": ("du", "Show the disk usage of a root, by checkpoint and component."),
        "watch": ("watch", "Show the state of a run as it changes."),
        "plot": ("plot", "Draw loss, learning rate and throughput over steps."),
        "serve": ("web.serve", "Show runs in the browser, on 127.0.0.1, until Ctrl-C."),
        "uploads": ("uploads", "Show which checkpoints are uploaded, waiting or failed."),
        "resume-plan": ("resume_plan", "Show which checkpoint a resume would use, and why."),
    },
    "Look into checkpoints": {
        "tree": ("tree", "Show the structure of a checkpoint or a file."),
        "cat": ("tree", "Print a tensor, some of its rows, or a plain value."),
        "diff": ("diff", "Compare two checkpoints or files."),
        "stats": ("stats", "Compute statistics of each tensor, such as norm and mean."),
    },
    "Prove and check": {
        "prove": ("prove", "Run a training undisturbed and with kills, and compare both."),
        "verify": ("verify", "Read every byte and compare it with its digest."),
        "scrub": ("verify", "Verify a whole root at a limited rate, in parts."),
        "doctor": ("doctor", "Check this machine, and whether a run could save into a root."),
    },
    "Keep and delete": {
        "pin": ("pin", "Protect a checkpoint from deletion by retention rules."),
        "unpin": ("pin", "Remove the pin of a checkpoint."),
        "tag": ("pin", "Add tags to a checkpoint."),
        "untag": ("pin", "Remove tags from a checkpoint."),
        "forecast": ("prune", "List the deletions at the next saves, with reasons."),
        "prune": ("prune", "Delete the checkpoints that a retention rule does not keep."),
        "thin": ("rm", "Delete components of a checkpoint, such as the optimizer."),
        "rm": ("rm", "Delete one checkpoint, and record the reason."),
        "gc": ("gc", "Remove unfinished saves and leftovers of deletions."),
    },
    "Copy and convert": {
        "cp": ("cp", "Copy checkpoints to another root, in any store."),
        "import": ("convert", "Save a file or folder of another library as a new checkpoint."),
        "export": ("convert", "Write a checkpoint in the format of another library."),
    },
    "Train": {
        "run": ("run", "Run a training, and restart it when it crashes."),
        "save": ("save", "Ask a running training for a checkpoint, and wait for it."),
        "advise": ("advise", "Recommend how often to save."),
        "evaluate": ("evaluate", "Run a command on each checkpoint that lacks a metric."),
        "metric": ("pin", "Add metrics to a checkpoint after its save."),
    },
    "Keys and scripts": {
        "keys": ("keys", "Generate, list and replace the keys of encrypted checkpoints."),
        "schema": ("schema", "Print the JSON Schema of a command's --json output."),
        "completion": ("schema", "Print the completion script for a shell."),
    },
}
"""Section of `--help` → its commands → the module of `holdfast.cli` that declares each, and the
first line of its help.

`--help` prints these lines and imports none of the modules.
"""

MODULES = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class LazyCommands(Commands):
    """The commands of `SECTIONS`; the module of a command is imported when the command is run."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command to run, and import its module."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if found is None else load_command(found.name or ""), rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section, all first lines in one column."""
        width = max(map(len, MODULES))
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), line) for name, (_, line) in section.items()]
                )


def load_command(name: str) -> click.Command:
    """Import the module of a command, and return the command that it declares."""
    import_module(f"holdfast.cli.{MODULES[name][0]}")
    return DECLARED.commands[name]


@click.group(
    cls=LazyCommands,
    commands=[click.Command(name, help=summary) for name, (_, summary) in MODULES.items()],
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    params=[
        several(
            "--key-file",
            "key_files",
            "PATH",
            "File with keys that decrypt checkpoints.",
            type=PATH,  # As text a path with a space in the variable would be two.
            envvar="HOLDFAST_KEY_FILE",
            show_envvar=True,
        ),
        several("--key-env", "key_variables", "NAME", "Environment variable that holds keys."),
        several("--key-command", "key_commands", "COMMAND", "Command that prints keys."),
        flag("--accept-plain", "With a key, also read checkpoints that are not encrypted."),
        option(
            "--file-key", "PATH", "File with the key of an encrypted MindSpore file.", type=PATH
        ),
        option(
            "--timeout",
            "TIME",
            "Give up if an object store does not answer for this long.",
            default="20s",
        ),
    ],
)
@click.version_option(
    __version__, message="holdfast %(version)s", help="Print the version and exit."
)
def app(
    key_files: Sequence[Path],
    key_variables: Sequence[str],
    key_commands: Sequence[str],
    accept_plain: bool,
    file_key: Path | None,
    timeout: str,
) -> None:
    """Show, compare, convert, verify and manage checkpoints of training runs."""
    PATIENCE.set(timeout)
    NAMED.set(
        KeySources(
            files=[*map(str, key_files)],
            variables=key_variables,
            commands=key_commands,
            accepts_plain=accept_plain,
            file_key=file_key,
        )
    )
