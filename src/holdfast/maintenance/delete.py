"""Deletion of one checkpoint, or of components of it, at a user's request.

Nothing is deleted before what the run goes on from instead was read back and found whole, as for
retention (docs/design.md, rule 4). Pins, tags and being the latest keep a checkpoint unless the
user says otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.encryption.manifests import REDACTED
from holdfast.encryption.store import bare
from holdfast.errors import CorruptData, NoCheckpoint, OutcomeUnknown, UsageError, listing
from holdfast.events import Emitter
from holdfast.maintenance.delete_damaged import expect_nothing_left_behind
from holdfast.maintenance.prune import standing
from holdfast.maintenance.verify import verify
from holdfast.ownership.claim import Choice, Claim, Wait, dropped
from holdfast.ownership.deletion import Removal, retract, thin
from holdfast.ownership.leases import Readers
from holdfast.ownership.owner import Ownership
from holdfast.root.attempts import latest_of
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import check_ownership, kept_of_others, name_latest, sync_checkpoint
from holdfast.root.remaining import parts_of
from holdfast.root.upload_records import NotedUploads
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """A deletion that a user asks for, and what is known about it."""

    entry: Entry
    components: tuple[str, ...] = ()
    """Components to drop; empty: the whole checkpoint is to be deleted."""
    nbytes: int
    """Bytes that it frees."""
    keeps: tuple[str, ...]
    """Why the checkpoint is kept unless the user says otherwise: a pin, tags."""
    is_latest: bool
    """Whether the run would resume from this checkpoint, or `latest` names it."""
    goes_on_from: Entry | None
    """Checkpoint from which the run would resume afterwards; None: there is no such checkpoint."""
    waits_for: str
    """Why it cannot be deleted now, such as a reader; empty if it can."""


def examine(store: Store, entry: Entry, components: Sequence[str] = ()) -> DeletionPlan:
    """Find out what deleting a checkpoint, or components of it, would do. Writes nothing."""
    marks, manifest = entry.marks, entry.manifest
    nbytes = parts_of(store, entry.folder, manifest, marks).nbytes
    if components:
        _expect_components(entry, components)
        gone = parts_of(store, entry.folder, manifest, marks).gone
        nbytes = sum(manifest.components[name].nbytes for name in components if name not in gone)
    point, after = standing(store).point, standing(store, without=entry.folder).point
    is_latest = latest_of(store) == entry.folder
    is_latest = is_latest or (point is not None and point.folder == entry.folder)
    if is_latest and after is None and not components:
        expect_nothing_left_behind(Catalog(store), entry.folder)
    leases = Readers(store).find_leases(entry.folder)
    return DeletionPlan(
        entry=entry,
        components=tuple(components),
        nbytes=nbytes,
        keeps=(
            *(["it is pinned"] if marks.pinned else []),
            *(f"it is tagged {tag}" for tag in entry.tags),
        ),
        is_latest=is_latest,
        goes_on_from=Catalog(store).find_checkpoint(after.folder) if after is not None else None,
        waits_for=NotedUploads(store).holds(entry)
        or (f"{leases[0].who} reads it" if leases else ""),
    )


def _expect_components(entry: Entry, components: Sequence[str]) -> None:
    known = entry.manifest.components
    if unknown := [name for name in components if name not in known]:
        raise UsageError(
            f"{entry.folder}: nothing was dropped. It has no {', '.join(unknown)}; there are "
            f"{', '.join(sorted(known))}"
        )
    if {*components} >= {*known}:
        raise UsageError(
            f"{entry.folder}: nothing was dropped, for nothing would be left. To delete the whole "
            "checkpoint: holdfast rm"
        )


def delete_as_planned(
    store: Store, asked: DeletionPlan, *, reason: str, emit: Emitter, watch: Wait | None = None
) -> str:
    """Delete or thin a checkpoint as `examine` described it; return why it was kept, or "".

    Whatever keeps it (`keeps`, `is_latest`) is overridden: the caller has asked the user. Claims
    the run meanwhile, and watches leases of readers on other hosts as `prune` does.
    """
    folder, base = asked.entry.folder, asked.goes_on_from
    readers = Readers(store)
    readers.watch_leases({folder}, wait=watch or threading.Event().wait, emit=emit)
    if leases := readers.find_leases(folder):  # check before the mark, which blocks new readers
        return f"{leases[0].who} reads it"
    _expect_nothing_new(store, asked)
    if base is not None:
        _expect_whole(store, base)
    owner = Ownership(store, takeover=False, emit=emit)
    owner.claim_ownership(_choose_after_delete(store, asked, reason))
    claim = owner.claim
    assert claim is not None
    try:
        if base is not None:
            sync_checkpoint(store, base.folder)
        removal = _carry_out(store, asked, claim, reason, readers)
    except OutcomeUnknown:
        owner.is_clean = False
        raise
    finally:
        owner.release_run()
    if not removal.is_done:
        who = removal.leases[0].who if removal.leases else ""
        why = f"{who} reads it" if who else "it was pinned, tagged or deleted meanwhile"
        return why + _moved(asked)
    if removal.left:
        emit("warning", kept_of_others(store, folder, removal.left))
    if not asked.components:
        readers.tidy(folder)
    return ""


def _moved(asked: DeletionPlan) -> str:
    """Say that the claim has moved the run, though nothing was deleted after it."""
    if not asked.is_latest or asked.components:
        return ""
    base = "anew" if asked.goes_on_from is None else f"from {asked.goes_on_from.folder}"
    return f"; but the run begins {base} from now on, unless it resumes this one by name"


def _carry_out(
    store: Store, asked: DeletionPlan, claim: Claim, reason: str, readers: Readers
) -> Removal:
    folder, even_held = asked.entry.folder, bool(asked.keeps)
    if asked.components:
        return thin(
            store,
            folder,
            asked.components,
            epoch=claim.epoch,
            reason=reason,
            readers=readers,
            even_held=even_held,
        )
    if latest_of(store) == folder:
        # Before the tombstone: `latest` must not name what is gone.
        check_ownership(store, claim.epoch, committed=False)
        name_latest(store, None if asked.goes_on_from is None else asked.goes_on_from.folder)
    return retract(store, folder, claim=claim, reason=reason, readers=readers, even_held=even_held)


def complete_deletion(store: Store, folder: str, *, emit: Emitter) -> None:
    """Remove what an interrupted deletion left of a checkpoint whose tombstone is there."""
    owner = Ownership(store, takeover=False, emit=emit)
    owner.claim_ownership(_standings(store))
    assert owner.claim is not None
    try:
        removal = retract(store, folder, claim=owner.claim, reason="", readers=Readers(store))
        if removal.left:
            emit("warning", kept_of_others(store, folder, removal.left))
    finally:
        owner.release_run()


def _expect_nothing_new(store: Store, asked: DeletionPlan) -> None:
    """Raise `NoCheckpoint` if the checkpoint or its marks changed since the user was asked."""
    fresh = Catalog(store).entry(asked.entry.name)
    if fresh is None:
        raise NoCheckpoint(f"{store.url}/{asked.entry.folder}: it was deleted in the meantime")
    if (fresh.tags, fresh.marks.pinned) != (asked.entry.tags, asked.entry.marks.pinned):
        raise NoCheckpoint(
            f"{store.url}/{asked.entry.folder}: its pin or tags have changed; nothing was "
            "deleted. Give the command again"
        )


def _expect_whole(store: Store, base: Entry) -> None:
    """Raise `CorruptData` unless a checkpoint is whole, read back in full."""
    report = verify(store, base.folder)
    if report.of_state:
        raise CorruptData(
            f"nothing was deleted: {base.folder}, from which the run would resume, cannot be "
            "read back:\n" + listing([str(problem) for problem in report.of_state])
        )


def _standings(store: Store) -> Iterator[Choice]:
    while True:
        yield standing(store)


def _choose_after_delete(store: Store, asked: DeletionPlan, reason: str) -> Iterator[Choice]:
    """Yield, for each try to claim, the checkpoint to resume from afterwards.

    Marked as a rollback if that is another one than before, so that what an earlier rollback left
    behind stays so. The reason is recorded in the claim, which stays when all else is gone.
    """
    what = f"dropped {', '.join(asked.components)} of" if asked.components else "deleted"
    told = reason if bare(store) is store else REDACTED
    purpose = f"{what} {asked.entry.folder}: {told}"
    folder = asked.entry.folder
    expected = asked.goes_on_from.folder if asked.goes_on_from is not None else None
    while True:
        choice = standing(store)
        after = standing(store, without=folder)
        if (after.point.folder if after.point is not None else None) != expected:
            raise NoCheckpoint(
                f"{store.url}: the run has continued; nothing was deleted. Give the command again"
            )
        stands_on_it = choice.point is not None and choice.point.folder == folder
        if stands_on_it and not asked.components:
            choice = replace(after, is_rollback=True)
        yield replace(choice, purpose=purpose)


def already_dropped(store: Store, entry: Entry, components: Sequence[str]) -> bool:
    """Whether all of these components were dropped before, with all of their files."""
    _expect_components(entry, components)
    lost = dropped(store, entry.folder, entry.manifest, entry.marks)
    gone = parts_of(store, entry.folder, entry.manifest, entry.marks).gone
    return {*components} <= {*lost} & {*gone}
