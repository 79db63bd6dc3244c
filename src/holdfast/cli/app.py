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
    """List the checkpoints of a root, newest first.

    The last column has marks: latest and best (the checkpoints that ROOT@latest and ROOT@best
    name), rejected (a resume found damage), left behind (a rollback went back to an older
    checkpoint), unhealthy (a resume skips it), by NAME (the saver), and #tag. Unreadable manifests,
    unfinished saves, the owner of the run and readers are listed below the table.
    """
    from holdfast.cli.ls import list_root

    return list_root(root)


@_answering(options.root, options.saves)
def log(root: str, saves: bool) -> Answer:
    """List the sessions of a run, oldest first.

    A session is the time in which one process owns the run. Shown are its host and process, the
    step from which it resumed, its last save, how many of its checkpoints still exist, and how it
    ended. Reasons of deletions and changes of arguments, data and versions are listed below.
    """
    from holdfast.cli.log import log_root

    return log_root(root, saves=saves)


@_answering(options.root, options.reads_all, name="resume-plan")
def resume_plan(root: str, verify: bool) -> Answer:
    """Show which checkpoint a resume would use, and why.

    Checkpoints are listed in the order in which resume() tries them. Only manifests and file sizes
    are read, and nothing is claimed. The exit code is 1 if no checkpoint can be used.
    """
    from holdfast.cli.resume_plan import plan_of

    return plan_of(root, verify=verify)


@_answering(options.target, options.tensors)
def show(target: str, tensors: bool) -> Answer:
    """Show the manifest of one checkpoint.

    That is its counters, metrics, components, origin and numerics. Without @WHICH, the latest.
    """
    from holdfast.cli.show import show as look

    return look(target, tensors=tensors)


@_answering(options.target, options.seen, options.stored_only)
def verify(target: str, seen: str | None, stored_only: bool) -> Answer:
    """Read every byte and compare it with its digest.

    Without @WHICH, all checkpoints. Local files are read from the disk, not from the page cache.
    All damage is listed with file, block and tensors; nothing is changed. A training may continue
    in the meantime. For an encrypted checkpoint without a key, the encrypted bytes are compared.
    """
    from holdfast.cli.verify import verify_target

    return verify_target(target, seen=seen, decode=not stored_only)


@_answering(options.root, options.dry_run, options.dead_epochs, options.damaged, options.yes)
def gc(
    root: str, dry_run: bool, dead_epochs: Sequence[int], damaged: str | None, yes: bool
) -> Answer:
    """Remove unfinished saves and leftovers of deletions.

    Checkpoints are never removed, except the one that --damaged names if --yes is given. Nothing is
    removed that a live writer may still finish. If a writer may be alive, a small marker remains;
    the output shows the command that removes it.
    """
    if damaged is None and yes:
        raise UsageError("--yes needs --damaged FOLDER")
    if damaged is not None:
        from holdfast.cli.damaged import remove

        if dead_epochs:
            raise UsageError("--damaged and --dead-epoch exclude each other")
        return remove(root, damaged, is_sure=yes and not dry_run)
    from holdfast.cli.gc import clean

    return clean(root, dry_run=dry_run, dead_epochs=dead_epochs)


@_answering(options.root, options.keep, options.dry_run)
def prune(root: str, keep: str, dry_run: bool) -> Answer:
    """Delete the checkpoints that a retention rule does not keep.

    The reason is printed for each. NAME=RULE is a rule for one saver; a saver without a rule keeps
    everything. The command is refused while a live process owns the run. Checkpoints that are being
    read or wait for an upload are kept.
    """
    from holdfast.cli.prune import clean

    return clean(root, keep=keep, dry_run=dry_run)


@_answering(options.root, options.num_saves, options.other_rule)
def forecast(root: str, saves: int, keep: str | None) -> Answer:
    """List the deletions at the next saves, with reasons.

    The rule and the intervals are those that the run recorded; the assumptions are printed.
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
    """Add tags to a checkpoint.

    Retention rules keep tagged checkpoints, and ROOT@TAG names the checkpoint.
    """
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
    """Save a file or folder of another library as a new checkpoint.

    No code in the file runs. The file is read in a child process with at most 2 GiB of memory. The
    output lists which values were skipped, and why.
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

    hf is a folder for from_pretrained, safetensors a file (a folder with --shard-size), pt a file
    for torch.load, and dcp a folder for PyTorch Distributed Checkpoint. Without @WHICH, the latest.
    --component is by default model, or the only module. The output lists which values were skipped
    or converted.
    """
    from holdfast.cli.convert import take_out

    return take_out(target, output, to, **wishes)


@_answering(options.root, options.save_tags, options.reason, options.timeout)
def save(root: str, tags: Sequence[str], reason: str, timeout: str) -> Answer:
    """Ask a running training for a checkpoint, and wait for it.

    The training saves at the end of the current step, when it calls maybe_save; the Trainer always
    does. The command is refused if no live process owns the run. Creating the file
    ROOT/requests/now also asks for a checkpoint, without waiting.
    """
    from holdfast.cli.save import save as ask

    return ask(root, tags=tags, reason=reason, timeout=timeout)


@_answering(options.root)
def uploads(root: str) -> Answer:
    """Show which checkpoints are uploaded, waiting or failed.

    ROOT is the local root of a run with two tiers.
    """
    from holdfast.cli.uploads import show_uploads

    return show_uploads(root)


@_answering(options.root, options.mtbf, options.overhead)
def advise(root: str, mtbf: str | None, overhead: float) -> Answer:
    """Recommend how often to save.

    Prints the interval that every="auto" would use, computed from the save times and failures that
    the run recorded. The exit code is 3 if no checkpoint recorded its save times.
    """
    from holdfast.cli.advise import advise_root

    return advise_root(root, mtbf=mtbf, overhead=overhead)


@_answering(options.root, options.output, options.metrics, options.log)
def plot(root: str, output: Path | None, metrics: Sequence[str], log: Path | None) -> Answer:
    """Draw loss, learning rate and throughput over steps.

    Values come from the log of a Trainer, or else from the metrics of the checkpoints. Ticks mark
    saves, dashed lines resumes: green after a clean end, red after a crash. Drawing needs pip
    install 'holdfast-torch[plot]'.
    """
    from holdfast.cli.plot import plot as draw

    return draw(root, output=output, metrics=metrics, log=log)


@_answering(options.answering)
def schema(command: Sequence[str]) -> Answer:
    """Print the JSON Schema of a command's --json output."""
    from holdfast.cli.schema import show_schema

    return show_schema(" ".join(command))


@_answering(options.sources, options.copy_to, options.all_of_root, options.dry_run)
def cp(sources: Sequence[str], to: str, whole: bool, dry_run: bool) -> Answer:
    """Copy checkpoints to another root, in any store.

    Every digest is checked. Pins and tags are copied, and encrypted checkpoints remain encrypted.
    After an interruption, the same command continues. The copy is the same run: you can resume from
    it, but if training continues in both, another copy between them is refused.
    """
    from holdfast.cli.cp import copy_all

    return copy_all(sources, to, whole=whole, dry_run=dry_run)


_LEAVE = (
    *(options.why_removed, options.even_pinned, options.even_latest),
    *(options.dry_run, options.sure),
)


@_answering(options.one, *_LEAVE)
def rm(target: str, **leave: Any) -> Answer:
    """Delete one checkpoint, and record the reason.

    Nothing is deleted if the checkpoint is pinned or tagged, if the run would resume from it, if it
    is being read or uploaded, or if a live process owns the run. First, the checkpoint from which
    the run would resume is verified. With --yes, name a step or a folder, not latest.
    """
    from holdfast.cli.rm import Leave
    from holdfast.cli.rm import rm as remove

    return remove(target, Leave(**leave))


@_answering(options.one, options.drop, *_LEAVE)
def thin(target: str, components: Sequence[str], **leave: Any) -> Answer:
    """Delete components of a checkpoint, such as the optimizer.

    The other components are kept, but a run can no longer resume from it.
    """
    from holdfast.cli.rm import Leave
    from holdfast.cli.rm import thin as drop

    return drop(target, components, Leave(**leave))


@_answering(options.one, options.old_tags)
def untag(target: str, tags: Sequence[str]) -> Answer:
    """Remove tags from a checkpoint.

    Only tags that were added after the save can be removed.
    """
    from holdfast.cli.pin import mark

    return mark(target, remove_tags=tags)


@_answering(options.root, options.rate, options.place)
def scrub(root: str, rate: str | None, place: Path | None) -> Answer:
    """Verify a whole root at a limited rate, in parts.

    For a nightly timer: timeout 6h holdfast scrub ROOT --rate 50MB --resume progress.json
    """
    from holdfast.cli.scrub import scrub as verify_slowly

    return verify_slowly(root, rate=rate, place=place)


@app.command()
@taking(options.root, options.every, options.once, options.as_json_changes)
@_ending
def watch(root: str, every: str | None, once: bool, as_json: bool) -> int:
    """Show the state of a run as it changes.

    Shown are the newest checkpoints, unfinished saves, uploads and the owner. Nothing is claimed,
    and no key is needed.
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
    """Show runs in the browser, on 127.0.0.1, until Ctrl-C.

    The printed URL has a token that gives access. Needs pip install 'holdfast-torch[web]'.
    """
    from holdfast.cli.web.serve import serve as serve_roots

    return serve_roots(roots, as_json=as_json, **given)


@_answering(options.doctor_root)
def doctor(root: str | None) -> Answer:
    """Check this machine, and whether a run could save into a root.

    Each finding is ok, warn or fail, with a remedy; the exit code is 1 after a fail. Test files are
    removed again.
    """
    from holdfast.cli.doctor import examine

    return examine(root)


@_answering(options.shell)
def completion(shell: str) -> Answer:
    """Print the completion script for a shell.

    For bash, add to ~/.bashrc: eval "$(holdfast completion bash)"
    """
    from holdfast.cli.completion import script

    return script(app, shell)


@_answering(options.source, options.depth, options.components, options.trust)
@limited("source")
def tree(source: str, depth: int | None, components: Sequence[str]) -> Answer:
    """Show the structure of a checkpoint or a file.

    That is dtype, shape and size of tensors, and plain values. No tensor is read.
    """
    from holdfast.cli.tree import show_tree

    return show_tree(source, depth=depth, components=components)


@_answering(options.source, options.tensor_name, options.rows, options.trust)
@limited("source")
def cat(source: str, name: str, rows: str | None) -> Answer:
    """Print a tensor, some of its rows, or a plain value."""
    from holdfast.cli.cat import show_value

    return show_value(source, name, rows)


@_answering(
    *(options.first, options.second, options.components),
    *(options.ignored, options.fail_above, options.trust),
)
@limited("a", "b")
def diff(a: str, b: str, **wishes: Any) -> Answer:
    """Compare two checkpoints or files.

    Structure, dtypes, numbers and plain values are compared. The exit code is 1 if they differ.
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
    """Compute statistics of each tensor, such as norm and mean.

    Also extremes, zeros, values that are not finite, rows of zeros, and a histogram by powers of
    two.
    """
    from holdfast.cli.stats import stats as compute

    return compute(source, components=components, tensors=tensors, plot=plot)


@_answering(options.root)
def du(root: str) -> Answer:
    """Show the disk usage of a root, by checkpoint and component.

    Also how much space the deletion of each checkpoint would free.
    """
    from holdfast.cli.du import usage

    return usage(root)


# Options after the program's name are the program's own.
@app.command("run", context_settings={"allow_interspersed_args": False})
@taking(options.command, *options.restarts, options.as_json_lines)
@_ending
def supervise(command: Sequence[str], as_json: bool, **restarts: Any) -> int:
    """Run a training, and restart it when it crashes.

    It is restarted as long as it makes progress. The command exits with the code of the
    program, or with 4 after too many restarts.
    """
    from holdfast.cli.run import Restarts, run_command

    return run_command(command, Restarts(**restarts), as_json=as_json)


@app.group(no_args_is_help=True, cls=Commands)
def keys() -> None:
    """Generate, list and replace the keys of encrypted checkpoints."""


@_answering(options.new_key_file, options.pair, group=keys)
def generate(path: Path, pair: bool) -> Answer:
    """Write a new secret key to a new file."""
    from holdfast.cli.keys import generate as generate_key

    return generate_key(path, pair=pair)


@_answering(options.root, group=keys, name="list")
def list_keys(root: str) -> Answer:
    """List the keys that decrypt each encrypted checkpoint.

    No key is needed.
    """
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
    """Replace the keys of all encrypted checkpoints.

    The current keys are named before the command (holdfast --key-file OLD keys rotate). Only the
    key records are rewritten. After an interruption, run the command again. Give a running training
    the new keys first.
    """
    from holdfast.cli.keys import rotate as rotate_keys

    to = KeySources(files=to_files, variables=to_variables, commands=to_commands)
    return rotate_keys(root, to, keep_old=keep_old)
