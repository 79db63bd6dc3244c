"""`holdfast gc`: remove what saves and deletions left, or with `--damaged` one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import click

from holdfast.cli import options
from holdfast.cli.documents import Document, Why, list_reasons
from holdfast.cli.options import command, flag, option, several
from holdfast.cli.output import Answer, Code, emitter, format_nbytes, say_event
from holdfast.cli.target import open_root, open_root_store
from holdfast.encryption.store import bare
from holdfast.errors import (
    FormatError,
    HoldfastError,
    NoCheckpoint,
    StoreError,
    UnsupportedVersion,
    UsageError,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Manifest
from holdfast.format.records import TiersRecord
from holdfast.maintenance.gc import GcReport, collect_garbage
from holdfast.ownership.claim import is_closed, is_live
from holdfast.ownership.process import liveness
from holdfast.root.catalog import Catalog, is_root
from holdfast.root.documents import read_if_there
from holdfast.store.base import Store


class Markers(Document, frozen=True):
    """Markers that stay until somebody names their writer dead."""

    epoch: int
    """Number of the writer's claim."""
    number: int
    """How many markers."""


class Gc(Document, frozen=True):
    """Answer of `gc`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    removed: Sequence[Why]
    """What was removed."""
    marked: Sequence[Why]
    """What got a marker, so that it cannot be committed any more."""
    kept: Sequence[Why]
    """What stays, and why."""
    failed: Sequence[Why]
    """What could not be removed."""
    markers: Sequence[Markers]
    """Markers that stay."""
    warnings: Sequence[str]
    """Warnings, such as of folders of others that were left; they go to standard error, too."""
    nbytes: int
    """Bytes given back."""


class FileSize(Document, frozen=True):
    """File of a checkpoint."""

    name: str
    """Its name."""
    nbytes: int
    """Its length."""


class GcDamaged(Document, frozen=True):
    """Answer of `gc --damaged`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the damaged checkpoint."""
    why: str
    """What is wrong with its manifest."""
    files: Sequence[FileSize]
    """Its files."""
    nbytes: int
    """Their bytes."""
    pinned: bool
    """Whether it is pinned."""
    tags: Sequence[str]
    """Tags that it was given after the save."""
    is_latest: bool
    """Whether `latest` names it."""
    resumes_from: str | None
    """Folder from which the run goes on without it."""
    warnings: Sequence[str]
    """What to look at first."""
    deleted: bool
    """Whether it was deleted."""
    kept_because: str | None
    """Why it was kept although its deletion was asked for."""
    marker: bool
    """Whether a tombstone stays."""


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
        if dead_epochs:
            raise UsageError("--damaged and --dead-epoch exclude each other")
        return _remove_damaged(root, damaged, is_sure=yes and not dry_run)
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
    document = Gc(
        root=store.url,
        dry_run=dry_run,
        removed=list_reasons(report.removed),
        marked=list_reasons(report.marked),
        kept=list_reasons(report.kept),
        failed=list_reasons(report.failed),
        markers=[Markers(epoch=e, number=number) for e, number in sorted(report.markers.items())],
        warnings=warnings,
        nbytes=report.nbytes,
    )
    code = Code.FOUND if report.failed else Code.OK
    return Answer(document=document, parts=_format_report(report, root, dry_run), code=code)


def _check_dead(store: Store, epoch: int) -> None:
    newest = Catalog(store).highest_epoch()
    try:
        writer = Catalog(store).writer(epoch)
    except FormatError:
        return  # An unreadable claim cannot be checked: believe the user.
    if writer is None and not 1 <= epoch <= newest:
        raise UsageError(f"--dead-epoch {epoch}: {store.url} has no writer {epoch}")
    if writer is None or is_closed(store, epoch, writer.nonce):
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
        f"markers kept: {sum(report.markers.values())}, from writers {writers}, which may be "
        "paused or still have a request in flight. If you know that they ended some hours ago: "
        f"holdfast gc {root} {options}"
    ]


# With --damaged


def _remove_damaged(root: str, folder: str, *, is_sure: bool) -> Answer:
    """Show what is known of a checkpoint with a damaged manifest; delete it if `is_sure`."""
    from holdfast.maintenance.delete import delete_damaged, examine_damaged  # loads numpy

    folder = folder.rstrip("/")
    store = open_root(root)
    damaged = examine_damaged(store, folder)
    warnings = _other_tier(bare(store), folder)
    said: list[str] = []
    why = delete_damaged(store, folder, emit=emitter(said)) if is_sure else None
    has_marker = bool(store.children(folder)) and why == ""
    document = GcDamaged(
        root=store.url,
        folder=folder,
        why=damaged.why,
        files=[FileSize(name=name, nbytes=nbytes) for name, nbytes in damaged.files],
        nbytes=damaged.nbytes,
        pinned=damaged.pinned,
        tags=damaged.tags,
        is_latest=damaged.is_latest,
        resumes_from=damaged.goes_on_from,
        warnings=[*warnings, *said],
        deleted=why == "",
        kept_because=why or None,
        marker=has_marker,
    )
    if why is None:
        end = f"nothing was deleted. To delete it: holdfast gc {root} --damaged {folder} --yes"
    elif why:
        end = f"kept: {why}"
    else:
        marker = "; a marker is kept, as after `holdfast gc`" if has_marker else ""
        end = f"deleted; {format_nbytes(damaged.nbytes)} freed{marker}"
    code = Code.OK if why == "" else Code.FOUND
    return Answer(document=document, parts=[*_format_damage(document), *warnings, end], code=code)


def _other_tier(store: Store, folder: str) -> list[str]:
    """Check the run's other tier; return warnings, or raise if it has or may have `folder`."""
    tiers = read_if_there(store, layout.TIERS, TiersRecord.decode)
    if tiers is None:
        return [_TIERED] if _is_tiered(store) else []
    from holdfast.root.byte_ranges import read_listing  # loads numpy

    try:
        remote = open_root_store(tiers.remote)
        if not is_root(remote):
            raise NoCheckpoint(f"{remote.url}: no root of Holdfast; is it mounted?")
        listing = read_listing(remote, folder)
    except UnsupportedVersion:
        raise
    except FormatError:
        return []  # damaged in the other tier, too
    except HoldfastError as error:
        raise StoreError(
            f"{folder}: nothing was deleted. Could not check whether {tiers.remote} has an intact "
            f"copy: {error}"
        ) from error
    if isinstance(listing, Manifest | Visible):
        raise UsageError(
            f"{folder}: nothing was deleted, because {tiers.remote} has a copy. A resume with both "
            "tiers repairs the checkpoint from it"
        )
    return []


_TIERED = (
    "the run has two tiers, and this root does not name the other one. Look there before you "
    "delete a checkpoint of which it has an intact copy"
)


def _is_tiered(store: Store) -> bool:
    """Whether the newest readable claim is that of a run with two tiers."""
    catalog = Catalog(store)
    for epoch in catalog.claims():
        with suppress(FormatError):
            claim = catalog.writer(epoch)
            if claim is not None:
                return claim.tiered
    return False


def _format_damage(damaged: GcDamaged) -> list[str]:
    marks = [f"tagged {tag}" for tag in damaged.tags]
    marks += ["pinned"] if damaged.pinned else []
    marks += ["it is the latest checkpoint"] if damaged.is_latest else []
    before = damaged.resumes_from
    return [
        f"{damaged.folder}: {'; '.join([damaged.why, *marks])}",
        *(f"  {file.name}  {format_nbytes(file.nbytes)}" for file in damaged.files),
        f"without it the run resumes from {before}"
        if before
        else "the run cannot resume from any other checkpoint",
    ]
