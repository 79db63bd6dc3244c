"""Arguments and options of the command line: names, types and help texts.

The functions and click classes that declare them, and groups of commands, come first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import click

Parameter: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Decorator that adds an argument or an option to a command."""


class Argument(click.Argument):
    """A positional argument with a help text, as options have.

    click has this only since 8.5, and under another heading.
    """

    def __init__(self, *names: Any, about: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.about = about


class DescribedCommand(click.Command):
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

    command_class = DescribedCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the source."""
        return [*self.commands]


def taking(*parameters: Parameter) -> Parameter:
    """Decorator that adds several arguments and options to a command, in the order of its help."""

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


_WHICH = "WHICH is latest, step=1000, best, best:METRIC, or the name of a folder, tag or label."
_PATH = click.Path(path_type=Path)

# Of several commands

root = argument("root", "ROOT", "Folder or URL of a run.")
target = argument("target", "ROOT[@WHICH]", _WHICH)
one = argument("target", "ROOT@WHICH", _WHICH)
as_json = flag("--json", "Print one JSON object.", "as_json")
dry_run = flag("--dry-run", "Print the changes without making them.")

# Before the command

key_files = several(
    "--key-file",
    "key_files",
    "PATH",
    "File with keys that decrypt checkpoints.",
    type=_PATH,  # As text a path with a space in the variable would be two.
    envvar="HOLDFAST_KEY_FILE",
    show_envvar=True,
)
key_variables = several(
    "--key-env", "key_variables", "NAME", "Environment variable that holds keys."
)
key_commands = several("--key-command", "key_commands", "COMMAND", "Command that prints keys.")
accept_plain = flag("--accept-plain", "With a key, also read checkpoints that are not encrypted.")
file_key = option(
    "--file-key",
    "PATH",
    "File with the key of an encrypted MindSpore file.",
    type=_PATH,
)

patience = option(
    "--timeout",
    "TIME",
    "Give up if an object store does not answer for this long.",
    default="20s",
)

# keys

new_key_file = argument("path", "PATH", "A new file, which only you can read.", type=_PATH)
pair = flag("--pair", "Write a key pair; PATH.pub is the public key, which only encrypts.")
to_files = several("--to-file", "to_files", "PATH", "File with the new keys.")
to_variables = several(
    "--to-env", "to_variables", "NAME", "Environment variable that holds the new keys."
)
to_commands = several("--to-command", "to_commands", "COMMAND", "Command that prints the new keys.")
keep_old = flag("--keep-old", "Keep the old keys valid.")

# log

saves = flag("--saves", "Also list each save: its reason, its cost, and whether it still exists.")

# resume-plan

reads_all = flag("--verify", "Read candidates in full until one is intact.", "verify")

# show

tensors = flag("--tensors", "List all tensors with type, shape, size and file.")

# verify

seen = option(
    "--seen", "TEXT", "Fail if the latest checkpoint is older than this commit (Checkpoint.seen)."
)
stored_only = flag(
    "--stored-only", "Do not decompress; check the stored bytes only, which is faster."
)

# gc, prune, tag

dead_epochs = several(
    "--dead-epoch",
    "dead_epochs",
    "N",
    "Treat writer N as dead, for example if its host is gone.",
    type=click.IntRange(min=1),
)
damaged = option(
    "--damaged",
    "FOLDER",
    "Show a checkpoint with a damaged or lost manifest; with --yes, delete it.",
    show_default=False,
)
yes = flag("--yes", "With --damaged: delete it.")
keep = option("--keep", "RULE", "Retention rule, such as last:3,best:loss:min:2.", required=True)
new_tags = argument("tags", "TAG...", "Tags to add.", nargs=-1)

# forecast

num_saves = option(
    "--saves",
    "N",
    "Number of saves to look ahead.",
    type=click.IntRange(min=1, max=1000),
    default=10,
)
other_rule = option("--keep", "RULE", "Retention rule. [default: the rule recorded by the run]")

# schema

answering = argument("command", "COMMAND...", "A command, such as ls or keys list.", nargs=-1)

# import, export

imported = argument("source", "SOURCE", "A file or folder of another library, or ROOT@WHICH.")
step = option(
    "--step",
    "N",
    "Step of the new checkpoint. [default: the step in the source]",
    type=click.IntRange(min=0),
)
label = option("--label", "TEXT", "Label of the new checkpoint. [default: from the step]")
rules = several(
    "--map", "rules", "OLD=NEW", "Rename tensors by patterns; or a file with one rule per line."
)
optimizer = option(
    "--optimizer",
    "CLASS",
    "Class of the optimizer, such as AdamW, if the source does not record it.",
)
parameters = option(
    "--parameters",
    "FILE",
    "File with the names of the model's parameters in order, one per line.",
    type=_PATH,
)
unsafe_pickle = flag(
    "--unsafe-pickle", "For DCP: allow values that can only be pickled. Loading them runs code."
)
allow_loss = flag("--allow-loss", "Skip tensors that cannot be read or named, instead of failing.")
trust = flag(
    "--trust", "Remove the limits on memory and time. No code in the file runs either way."
)
exported = argument("target", "ROOT[@WHICH]", f"{_WHICH} Also a file or folder of another library.")
new_output = argument("output", "OUT", "A new file or folder.")
to = click.option(
    "--to",
    type=click.Choice(["hf", "safetensors", "pt", "dcp"]),
    required=True,
    help="Format to write.",
)
configs = several(
    "--config",
    "configs",
    "PATH",
    "Also copy this file, or the files in this folder.",
    type=_PATH,
)
dtype = click.option(
    "--dtype",
    type=click.Choice(["f32", "f16", "bf16"]),
    help="Cast floating-point tensors of the model to this type.",
)
shard_size = option(
    "--shard-size", "SIZE", "Split the weights into files of at most this size, such as 5GB."
)

# save

save_tags = several("--tag", "tags", "TAG", "Tag for the checkpoint; tagged checkpoints are kept.")
reason = option(
    "--reason", "TEXT", "Reason to record in the checkpoint.", default="", show_default=False
)
timeout = option("--timeout", "TIME", "Withdraw the request after this time.", default="10min")

# advise

mtbf = option(
    "--mtbf", "TIME", "Mean time between failures, such as 6h. [default: estimated from the run]"
)
overhead = option(
    "--overhead", "SHARE", "Share of the time that saves may take.", type=float, default=0.05
)

# plot

output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Draw a .png, .svg or .pdf file. Without it, list the curves.",
    type=_PATH,
)
metrics = several("--metric", "metrics", "NAME", "Draw this metric instead of the usual ones.")
log = option(
    "--log",
    "PATH",
    "Log of the Trainer. [default: ROOT/log/train.jsonl]",
    type=_PATH,
)

# cp, rm, thin, untag, scrub, watch, doctor, completion

sources = argument("sources", "ROOT@WHICH...", "Checkpoints; with --all, roots.", nargs=-1)
copy_to = argument("to", "ROOT", "The root to copy to; it need not exist.")
all_of_root = flag("--all", "Copy all checkpoints of each root.", "whole")
drop = several(
    "--drop", "components", "COMPONENT", "Component to drop, such as optimizer.", required=True
)
why_removed = option(
    "--reason",
    "TEXT",
    "Reason to record for `holdfast log`. On a terminal, rm asks for it.",
    default="",
    show_default=False,
)
even_pinned = flag("--even-pinned", "Allow deleting a pinned or tagged checkpoint.")
even_latest = flag(
    "--even-latest", "Allow deleting the checkpoint from which the run would resume."
)
sure = flag("--yes", "Do not ask for confirmation.")
old_tags = argument("tags", "TAG...", "Tags to remove.", nargs=-1)
rate = option(
    "--rate", "SIZE", "Read at most this much per second, such as 50MB. [default: no limit]"
)
place = click.option(
    "--resume",
    "place",
    metavar="FILE",
    help="Keep the progress in this file, and continue from there.",
    type=_PATH,
)
every = option("--every", "TIME", "Time between updates. [default: 2s; 10s for an object store]")
as_json_changes = flag("--json", "Print a JSON object at each change.", "as_json")
once = flag("--once", "Show the current state and exit.")
roots = argument("roots", "ROOT...", "Folders or URLs of runs.", nargs=-1)
port = option(
    "--port",
    "N",
    "Port on 127.0.0.1. [default: 8770, or a free port]",
    type=click.IntRange(min=0, max=65535),
)
path_prefix = option(
    "--path-prefix", "PATH", "Path prefix under a proxy.", default="", show_default=False
)
allow_hosts = several(
    "--allow-host", "allow_hosts", "NAME", "Also accept this host name, for a proxy."
)
opening = click.option(
    "--open/--no-open",
    "is_opening",
    default=False,
    help="Open a browser. Other local users may then see the URL.",
)
as_json_line = flag("--json", "Print a JSON object when the server is ready.", "as_json")
doctor_root = click.argument(
    "root",
    metavar="[ROOT]",
    required=False,
    cls=Argument,
    about="Folder or URL of a run, which need not exist.",
)
shell = click.argument(
    "shell",
    metavar="SHELL",
    type=click.Choice(["bash", "zsh", "fish"]),
    cls=Argument,
    about="bash, zsh or fish.",
)
# tree, cat, diff, stats

_SOURCE = "ROOT, ROOT@WHICH, or a file or folder of another library."
source = argument("source", "SOURCE", _SOURCE)
first = argument("a", "A", _SOURCE)
second = argument("b", "B", _SOURCE)
tensor_name = argument(
    "name",
    "NAME",
    "COMPONENT:PATH, such as model:h.0.weight, or PATH if there is only one component.",
)
rows = click.option(
    "--slice", "rows", metavar="ROWS", help="Rows of the first dimension: 5, 0:2, :2, 2:."
)
depth = option("--depth", "N", "Levels to show below each component.", type=click.IntRange(min=0))
components = several("--component", "components", "NAME", "Only this component.")
only_tensors = several("--tensor", "tensors", "NAME", "Only this tensor: COMPONENT:PATH.")
fail_above = option(
    "--fail-above", "X", "Tensors that differ by at most X count as equal.", type=float
)
ignored = several(
    "--ignore", "ignored", "PATTERN", "Ignore values that match, such as rng or '**.eval_runtime'."
)
exponents_plot = option("--plot", "FILE", "Draw the histograms (.png, .svg or .pdf).", type=_PATH)


# run

command = argument("command", "COMMAND...", "The program to run, with its arguments.", nargs=-1)
progress_root = option("--root", "ROOT", "Run whose new checkpoints count as progress.")
max_failures = option(
    "--max-failures",
    "N",
    "Give up after N restarts in a row without progress.",
    type=click.IntRange(min=1),
    default=5,
)
backoff = option(
    "--backoff", "TIME", "First pause before a restart; it doubles each time.", default="1s"
)
backoff_max = option("--backoff-max", "TIME", "Longest pause.", default="60s")
progress_after = option(
    "--progress-after",
    "TIME",
    "Without --root, running this long counts as progress. [default: 10min]",
)
requeue_code = option(
    "--requeue-code",
    "N",
    "Exit code that ends the command without a restart.",
    type=click.IntRange(min=1, max=255),
    default=75,
)
grace = option("--grace", "TIME", "Kill the training this long after a signal.", default="5min")
restarts = (
    *(progress_root, max_failures, backoff, backoff_max),
    *(progress_after, requeue_code, grace),
)
"""Options of `run`, those of `cli.run.Restarts`."""
as_json_lines = flag("--json", "Print a JSON object after each session and at the end.", "as_json")
