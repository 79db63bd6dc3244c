"""Commands of the command line, declared with click. Each imports what it needs when run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from holdfast.cli import options
from holdfast.cli.child import limited
from holdfast.cli.options import Commands, Parameter, taking
from holdfast.cli.output import Answer, Code, discard_output, give, give_error, unwritten
from holdfast.cli.target import NAMED, PATIENCE, KeySources
from holdfast.errors import HoldfastError, UsageError
from holdfast.version import __version__


def run() -> NoReturn:
    """Run the command line of this process and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&- in a shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
    try:
        code = _run()
    except BrokenPipeError:
        discard_output()
        code = Code.BROKEN_PIPE
    sys.exit(code)


def _run() -> int:
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


@click.group(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(
    __version__, message="holdfast %(version)s", help="Print the version and exit."
)
@taking(
    options.key_files,
    options.key_variables,
    options.key_commands,
    options.accept_plain,
    options.file_key,
    options.patience,
)
def app(
    key_files: Sequence[Path],
    key_variables: Sequence[str],
    key_commands: Sequence[str],
    accept_plain: bool,
    file_key: Path | None,
    timeout: str,
) -> None:
    """Look into, compare, convert, verify and manage checkpoints of training runs."""
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


def _ending(command: Callable[..., int]) -> Callable[..., NoReturn]:
    """Wrap a command: print its error, if any, and exit with its code."""

    @wraps(command)
    def ending(*, as_json: bool, **given: Any) -> NoReturn:
        try:
            try:
                code = command(as_json=as_json, **given)
            except HoldfastError as error:
                code = give_error(error, as_json=as_json)
            sys.stdout.flush()
        except KeyboardInterrupt:
            code = Code.INTERRUPTED
        except BrokenPipeError:
            discard_output()
            code = Code.BROKEN_PIPE
        click.get_current_context().exit(code)

    return ending


def _answering(
    *parameters: Parameter, group: click.Group = app, name: str | None = None
) -> Callable[[Callable[..., Answer]], click.Command]:
    """Decorator: declare a command that prints the function's answer, with `--json` as JSON.

    Its name and its help are those of the function, unless `name` is given.
    """

    def declare(function: Callable[..., Answer]) -> click.Command:
        @wraps(function)
        def command(*, as_json: bool, **given: Any) -> int:
            answer = function(**given)
            give(answer, as_json=as_json)
            return answer.code

        return group.command(name)(taking(*parameters, options.as_json)(_ending(command)))

    return declare


@_answering(options.root)
def ls(root: str) -> Answer:
    """List the checkpoints of a root, newest first."""
    from holdfast.cli.ls import list_root

    return list_root(root)


@_answering(options.root, options.saves)
def log(root: str, saves: bool) -> Answer:
    """List the processes that trained a run, and their saves.

    Oldest first: where each ran, from which step to which, and what had changed.
    """
    from holdfast.cli.log import log_root

    return log_root(root, saves=saves)


@_answering(options.root, options.reads_all, name="resume-plan")
def resume_plan(root: str, verify: bool) -> Answer:
    """Show what a resume would take, and what it would pass over.

    With the reasons. Nothing is claimed, and only manifests are read.
    """
    from holdfast.cli.resume_plan import plan_of

    return plan_of(root, verify=verify)


@_answering(options.target, options.tensors)
def show(target: str, tensors: bool) -> Answer:
    """Show the manifest of one checkpoint.

    Without @WHICH, of the latest.
    """
    from holdfast.cli.show import show as look

    return look(target, tensors=tensors)


@_answering(options.target, options.seen, options.stored_only)
def verify(target: str, seen: str | None, stored_only: bool) -> Answer:
    """Read every byte and compare it with its digest.

    Without @WHICH, of all checkpoints.
    """
    from holdfast.cli.verify import check

    return check(target, seen=seen, decode=not stored_only)


@_answering(options.root, options.dry_run, options.dead_epochs, options.damaged, options.yes)
def gc(
    root: str, dry_run: bool, dead_epochs: Sequence[int], damaged: str | None, yes: bool
) -> Answer:
    """Remove unfinished saves, and leftovers of deletions.

    Checkpoints stay, but for one that --damaged names and --yes deletes.
    """
    if damaged is None and yes:
        raise UsageError("--yes goes with --damaged FOLDER")
    if damaged is not None:
        from holdfast.cli.damaged import remove

        if dead_epochs:
            raise UsageError("--damaged and --dead-epoch are two commands; give one of them")
        return remove(root, damaged, is_sure=yes and not dry_run)
    from holdfast.cli.gc import clean

    return clean(root, dry_run=dry_run, dead_epochs=dead_epochs)


@_answering(options.root, options.keep, options.dry_run)
def prune(root: str, keep: str, dry_run: bool) -> Answer:
    """Delete the checkpoints that a rule does not keep.

    The reason is printed for each.
    """
    from holdfast.cli.prune import clean

    return clean(root, keep=keep, dry_run=dry_run)


@_answering(options.root, options.num_saves, options.other_rule)
def forecast(root: str, saves: int, keep: str | None) -> Answer:
    """List what retention deletes at the coming saves.

    And why; by the rule and the intervals that the run records.
    """
    from holdfast.cli.forecast import forecast_deletions

    return forecast_deletions(root, number=saves, keep=keep)


@_answering(options.one)
def pin(target: str) -> Answer:
    """Protect a checkpoint from deletion by retention rules."""
    from holdfast.cli.pin import mark

    return mark(target, pinned=True)


@_answering(options.one)
def unpin(target: str) -> Answer:
    """Remove the pin of a checkpoint.

    Retention rules apply to it again.
    """
    from holdfast.cli.pin import mark

    return mark(target, pinned=False)


@_answering(options.one, options.new_tags)
def tag(target: str, tags: Sequence[str]) -> Answer:
    """Add tags to a checkpoint; retention keeps tagged ones."""
    from holdfast.cli.pin import mark

    return mark(target, tags=tags)


@_answering(
    options.imported,
    options.root,
    *(options.step, options.label, options.rules, options.components, options.optimizer),
    *(options.parameters, options.allow_loss),
    *(options.dry_run, options.unsafe_pickle, options.trust),
    name="import",
)
@limited("source")
def import_(
    source: str,
    root: str,
    **wishes: Any,
) -> Answer:
    """Save a file of another library as a new checkpoint of a run.

    Also a folder, or weights alone. No code in it is run.
    """
    from holdfast.cli.convert import bring_in

    return bring_in(source, root, **wishes)


@_answering(
    *(options.exported, options.new_output, options.to, options.components, options.rules),
    *(options.configs, options.dtype, options.shard_size, options.allow_loss),
    *(options.dry_run, options.unsafe_pickle, options.trust),
)
@limited("target")
def export(target: str, output: str, to: str, **wishes: Any) -> Answer:
    """Write a checkpoint in the format of another library.

    Without @WHICH, the latest.
    """
    from holdfast.cli.convert import take_out

    return take_out(target, output, to, **wishes)


@_answering(options.root, options.save_tags, options.reason, options.timeout)
def save(root: str, tags: Sequence[str], reason: str, timeout: str) -> Answer:
    """Ask a running training for a checkpoint, and wait for it.

    It is made at the end of the step under way, where the training calls maybe_save.
    """
    from holdfast.cli.save import save as ask

    return ask(root, tags=tags, reason=reason, timeout=timeout)


@_answering(options.root)
def uploads(root: str) -> Answer:
    """Show which checkpoints are uploaded, waiting or failed."""
    from holdfast.cli.uploads import show_uploads

    return show_uploads(root)


@_answering(
    options.root,
    *(options.failures_per_day, options.mtbf, options.overhead_cap),
    *(options.stall, options.background, options.commit, options.restart),
)
def advise(root: str, **known: Any) -> Answer:
    """Recommend how often to save.

    Computed from the costs and failures that the run recorded.
    """
    from holdfast.cli.advise import Options, advise_root

    return advise_root(root, Options(**known))


@_answering(options.root, options.output, options.metrics, options.log)
def plot(root: str, output: Path | None, metrics: Sequence[str], log: Path | None) -> Answer:
    """Draw loss, learning rate and throughput over steps.

    With marks for saves, resumes and kills.
    """
    from holdfast.cli.plot import plot as draw

    return draw(root, output=output, metrics=metrics, log=log)


@_answering(options.answering)
def schema(command: Sequence[str]) -> Answer:
    """Print the JSON Schema of a command's --json answer."""
    from holdfast.cli.schema import show_schema

    return show_schema(" ".join(command))


@_answering(options.sources, options.copy_to, options.all_of_root, options.dry_run)
def cp(sources: Sequence[str], to: str, whole: bool, dry_run: bool) -> Answer:
    """Copy checkpoints to another root.

    Every digest is checked on the way.
    """
    from holdfast.cli.cp import copy_all

    return copy_all(sources, to, whole=whole, dry_run=dry_run)


_LEAVE = (
    *(options.why_removed, options.even_pinned, options.even_latest),
    *(options.dry_run, options.sure),
)


@_answering(options.one, *_LEAVE)
def rm(target: str, **leave: Any) -> Answer:
    """Delete one checkpoint, and record the reason."""
    from holdfast.cli.rm import Leave
    from holdfast.cli.rm import rm as remove

    return remove(target, Leave(**leave))


@_answering(options.one, options.drop, *_LEAVE)
def thin(target: str, components: Sequence[str], **leave: Any) -> Answer:
    """Delete components of a checkpoint, such as the optimizer.

    The rest is kept.
    """
    from holdfast.cli.rm import Leave
    from holdfast.cli.rm import thin as drop

    if not components:
        raise UsageError("say what to drop, as --drop optimizer")
    return drop(target, components, Leave(**leave))


@_answering(options.one, options.old_tags)
def untag(target: str, tags: Sequence[str]) -> Answer:
    """Remove tags from a checkpoint."""
    from holdfast.cli.pin import mark

    return mark(target, remove_tags=tags)


@_answering(options.root, options.rate, options.place)
def scrub(root: str, rate: str | None, place: Path | None) -> Answer:
    """Verify a whole root, at a limited rate and in parts.

    A scrub that was stopped goes on where it was.
    """
    from holdfast.cli.scrub import scrub as verify_slowly

    return verify_slowly(root, rate=rate, place=place)


@app.command()
@taking(options.root, options.every, options.once, options.as_json_changes)
@_ending
def watch(root: str, every: str | None, once: bool, as_json: bool) -> int:
    """Show the state of a run as it changes.

    Checkpoints, saves under way, uploads and the owner.
    """
    from holdfast.cli.watch import watch_root

    return watch_root(root, every=every, once=once, as_json=as_json)


@app.command()
@taking(
    options.roots,
    *(options.port, options.path_prefix, options.allow_hosts),
    *(options.opening, options.as_json_line),
)
@_ending
def serve(roots: Sequence[str], as_json: bool, **given: Any) -> int:
    """Serve a page in the browser that shows runs.

    Time line, checkpoints, lineage, costs, comparisons. It changes nothing.
    """
    from holdfast.cli.web.serve import serve as serve_roots

    return serve_roots(roots, as_json=as_json, **given)


@_answering(options.doctor_root)
def doctor(root: str | None) -> Answer:
    """Check this machine, and whether a run could save into a root.

    One line for each finding, and what to do about it.
    """
    from holdfast.cli.doctor import examine

    return examine(root)


@_answering(options.shell)
def completion(shell: str) -> Answer:
    """Print a shell's completion of commands and options."""
    from holdfast.cli.completion import script

    return script(app, shell)


@_answering(options.source, options.depth, options.components, options.trust)
@limited("source")
def tree(source: str, depth: int | None, components: Sequence[str]) -> Answer:
    """Show the structure of a checkpoint or a file.

    Tensors with dtype, shape and size, and plain values.
    """
    from holdfast.cli.tree import show_tree

    return show_tree(source, depth=depth, components=components)


@_answering(options.source, options.tensor_name, options.rows, options.trust)
@limited("source")
def cat(source: str, name: str, rows: str | None) -> Answer:
    """Print a tensor, some rows of it, or a plain value."""
    from holdfast.cli.cat import show_value

    return show_value(source, name, rows)


@_answering(
    *(options.first, options.second, options.components),
    *(options.ignored, options.fail_above, options.trust),
)
@limited("a", "b")
def diff(a: str, b: str, **wishes: Any) -> Answer:
    """Compare two checkpoints or files.

    Structure, dtypes, numbers and plain values.
    """
    from holdfast.cli.diff import diff as compare

    return compare(a, b, **wishes)


@_answering(
    options.source,
    *(options.components, options.only_tensors),
    *(options.exponents_plot, options.trust),
)
@limited("source")
def stats(
    source: str, components: Sequence[str], tensors: Sequence[str], plot: Path | None
) -> Answer:
    """Compute norm, extremes, zeros and more of each tensor.

    Also mean, NaN and infinite numbers, rows of zeros, and a histogram by powers of two.
    """
    from holdfast.cli.stats import stats as compute

    return compute(source, components=components, tensors=tensors, plot=plot)


@_answering(options.root)
def du(root: str) -> Answer:
    """Show the disk usage of a root.

    By checkpoint and component, with what each deletion would free.
    """
    from holdfast.cli.du import usage

    return usage(root)


# What stands behind the command's name is the command's own.
@app.command("run", context_settings={"allow_interspersed_args": False})
@taking(options.command, *options.restarts, options.as_json_lines)
@_ending
def supervise(command: Sequence[str], as_json: bool, **restarts: Any) -> int:
    """Run a training, and start it again when it crashes.

    As long as it makes progress.
    """
    from holdfast.cli.run import Restarts, run_command

    return run_command(command, Restarts(**restarts), as_json=as_json)


@app.command()
@taking(
    *(options.script, options.until, options.sets, options.max_time),
    *(*options.restarts, options.as_json_lines),
)
@_ending
def train(
    script: str,
    until: str,
    sets: Sequence[str],
    max_time: str | None,
    as_json: bool,
    **restarts: Any,
) -> int:
    """Fit a script's Trainer, and start again when it crashes."""
    from holdfast.cli.run import Restarts
    from holdfast.cli.train import train_command

    return train_command(
        script,
        until=until,
        sets=sets,
        max_time=max_time,
        restarts=Restarts(**restarts),
        as_json=as_json,
    )


@app.group(no_args_is_help=True, cls=Commands)
def keys() -> None:
    """Make, list and replace the keys of encrypted checkpoints."""


@_answering(options.new_key_file, options.pair, group=keys)
def generate(path: Path, pair: bool) -> Answer:
    """Make a new key and write it into a new file."""
    from holdfast.cli.keys import generate as generate_key

    return generate_key(path, pair=pair)


@_answering(options.root, group=keys, name="list")
def list_keys(root: str) -> Answer:
    """List which keys decrypt each encrypted checkpoint. No key is needed."""
    from holdfast.cli.keys import list_recipients

    return list_recipients(root)


@_answering(
    options.root,
    *(options.to_files, options.to_variables, options.to_commands),
    options.keep_old,
    group=keys,
)
def rotate(
    root: str,
    to_files: Sequence[str],
    to_variables: Sequence[str],
    to_commands: Sequence[str],
    keep_old: bool,
) -> Answer:
    """Replace the keys that decrypt a root's checkpoints.

    Their data is not written again.
    """
    from holdfast.cli.keys import rotate as rotate_keys

    to = KeySources(files=to_files, variables=to_variables, commands=to_commands)
    return rotate_keys(root, to, keep_old=keep_old)


@app.command()
@taking(options.out, options.seed, options.fast, options.as_json)
@_ending
def demo(out: Path, seed: int | None, fast: bool, as_json: bool) -> int:
    """Show that a killed training resumes exactly.

    Train, get killed at random moments, resume, and compare with the undisturbed run.
    """
    from holdfast.demo.story import run as run_demo

    return run_demo(out, seed=seed, fast=fast, as_json=as_json)
