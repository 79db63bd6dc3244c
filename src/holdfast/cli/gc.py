"""`holdfast gc`: remove files that no manifest lists.

With `--damaged`: show a checkpoint whose manifest cannot be read, and delete it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from holdfast.care.damaged import Damaged, delete, examine
from holdfast.care.gc import GcReport, collect
from holdfast.cli.output import Answer, Code, say_event, size
from holdfast.cli.target import inner, open_root, opened
from holdfast.engine.claims.claim import is_closed, is_live
from holdfast.engine.claims.process import liveness
from holdfast.engine.roots.catalog import Catalog, is_root
from holdfast.engine.roots.documents import read_if_there
from holdfast.engine.tiers.pieces import read_listing
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
from holdfast.store.base import Store


def clean(root: str, *, dry_run: bool, dead_epochs: Collection[int]) -> Answer:
    """Remove uncommitted attempts and leftovers of deletions.

    Raises:
        NoCheckpoint: not a root.
        UsageError: an epoch named as dead is alive on this host, or never existed.
    """
    store = inner(open_root(root))  # no key is needed to see what is not committed
    for epoch in dead_epochs:
        _check_dead(store, epoch)
    report = collect(store, dry_run=dry_run, dead_epochs=dead_epochs, emit=Emitter((say_event,)))
    document = {
        "root": store.url,
        "dry_run": dry_run,
        "removed": _pairs(report.removed),
        "marked": _pairs(report.marked),
        "kept": _pairs(report.kept),
        "failed": _pairs(report.failed),
        "markers": [{"epoch": e, "number": number} for e, number in sorted(report.markers.items())],
        "nbytes": report.nbytes,
    }
    code = Code.FOUND if report.failed else Code.OK
    return Answer(document=document, parts=_lines(report, root, dry_run), code=code)


def _check_dead(store: Store, epoch: int) -> None:
    newest = Catalog(store).highest_epoch()
    try:
        writer = Catalog(store).writer(epoch)
    except FormatError:
        return  # An unreadable claim is what a person's word is needed for.
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
            "owns the run, and its heartbeat goes on; stop it first"
        )


def _lines(report: GcReport, root: str, dry_run: bool) -> list[str]:
    verbs = ("would remove", "would mark") if dry_run else ("removed", "marked")
    lines = [f"{verbs[0]} {folder}: {why}" for folder, why in report.removed]
    lines += [f"{verbs[1]} {folder}: {why}" for folder, why in report.marked]
    lines += [f"kept {folder}: {why}" for folder, why in report.kept]
    lines += [f"FAILED {folder}: {why}" for folder, why in report.failed]
    lines += [f"to look at {name}: holdfast gc {root} --damaged {name}" for name in report.damaged]
    total = f"{size(report.nbytes)} {'to give' if dry_run else 'given'} back"
    return [*lines, total if lines else "nothing to remove", *_marker_lines(report, root)]


def _marker_lines(report: GcReport, root: str) -> list[str]:
    """List attempts that stay because their writer's end cannot be proved."""
    if not report.markers:
        return []
    epochs = sorted(report.markers)
    writers = ", ".join(map(str, epochs))
    options = " ".join(f"--dead-epoch {epoch}" for epoch in epochs)
    return [
        f"markers that stay: {sum(report.markers.values())}, of writers {writers}, "
        "which may be paused, or have a request on the way. Where you know that they ended, and "
        f"some hours ago: holdfast gc {root} {options}"
    ]


def _pairs(items: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"folder": folder, "why": why} for folder, why in items]


def remove(root: str, folder: str, *, is_sure: bool) -> Answer:
    """Show what is known of a checkpoint with a damaged manifest; delete it if `is_sure`.

    Raises:
        NoCheckpoint: not a root, or no such folder.
        UsageError: the manifest is intact, or the other tier has the checkpoint.
        UnsupportedVersion: a newer Holdfast wrote the manifest, here or in the other tier.
        SealError: a key is needed.
        StoreError: the other tier cannot be read.
        OwnedElsewhere: a live process owns the run.
    """
    folder = folder.rstrip("/")
    store = open_root(root)
    damaged = examine(store, folder)
    warnings = _other_tier(inner(store), folder)
    why = delete(store, folder, emit=Emitter((say_event,))) if is_sure else None
    has_marker = bool(store.children(folder)) and why == ""
    document = {
        "root": store.url,
        "folder": folder,
        "why": damaged.why,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in damaged.files],
        "nbytes": damaged.nbytes,
        "pinned": damaged.pinned,
        "tags": list(damaged.tags),
        "is_latest": damaged.is_latest,
        "goes_on_from": damaged.goes_on_from,
        "warnings": warnings,
        "deleted": why == "",
        "kept_because": why or None,
        "marker": has_marker,
    }
    if why is None:
        end = f"nothing was deleted. To delete it: holdfast gc {root} --damaged {folder} --yes"
    elif why:
        end = f"kept: {why}"
    else:
        marker = "; a marker stays, as after `holdfast gc`" if has_marker else ""
        end = f"deleted; {size(damaged.nbytes)} given back{marker}"
    code = Code.OK if why == "" else Code.FOUND
    return Answer(document=document, parts=[*_damaged_lines(damaged), *warnings, end], code=code)


def _other_tier(store: Store, folder: str) -> list[str]:
    """Return warnings for a run with two tiers; raise if the other may have it undamaged."""
    tiers = read_if_there(store, layout.TIERS, TiersRecord.decode)
    if tiers is None:
        return [_TIERED] if _is_tiered(store) else []
    try:
        remote = opened(tiers.remote)
        if not is_root(remote):
            raise NoCheckpoint(f"{remote.url}: no root of Holdfast; is it mounted?")
        listing = read_listing(remote, folder)
    except UnsupportedVersion:
        raise
    except FormatError:
        return []  # damaged there, too
    except HoldfastError as error:
        raise StoreError(
            f"{folder}: nothing was deleted, for {tiers.remote}, which may have it whole, cannot "
            f"be asked: {error}"
        ) from error
    if isinstance(listing, Manifest | Visible):
        raise UsageError(
            f"{folder}: nothing was deleted, for {tiers.remote} has it: a resume with both tiers "
            "that reads it mends it from there"
        )
    return []


_TIERED = (
    "the run has two tiers, and nothing here names the other: look there first, and delete nothing "
    "that is whole there"
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


def _damaged_lines(damaged: Damaged) -> list[str]:
    marks = [f"tagged {tag}" for tag in damaged.tags]
    marks += ["pinned"] if damaged.pinned else []
    marks += ["the latest"] if damaged.is_latest else []
    before = damaged.goes_on_from
    return [
        f"{damaged.folder}: {'; '.join([damaged.why, *marks])}",
        *(f"  {name}  {size(nbytes)}" for name, nbytes in damaged.files),
        f"without it the run goes on from {before}"
        if before
        else "no other checkpoint is there from which the run could go on",
    ]
