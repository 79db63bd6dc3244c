"""Arguments and options of the commands: what each is called, takes and is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WHICH = "WHICH is latest, step=1000, a folder's name, a tag or a label."


def _time(help_: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="TIME", help=help_)
    return option


# Of several commands

Root = Annotated[str, typer.Argument(metavar="ROOT", help="Where the run's checkpoints live.")]
Target = Annotated[str, typer.Argument(metavar="ROOT[@WHICH]", help=_WHICH)]
One = Annotated[str, typer.Argument(metavar="ROOT@WHICH", help=_WHICH)]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; touch nothing.")]

# Before the command

KeyFiles = Annotated[
    # As text a path with a space in the variable would be two.
    list[Path] | None,
    typer.Option(
        "--key-file",
        metavar="PATH",
        envvar="HOLDFAST_KEY_FILE",
        help="File with keys that open sealed checkpoints. Repeatable.",
    ),
]
KeyVariables = Annotated[
    list[str] | None,
    typer.Option("--key-env", metavar="NAME", help="Environment variable with keys. Repeatable."),
]
KeyCommands = Annotated[
    list[str] | None,
    typer.Option("--key-command", metavar="COMMAND", help="Command that prints keys. Repeatable."),
]
AcceptPlain = Annotated[
    bool,
    typer.Option("--accept-plain", help="With a key, read checkpoints that are not sealed too."),
]

# keys

NewKeyFile = Annotated[
    Path, typer.Argument(metavar="PATH", help="A file that is not there yet; only you may read it.")
]
Pair = Annotated[
    bool,
    typer.Option("--pair", help="A private key, and beside it PATH.pub for those who only seal."),
]
ToFiles = Annotated[
    list[str] | None,
    typer.Option("--to-file", metavar="PATH", help="File with the new keys. Repeatable."),
]
ToVariables = Annotated[
    list[str] | None,
    typer.Option("--to-env", metavar="NAME", help="Variable with the new keys. Repeatable."),
]
ToCommands = Annotated[
    list[str] | None,
    typer.Option("--to-command", metavar="COMMAND", help="Command that prints them. Repeatable."),
]
KeepOld = Annotated[bool, typer.Option("--keep-old", help="Let the keys before open them too.")]

# show

Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor too.")]

# verify

SeenCommit = Annotated[
    str | None,
    typer.Option("--seen", metavar="TEXT", help="Fail unless the latest is this commit or newer."),
]
StoredOnly = Annotated[
    bool,
    typer.Option("--stored-only", help="Compare compressed blocks as they lie there; decode none."),
]

# gc, prune, tag

DeadEpochs = Annotated[
    list[int] | None,
    typer.Option(
        "--dead-epoch",
        min=1,
        metavar="N",
        help="Writer N is gone for good (its host is, say). Repeatable.",
    ),
]
Keep = Annotated[
    str, typer.Option("--keep", metavar="RULE", help="Such as last:3,best:loss:min:2.")
]
NewTags = Annotated[list[str], typer.Argument(metavar="TAG...", help="Names to add.")]

# save

SaveTags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="A name for the checkpoint. Repeatable."),
]
Reason = Annotated[
    str, typer.Option(metavar="TEXT", help="Why; recorded in the checkpoint.", show_default=False)
]
Timeout = Annotated[str, _time("How long to wait before the request is withdrawn.")]

# advise

FailuresPerDay = Annotated[
    float | None,
    typer.Option(metavar="X", help="How often training fails. Learnt from the run if unset."),
]
OverheadCap = Annotated[
    str | None, typer.Option(metavar="SHARE", help="What saving may take: 5% if unset.")
]
Mtbf = Annotated[str | None, _time("The same as a time between failures: 6h.")]
Stall = Annotated[str | None, _time("How long a save stops training, instead of measured.")]
Background = Annotated[str | None, _time("How much its writing delays training more: 0s.")]
Commit = Annotated[str | None, _time("How long until it is committed: 0s.")]
Restart = Annotated[str | None, _time("From a failure to the first new step: 2min.")]

# run

Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND...", help="What to run, with its arguments.")
]
ProgressRoot = Annotated[
    str | None,
    typer.Option("--root", metavar="ROOT", help="Judge progress by the checkpoints there."),
]
MaxFailures = Annotated[
    int, typer.Option(min=1, metavar="N", help="Give up after N lives in a row without progress.")
]
Backoff = Annotated[str, _time("First pause before a restart; it doubles.")]
BackoffMax = Annotated[str, _time("The longest pause.")]
ProgressAfter = Annotated[
    str | None, _time("Without --root: a life so long made progress. [default: 10min]")
]
RequeueCode = Annotated[
    int,
    typer.Option(min=1, max=255, metavar="N", help="A status that is passed on, not retried."),
]
Grace = Annotated[str, _time("How long after a signal the command is killed.")]
AsJsonLines = Annotated[
    bool, typer.Option("--json", help="A line of JSON after each life and at the end.")
]

# demo

Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Where to work; an earlier demo there goes.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Repeat an earlier demo. Drawn if unset.")
]
Fast = Annotated[bool, typer.Option("--fast", help="A tiny model, for a first look.")]
