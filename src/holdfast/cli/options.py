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


_WHICH = "WHICH is latest, step=1000, best, a folder's name, a tag or a label."
_PATH = click.Path(path_type=Path)

# Of several commands

root = argument("root", "ROOT", "Where the run's checkpoints live.")
target = argument("target", "ROOT[@WHICH]", _WHICH)
one = argument("target", "ROOT@WHICH", _WHICH)
as_json = flag("--json", "Answer with one JSON object.", "as_json")
dry_run = flag("--dry-run", "Say what would be done; touch nothing.")

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
key_variables = several("--key-env", "key_variables", "NAME", "Environment variable with keys.")
key_commands = several("--key-command", "key_commands", "COMMAND", "Command that prints keys.")
accept_plain = flag("--accept-plain", "With a key, read checkpoints that are not encrypted, too.")
file_key = option(
    "--file-key",
    "PATH",
    "File with the key of a file that another library has encrypted (MindSpore).",
    type=_PATH,
)

patience = option(
    "--timeout",
    "TIME",
    "Give up an object store that has not answered for this long.",
    default="20s",
)

# keys

new_key_file = argument(
    "path", "PATH", "A file that is not there yet; only you may read it.", type=_PATH
)
pair = flag("--pair", "A private key, and beside it PATH.pub for those who only encrypt.")
to_files = several("--to-file", "to_files", "PATH", "File with the new keys.")
to_variables = several("--to-env", "to_variables", "NAME", "Variable with the new keys.")
to_commands = several("--to-command", "to_commands", "COMMAND", "Command that prints them.")
keep_old = flag("--keep-old", "Let the old keys decrypt them, too.")

# log

saves = flag("--saves", "List each save too: why it was made, and what became of it.")

# resume-plan

reads_all = flag("--verify", "Read candidates in full until one is whole.", "verify")

# show

tensors = flag("--tensors", "List every tensor too.")

# verify

seen = option("--seen", "TEXT", "Fail unless the latest is this commit or newer.")
stored_only = flag(
    "--stored-only", "Compare compressed blocks as they are stored; decompress none."
)

# gc, prune, tag

dead_epochs = several(
    "--dead-epoch",
    "dead_epochs",
    "N",
    "Declare writer N dead, such as when its host is gone for good.",
    type=click.IntRange(min=1),
)
damaged = option(
    "--damaged",
    "FOLDER",
    "Show a checkpoint with a damaged or lost manifest; with --yes, delete it.",
    show_default=False,
)
yes = flag("--yes", "With --damaged: delete it.")
keep = option("--keep", "RULE", "Such as last:3,best:loss:min:2.", required=True)
new_tags = argument("tags", "TAG...", "Names to add.", nargs=-1)

# forecast

num_saves = option(
    "--saves",
    "N",
    "How many saves to look ahead.",
    type=click.IntRange(min=1, max=1000),
    default=10,
)
other_rule = option("--keep", "RULE", "The rule. [default: the one that the run records]")

# schema

answering = argument("command", "COMMAND...", "A command, such as `ls` or `keys list`.", nargs=-1)

# import, export

imported = argument("source", "SOURCE", "A file or folder of another library, or ROOT@WHICH.")
step = option(
    "--step",
    "N",
    "Step of the checkpoint. [default: that of the source]",
    type=click.IntRange(min=0),
)
label = option("--label", "TEXT", "The label. [default: from the step]")
rules = several(
    "--map", "rules", "OLD=NEW", "Rename tensors by patterns; or a file with one such rule a line."
)
optimizer = option(
    "--optimizer", "CLASS", "Class of the optimizer, such as AdamW, where the source does not tell."
)
parameters = option(
    "--parameters", "FILE", "Names of the model's parameters in order, one a line.", type=_PATH
)
unsafe_pickle = flag(
    "--unsafe-pickle", "DCP: also values that can only be pickled. Loading them runs code."
)
allow_loss = flag(
    "--allow-loss", "Skip tensors that cannot be read or named, which are an error otherwise."
)
trust = flag("--trust", "Lift the limits on memory and time; still runs nothing in the file.")
exported = argument("target", "ROOT[@WHICH]", f"{_WHICH} Also a file or folder of another library.")
new_output = argument("output", "OUT", "A file or folder that does not exist yet.")
to = click.option(
    "--to",
    type=click.Choice(["hf", "safetensors", "pt", "dcp"]),
    required=True,
    help="Format that is written.",
)
configs = several(
    "--config",
    "configs",
    "PATH",
    "Copy this file, or the files of this folder, beside the weights.",
    type=_PATH,
)
dtype = click.option(
    "--dtype",
    type=click.Choice(["f32", "f16", "bf16"]),
    help="Cast the floats of the model to this type.",
)
shard_size = option(
    "--shard-size", "SIZE", "Split the weights into files of at most this size, such as 5GB."
)

# save

save_tags = several("--tag", "tags", "TAG", "A name for the checkpoint.")
reason = option(
    "--reason", "TEXT", "Why; recorded in the checkpoint.", default="", show_default=False
)
timeout = option(
    "--timeout", "TIME", "How long to wait before the request is withdrawn.", default="10min"
)

# advise

failures_per_day = option(
    "--failures-per-day",
    "X",
    "Failures per day. Learnt from the run if unset.",
    type=float,
)
mtbf = option("--mtbf", "TIME", "The same as a mean time between failures, such as 6h.")
overhead_cap = option(
    "--overhead-cap", "SHARE", "Share of the time that saving may take. [default: 5%]"
)
stall = option("--stall", "TIME", "How long a save stops training, in place of the measured time.")
background = option(
    "--background", "TIME", "How much longer the writing of a save delays training. [default: 0s]"
)
commit = option(
    "--commit", "TIME", "From the end of the stall to the commit. [default: measured, or 0s]"
)
restart = option("--restart", "TIME", "From a failure to the first new step. [default: 2min]")

# plot

output = click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write FILE.svg, FILE.html or FILE.png; without it, text.",
    type=_PATH,
)
metrics = several("--metric", "metrics", "NAME", "Draw this metric in place of the usual ones.")
log = option(
    "--log",
    "PATH",
    "The log, where it is not in the root.",
    type=_PATH,
)

# cp, rm, thin, untag, scrub, watch, doctor, completion

sources = argument(
    "sources", "ROOT@WHICH...", "The checkpoints; with --all, their roots.", nargs=-1
)
copy_to = argument("to", "ROOT", "The root to copy to; it need not exist.")
all_of_root = flag("--all", "Copy all checkpoints of each root.", "whole")
drop = several("--drop", "components", "COMPONENT", "What to drop, such as optimizer.")
why_removed = option(
    "--reason",
    "TEXT",
    "Why; recorded with the deletion. On a terminal, rm asks for it.",
    default="",
    show_default=False,
)
even_pinned = flag("--even-pinned", "Delete also what is pinned or tagged.")
even_latest = flag("--even-latest", "Delete also the checkpoint that the run would go on from.")
sure = flag("--yes", "Do not ask; for scripts.")
old_tags = argument("tags", "TAG...", "Names to remove.", nargs=-1)
rate = option(
    "--rate", "SIZE", "Read at most this much a second, such as 50MB. [default: no limit]"
)
place = click.option(
    "--resume",
    "place",
    metavar="FILE",
    help="Record the progress in this file, and go on from it.",
    type=_PATH,
)
every = option("--every", "TIME", "How often to look. [default: 2s; 10s at an object store]")
as_json_changes = flag("--json", "A line of JSON at each change.", "as_json")
once = flag("--once", "Show the state of now, and end.")
roots = argument("roots", "ROOT...", "The runs to show.", nargs=-1)
port = option(
    "--port",
    "N",
    "Listen on this port of 127.0.0.1. [default: 8770, or a free one]",
    type=click.IntRange(min=0, max=65535),
)
path_prefix = option(
    "--path-prefix", "PATH", "Serve below this path, for a proxy.", default="", show_default=False
)
allow_hosts = several(
    "--allow-host", "allow_hosts", "NAME", "Also answer to this name, of a proxy."
)
opening = click.option(
    "--open/--no-open",
    "is_opening",
    default=False,
    help="Open the page in a browser. Others on this machine may then see its URL.",
)
as_json_line = flag("--json", "A line of JSON once it listens.", "as_json")
doctor_root = click.argument(
    "root", metavar="[ROOT]", required=False, cls=Argument, about="A root, which need not exist."
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
    "name", "NAME", "COMPONENT:PATH, such as model:h.0.weight; PATH if there is one component."
)
rows = click.option(
    "--slice", "rows", metavar="ROWS", help="Rows of the first dimension: 5, 0:2, :2, 2:."
)
depth = option("--depth", "N", "Levels to show below a component.", type=click.IntRange(min=0))
components = several("--component", "components", "NAME", "Only this component.")
only_tensors = several("--tensor", "tensors", "NAME", "Only this tensor: COMPONENT:PATH.")
fail_above = option(
    "--fail-above", "X", "Tensors that differ by at most X count as equal.", type=float
)
ignored = several(
    "--ignore", "ignored", "PATTERN", "Leave out what it names, such as rng or '**.eval_runtime'."
)
exponents_plot = option("--plot", "FILE", "Draw the exponents as FILE.png or FILE.svg.", type=_PATH)


# run

command = argument("command", "COMMAND...", "What to run, with its arguments.", nargs=-1)
progress_root = option("--root", "ROOT", "Judge progress by the checkpoints in this root.")
max_failures = option(
    "--max-failures",
    "N",
    "Give up after N lives in a row without progress.",
    type=click.IntRange(min=1),
    default=5,
)
backoff = option("--backoff", "TIME", "First pause before a restart; it doubles.", default="1s")
backoff_max = option("--backoff-max", "TIME", "The longest pause.", default="60s")
progress_after = option(
    "--progress-after",
    "TIME",
    "Without --root: a life of this length made progress. [default: 10min]",
)
requeue_code = option(
    "--requeue-code",
    "N",
    "Exit status that is passed on and causes no restart.",
    type=click.IntRange(min=1, max=255),
    default=75,
)
grace = option("--grace", "TIME", "How long after a signal the command is killed.", default="5min")
restarts = (
    *(progress_root, max_failures, backoff, backoff_max),
    *(progress_after, requeue_code, grace),
)
"""Options of `run` and `train`, those of `cli.run.Restarts`."""
as_json_lines = flag("--json", "A line of JSON after each life and at the end.", "as_json")

# train

script = argument(
    "script",
    "SCRIPT:FUNCTION",
    "File or module, and what makes the Trainer: train.py:make_trainer.",
)
until = option("--until", "GOAL", "The goal of the run: 10_000step, 2ep.", required=True)
sets = several(
    "--set", "sets", "NAME=VALUE", "Set an argument of the function, converted to its type."
)
max_time = option("--max-time", "TIME", "End after this time, with the code for a requeue.")

# demo

out = option(
    "--out",
    "FOLDER",
    "A new folder to work in.",
    type=_PATH,
    default=Path("demo-output"),
)
seed = option("--seed", "N", "Repeat an earlier demo. Drawn if unset.", type=click.IntRange(min=0))
fast = flag("--fast", "Use a tiny model, for a first look.")
