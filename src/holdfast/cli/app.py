"""The commands and their exit codes. Each imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec

import typer

from holdfast.cli import options
from holdfast.cli.options import AsJson
from holdfast.cli.output import Answer, Code, give, give_error
from holdfast.cli.unlocking import NAMED, KeySources
from holdfast.errors import HoldfastError

P = ParamSpec("P")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look after the checkpoints of training runs.",
)

keys_app = typer.Typer(
    no_args_is_help=True, help="Make keys, and say who can open sealed checkpoints."
)
app.add_typer(keys_app, name="keys")


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
    key_files: options.KeyFiles = None,
    key_variables: options.KeyVariables = None,
    key_commands: options.KeyCommands = None,
    accept_plain: options.AcceptPlain = False,
) -> None:
    """Look after the checkpoints of training runs."""
    NAMED.set(
        KeySources(
            files=[*map(str, key_files or ())],
            variables=key_variables or (),
            commands=key_commands or (),
            accepts_plain=accept_plain,
        )
    )


def _ending(command: Callable[P, Answer | int]) -> Callable[P, None]:
    """The command, with its answer given or its error told, and the exit code set."""

    @wraps(command)
    def ending(*arguments: P.args, **given: P.kwargs) -> None:
        as_json = bool(given["as_json"])
        try:
            code = _give(command(*arguments, **given), as_json=as_json)
            sys.stdout.flush()
        except HoldfastError as error:
            code = give_error(error, as_json=as_json)
        except KeyboardInterrupt:
            code = Code.INTERRUPTED
        except BrokenPipeError:
            # Whoever read our output has enough; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = Code.BROKEN_PIPE
        raise typer.Exit(code)

    return ending


def _give(found: Answer | int, *, as_json: bool) -> int:
    if isinstance(found, int):
        return found  # the command has said everything
    give(found, as_json=as_json)
    return found.code


@app.command()
@_ending
def ls(root: options.Root, as_json: AsJson = False) -> Answer:
    """List the checkpoints of a root, newest first."""
    from holdfast.cli.ls import list_root

    return list_root(root)


@app.command()
@_ending
def show(
    target: options.Target, tensors: options.Tensors = False, as_json: AsJson = False
) -> Answer:
    """Show what one checkpoint holds; without @WHICH the latest."""
    from holdfast.cli.show import show as look

    return look(target, tensors=tensors)


@app.command()
@_ending
def verify(
    target: options.Target,
    seen: options.SeenCommit = None,
    stored_only: options.StoredOnly = False,
    as_json: AsJson = False,
) -> Answer:
    """Read every byte again and compare; without @WHICH all checkpoints of the root."""
    from holdfast.cli.verify import check

    return check(target, seen=seen, decode=not stored_only)


@app.command()
@_ending
def gc(
    root: options.Root,
    dry_run: options.DryRun = False,
    dead_epochs: options.DeadEpochs = None,
    as_json: AsJson = False,
) -> Answer:
    """Remove attempts that never became checkpoints, and leftovers of deleted ones."""
    from holdfast.cli.gc import clean

    return clean(root, dry_run=dry_run, dead_epochs=dead_epochs or ())


@app.command()
@_ending
def prune(
    root: options.Root,
    keep: options.Keep,
    dry_run: options.DryRun = False,
    as_json: AsJson = False,
) -> Answer:
    """Delete the checkpoints that a rule does not keep; say of each what and why."""
    from holdfast.cli.prune import clean

    return clean(root, keep=keep, dry_run=dry_run)


@app.command()
@_ending
def pin(target: options.One, as_json: AsJson = False) -> Answer:
    """Keep a checkpoint whatever any rule says."""
    from holdfast.cli.pin import pin as set_pin

    return set_pin(target, pinned=True)


@app.command()
@_ending
def unpin(target: options.One, as_json: AsJson = False) -> Answer:
    """Let the rules decide about a checkpoint again."""
    from holdfast.cli.pin import pin as set_pin

    return set_pin(target, pinned=False)


@app.command()
@_ending
def tag(target: options.One, tags: options.NewTags, as_json: AsJson = False) -> Answer:
    """Give a checkpoint more names; a tagged one is kept."""
    from holdfast.cli.pin import tag as add_tags

    return add_tags(target, tags)


@app.command()
@_ending
def save(
    root: options.Root,
    tags: options.SaveTags = None,
    reason: options.Reason = "",
    timeout: options.Timeout = "10min",
    as_json: AsJson = False,
) -> Answer:
    """Ask the running training for a checkpoint, and wait for it.

    It is made at the end of the step under way, where the training calls maybe_save.
    """
    from holdfast.cli.save import save as ask

    return ask(root, tags=tags or (), reason=reason, timeout=timeout)


@app.command()
@_ending
def uploads(root: options.Root, as_json: AsJson = False) -> Answer:
    """Show what of a local root is in its remote tier, what waits, and what went wrong."""
    from holdfast.cli.uploads import show_uploads

    return show_uploads(root)


@app.command()
@_ending
def advise(
    root: options.Root,
    failures_per_day: options.FailuresPerDay = None,
    mtbf: options.Mtbf = None,
    overhead_cap: options.OverheadCap = None,
    stall: options.Stall = None,
    background: options.Background = None,
    commit: options.Commit = None,
    restart: options.Restart = None,
    as_json: AsJson = False,
) -> Answer:
    """Say how often to save, from what the run recorded, with the numbers."""
    from holdfast.cli.advise import Options, advise_root

    known = Options(
        failures_per_day=failures_per_day,
        mtbf=mtbf,
        overhead_cap=overhead_cap,
        stall=stall,
        background=background,
        commit=commit,
        restart=restart,
    )
    return advise_root(root, known)


@app.command(
    "run",
    # What stands behind the command's name is the command's own.
    context_settings={"allow_interspersed_args": False},
)
@_ending
def supervise(
    command: options.Command,
    root: options.ProgressRoot = None,
    max_failures: options.MaxFailures = 5,
    backoff: options.Backoff = "1s",
    backoff_max: options.BackoffMax = "60s",
    progress_after: options.ProgressAfter = None,
    requeue_code: options.RequeueCode = 75,
    grace: options.Grace = "5min",
    as_json: options.AsJsonLines = False,
) -> int:
    """Run a training; start it again when it crashes, as long as it makes progress."""
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


@keys_app.command("generate")
@_ending
def keys_generate(
    path: options.NewKeyFile, pair: options.Pair = False, as_json: AsJson = False
) -> Answer:
    """Make a new key and write it into a new file."""
    from holdfast.cli.keys import generate

    return generate(path, pair=pair)


@keys_app.command("list")
@_ending
def keys_list(root: options.Root, as_json: AsJson = False) -> Answer:
    """Say of every sealed checkpoint which keys open it. No key is needed."""
    from holdfast.cli.keys import list_recipients

    return list_recipients(root)


@keys_app.command("rotate")
@_ending
def keys_rotate(
    root: options.Root,
    to_files: options.ToFiles = None,
    to_variables: options.ToVariables = None,
    to_commands: options.ToCommands = None,
    keep_old: options.KeepOld = False,
    as_json: AsJson = False,
) -> Answer:
    """Let other keys open every sealed checkpoint of a root; nothing else is written."""
    from holdfast.cli.keys import rotate

    to = KeySources(files=to_files or (), variables=to_variables or (), commands=to_commands or ())
    return rotate(root, to, keep_old=keep_old)


@app.command()
@_ending
def demo(
    out: options.Out = Path("demo-output"),
    seed: options.Seed = None,
    fast: options.Fast = False,
    as_json: AsJson = False,
) -> int:
    """Train, get killed at random moments, resume, and compare with the undisturbed run."""

    from holdfast.demo.main import run as run_demo

    return run_demo(out, seed=seed, fast=fast, as_json=as_json)
