"""`holdfast gc`: remove uncommitted attempts and leftovers of deletions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.health import Gc, GcDamaged
from holdfast.cli.options import command, flag, option, several
from holdfast.cli.output import Answer, Code, emitter, format_nbytes, say_event
from holdfast.cli.target import open_root
from holdfast.encryption.store import bare
from holdfast.errors import FormatError, UsageError
from holdfast.events import Emitter
from holdfast.maintenance.gc import GcReport, collect_garbage
from holdfast.ownership.claim import is_closed, is_live
from holdfast.ownership.process import liveness
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store


@command(
    "gc",
    options.root,
    options.dry_run,
    several(
        "--dead-epoch",
        "dead_epochs",
        "N",
        "Treat writer N as dead, for example if its host is gone.",
        type=click.IntRange(min=1),
    ),
    option(
        "--damaged",
        "FOLDER",
        "Show a checkpoint with a damaged or lost manifest; with --yes, delete it.",
        show_default=False,
    ),
    flag("--yes", "With --damaged: delete it."),
    answer=Gc,
    other_answers={"--damaged": GcDamaged},
)
def clean(
    root: str,
    *,
    dry_run: bool,
    dead_epochs: Collection[int] = (),
    damaged: str | None = None,
    yes: bool = False,
) -> Answer:
    """Remove unfinished saves and leftovers of deletions.

    Checkpoints are never removed, except the one that --damaged names if --yes is given. Nothing is
    removed that a live writer may still finish. If a writer may be alive, a small marker remains;
    the output shows the command that removes it.
    """
    if damaged is not None:
        from holdfast.cli.damaged import remove  # which loads numpy

        if dead_epochs:
            raise UsageError("--damaged and --dead-epoch exclude each other")
        return remove(root, damaged, is_sure=yes and not dry_run)
    if yes:
        raise UsageError("--yes needs --damaged FOLDER")
    store = bare(open_root(root))  # gc needs no key
    for epoch in dead_epochs:
        _check_dead(store, epoch)
    warnings: list[str] = []
    emit = emitter(warnings)
    report = collect_garbage(store, dry_run=dry_run, dead_epochs=dead_epochs, emit=emit)
    for text in report.foreign:
        emit("warning", text)
    document = {
        "root": store.url,
        "dry_run": dry_run,
        "removed": _format_reasons(report.removed),
        "marked": _format_reasons(report.marked),
        "kept": _format_reasons(report.kept),
        "failed": _format_reasons(report.failed),
        "markers": [{"epoch": e, "number": number} for e, number in sorted(report.markers.items())],
        "warnings": warnings,
        "nbytes": report.nbytes,
    }
    code = Code.FOUND if report.failed else Code.OK
    return Answer(
        document=make_answer(Gc, document), parts=_format_report(report, root, dry_run), code=code
    )


def _check_dead(store: Store, epoch: int) -> None:
    newest = Catalog(store).highest_epoch()
    try:
        writer = Catalog(store).writer(epoch)
    except FormatError:
        return  # An unreadable claim cannot be checked: believe the user.
    if writer is None and not 1 <= epoch <= newest:
        raise UsageError(f"--dead-epoch {epoch}: {store.url} has no writer {epoch}")
    if writer is None or is_closed(store, epoch):
        return
    if liveness(writer.process) in ("alive", "ours"):
        raise UsageError(
            f"--dead-epoch {epoch}: its process {writer.process.pid} is alive on this host; "
            "stop it first"
        )
    if epoch == newest and is_live(store, writer, emit=Emitter((say_event,))):
        raise UsageError(
            f"--dead-epoch {epoch}: its process {writer.process.pid} on {writer.process.host} "
            "owns the run and has a live heartbeat; stop it first"
        )


def _format_report(report: GcReport, root: str, dry_run: bool) -> list[str]:
    verbs = ("would remove", "would mark") if dry_run else ("removed", "marked")
    lines = [f"{verbs[0]} {folder}: {why}" for folder, why in report.removed]
    lines += [f"{verbs[1]} {folder}: {why}" for folder, why in report.marked]
    lines += [f"kept {folder}: {why}" for folder, why in report.kept]
    lines += [f"FAILED {folder}: {why}" for folder, why in report.failed]
    lines += [f"to look at {name}: holdfast gc {root} --damaged {name}" for name in report.damaged]
    total = f"{format_nbytes(report.nbytes)} {'would be ' if dry_run else ''}freed"
    return [*lines, total if lines else "nothing to remove", *_marker_lines(report, root)]


def _marker_lines(report: GcReport, root: str) -> list[str]:
    """Format the line on markers that stay because their writers may still be paused."""
    if not report.markers:
        return []
    epochs = sorted(report.markers)
    writers = ", ".join(map(str, epochs))
    options = " ".join(f"--dead-epoch {epoch}" for epoch in epochs)
    return [
        f"markers that stay: {sum(report.markers.values())}, of writers {writers}, "
        "which may be paused, or have a request on the way. If you know that they ended, and "
        f"some hours ago: holdfast gc {root} {options}"
    ]


def _format_reasons(items: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"folder": folder, "why": why} for folder, why in items]
