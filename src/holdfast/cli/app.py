"""The commands, their options and their exit codes. Each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.cli.output import Answer, Code, give, give_error
from holdfast.errors import HoldfastError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look after the checkpoints of training runs.",
)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="Where the run's checkpoints live.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="ROOT[@WHICH]",
        help="WHICH is latest, step=1000, a folder's name, a tag or a label.",
    ),
]
One = Annotated[
    str,
    typer.Argument(
        metavar="ROOT@WHICH",
        help="WHICH is latest, step=1000, a folder's name, a tag or a label.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]


def run() -> NoReturn:
    """Run the command line of this process and exit."""
    try:
        app(prog_name="holdfast")
    except KeyboardInterrupt:
        sys.exit(Code.INTERRUPTED)
    raise AssertionError("typer exits by itself")


def _show_version(wanted: bool) -> None:
    if wanted:
        import holdfast

        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Look after the checkpoints of training runs."""


@app.command()
def ls(root: Root, as_json: AsJson = False) -> None:
    """List the checkpoints of a root, newest first."""

    def answer() -> Answer:
        from holdfast.cli.ls import list_root

        return list_root(root)

    _finish(answer, as_json=as_json)


@app.command()
def show(
    target: Target,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what one checkpoint holds; without @WHICH the latest."""

    def answer() -> Answer:
        from holdfast.cli.show import show as look

        return look(target, tensors=tensors)

    _finish(answer, as_json=as_json)


@app.command()
def verify(target: Target, as_json: AsJson = False) -> None:
    """Read every byte again and compare; without @WHICH all checkpoints of the root."""

    def answer() -> Answer:
        from holdfast.cli.verify import check

        return check(target)

    _finish(answer, as_json=as_json)


@app.command()
def gc(
    root: Root,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; touch nothing.")
    ] = False,
    dead_epoch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="Writer N is gone for good (its host is, say). Repeatable."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove attempts that never became checkpoints, and leftovers of deleted ones."""

    def answer() -> Answer:
        from holdfast.cli.gc import clean

        return clean(root, dry_run=dry_run, dead_epochs=dead_epoch or ())

    _finish(answer, as_json=as_json)


@app.command()
def prune(
    root: Root,
    keep: Annotated[
        str, typer.Option("--keep", metavar="RULE", help="Such as last:3,best:loss:min:2.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; touch nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the checkpoints that a rule does not keep; say of each what and why."""

    def answer() -> Answer:
        from holdfast.cli.prune import clean

        return clean(root, keep=keep, dry_run=dry_run)

    _finish(answer, as_json=as_json)


@app.command()
def pin(target: One, as_json: AsJson = False) -> None:
    """Keep a checkpoint whatever any rule says."""

    def answer() -> Answer:
        from holdfast.cli.pin import pin as set_pin

        return set_pin(target, pinned=True)

    _finish(answer, as_json=as_json)


@app.command()
def unpin(target: One, as_json: AsJson = False) -> None:
    """Let the rules decide about a checkpoint again."""

    def answer() -> Answer:
        from holdfast.cli.pin import pin as set_pin

        return set_pin(target, pinned=False)

    _finish(answer, as_json=as_json)


@app.command()
def tag(
    target: One,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Names to add.")],
    as_json: AsJson = False,
) -> None:
    """Give a checkpoint more names; a tagged one is kept."""

    def answer() -> Answer:
        from holdfast.cli.pin import tag as add_tags

        return add_tags(target, tags)

    _finish(answer, as_json=as_json)


@app.command()
def advise(
    root: Root,
    failures_per_day: Annotated[
        float | None,
        typer.Option(metavar="X", help="How often training fails. Learnt from the run if unset."),
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="The same as a time between failures: 6h.")
    ] = None,
    overhead_cap: Annotated[
        str | None, typer.Option(metavar="SHARE", help="What saving may take: 5% if unset.")
    ] = None,
    stall: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long a save stops training, instead of measured."),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How much its writing delays training more: 0s."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long until it is committed: 0s.")
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="From a failure to the first new step: 2min."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how often to save, from what the run recorded, with the numbers."""

    def answer() -> Answer:
        from holdfast.cli.advise import Options, advise_root

        options = Options(
            failures_per_day=failures_per_day,
            mtbf=mtbf,
            overhead_cap=overhead_cap,
            stall=stall,
            background=background,
            commit=commit,
            restart=restart,
        )
        return advise_root(root, options)

    _finish(answer, as_json=as_json)


@app.command(
    "run",
    # What stands behind the command's name is the command's own.
    context_settings={"allow_interspersed_args": False},
)
def supervise(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="What to run, with its arguments.")
    ],
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="ROOT", help="Judge progress by the checkpoints there."),
    ] = None,
    max_failures: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Give up after N lives in a row without progress."),
    ] = 5,
    backoff: Annotated[
        str, typer.Option(metavar="TIME", help="First pause before a restart; it doubles.")
    ] = "1s",
    backoff_max: Annotated[str, typer.Option(metavar="TIME", help="The longest pause.")] = "60s",
    progress_after: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Without --root: a life so long made progress. [default: 10min]"
        ),
    ] = None,
    requeue_code: Annotated[
        int,
        typer.Option(min=1, max=255, metavar="N", help="A status that is passed on, not retried."),
    ] = 75,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long after a signal the command is killed.")
    ] = "5min",
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON after each life and at the end.")
    ] = False,
) -> None:
    """Run a training; start it again when it crashes, as long as it makes progress."""

    def code() -> int:
        from holdfast.cli.run import run_command

        return run_command(
            command,
            root=root,
            max_failures=max_failures,
            backoff=backoff,
            backoff_max=backoff_max,
            progress_after=progress_after,
            requeue_code=requeue_code,
            grace=grace,
            as_json=as_json,
        )

    _exit(code, as_json=as_json)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to work; an earlier demo there goes.")
    ] = Path("demo-output"),
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Repeat an earlier demo. Drawn if unset.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A tiny model, for a first look.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train, get killed at random moments, resume, and compare with the undisturbed run."""

    def code() -> Code:
        from holdfast.demo.main import run as run_demo

        return Code(run_demo(out, seed=seed, fast=fast, as_json=as_json))

    _exit(code, as_json=as_json)


def _finish(answer: Callable[[], Answer], *, as_json: bool) -> NoReturn:
    """Give the answer, or the error, and exit."""

    def code() -> Code:
        found = answer()
        give(found, as_json=as_json)
        return found.code

    _exit(code, as_json=as_json)


def _exit(code: Callable[[], int], *, as_json: bool) -> NoReturn:
    try:
        result = code()
        sys.stdout.flush()
    except HoldfastError as error:
        result = give_error(error, as_json=as_json)
    except KeyboardInterrupt:
        result = Code.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = Code.BROKEN_PIPE
    raise typer.Exit(result)
