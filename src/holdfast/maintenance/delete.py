"""Deletion from outside a run, at a user's request: by a rule, by name, or of a damaged one.

Each function claims the run while it deletes, and releases it; a claim that never commits changes
nothing for the next resume (docs/design.md, rule 2). Nothing is deleted before the checkpoint from
which the run would resume instead was read back and found whole, as for retention (rule 4), unless
the deleted one is damaged. Pins, tags and being the latest keep a checkpoint unless the user says
otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from holdfast.encryption.files import REDACTED
from holdfast.encryption.store import bare, sealed
from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    OutcomeUnknown,
    SealError,
    UnsupportedVersion,
    UsageError,
    listing,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.envelope import Visible
from holdfast.format.history import HistoryEvent
from holdfast.format.manifest import Deleted, Manifest
from holdfast.maintenance.resume_plan import standing
from holdfast.maintenance.retention import Deleter, PlannedDecision, Pruned, plan_retention
from holdfast.ownership.claim import Choice, Claim, Wait, dropped
from holdfast.ownership.deletion import (
    Removal,
    delete_checkpoint,
    delete_unreadable_checkpoint,
    thin,
)
from holdfast.ownership.leases import Readers
from holdfast.ownership.owner import Ownership
from holdfast.policy.retention import unmet
from holdfast.policy.rule import MAIN, Rule, savers_of
from holdfast.root.attempts import latest_of
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import check_ownership, kept_of_others, name_latest, sync_checkpoint
from holdfast.root.history_writer import HistoryWriter
from holdfast.root.remaining import parts_of
from holdfast.root.upload_records import NotedUploads, expect_all_files_here
from holdfast.store.base import Store


@contextmanager
def _claimed(
    store: Store, choices: Iterator[Choice], emit: Emitter
) -> Iterator[tuple[Ownership, Claim]]:
    """Claim the run for the deletions of the `with` block, and release it."""
    expect_all_files_here(store)
    owner = Ownership(store, takeover=False, emit=emit)
    owner.claim_ownership(choices)
    assert owner.claim is not None
    try:
        yield owner, owner.claim
    except OutcomeUnknown:
        owner.is_clean = False
        raise
    finally:
        owner.release_run()


def _record_deletions(
    store: Store, claim: Claim, deleted: Sequence[tuple[str, int | None, str]], emit: Emitter
) -> None:
    """Record the deletions of (folder, step, reason) in the history; a failure is a warning."""
    if not deleted or sealed(store) is not None:
        return
    writer = HistoryWriter(
        store, epoch=claim.epoch, nonce=claim.nonce, resumed_from=claim.resumed_from
    )
    for folder, step, why in deleted:
        event = HistoryEvent(
            what="deleted", time=round(time.time(), 3), step=step, folder=folder, why=why[:500]
        )
        writer.add_event(event)
    try:
        store.make_folder(layout.HISTORY)
        writer.put_segments()
    except HoldfastError as error:
        emit("warning", f"{store.url}: the deletions are not in the history of the run: {error}")


def _watch_readers(
    store: Store, folders: Collection[str], emit: Emitter, watch: Wait | None
) -> Readers:
    """Watch the leases on these checkpoints; `watch(seconds)` waits instead of the clock."""
    readers = Readers(store)
    readers.watch_leases(folders, wait=watch or threading.Event().wait, emit=emit)
    return readers


def _standings(store: Store) -> Iterator[Choice]:
    """Yield, for each try to claim, the checkpoint from which the run would resume."""
    while True:
        yield standing(store)


# By a rule ---------------------------------------------------------------------------------------


def preview(
    store: Store, rule: Rule, *, known: Mapping[str, Manifest] | None = None
) -> tuple[PlannedDecision, ...]:
    """Plan which checkpoints `prune_checkpoints` would delete now. Writes nothing."""
    expect_all_files_here(store)
    catalog = Catalog(store)
    point = standing(store).point
    attempts = (name.epoch for name in catalog.attempts())
    epoch = catalog.highest_epoch() or max(attempts, default=0)
    resumed_from = point.order if point else None
    entries, _ = catalog.survey(known=known)
    planned = plan_retention(catalog, entries, rule, epoch=epoch, resumed_from=resumed_from)
    known_savers = {MAIN}.union(*(item.decision.entry.savers for item in planned))
    if strangers := savers_of(rule) - known_savers:
        raise UsageError(
            f"{store.url}: nothing was deleted, because no saver is called "
            f"{', '.join(sorted(strangers))}; there are {', '.join(sorted(known_savers))}"
        )
    if lacks := unmet([item.decision.entry for item in planned], rule):
        raise UsageError(
            f"{store.url}: nothing was deleted, because the rule needs values that no checkpoint "
            "has: " + "; ".join(f"{part!r} needs {what}" for part, what in lacks.items())
        )
    return planned


def prune_checkpoints(
    store: Store, rule: Rule, *, emit: Emitter, watch: Wait | None = None
) -> Pruned:
    """Apply a retention rule once; claims the run while it deletes, if there is work.

    Checkpoints that are being read or wait for their upload stay. `watch(seconds)` waits to see
    whether readers on other hosts renew their leases.
    """
    planned = preview(store, rule)
    work = {item.entry.folder for item in planned if item.decision.drop or not item.decision.keep}
    if not work:
        return Pruned(planned=planned)
    readers = _watch_readers(store, work, emit, watch)
    deleter = Deleter(store, rule, Emitter(()), readers=readers, waiting=NotedUploads(store))
    with _claimed(store, _standings(store), emit) as (owner, claim):
        try:
            deleter.carry_out(claim, has_committed=False)
        finally:
            owner.is_clean = deleter.report.is_clean
            deleted = [
                (item.entry.folder, item.entry.step, item.decision.reason)
                for item in deleter.report.planned
                if item.entry.folder in deleter.report.deleted
            ]
            _record_deletions(store, claim, deleted, emit)
    return deleter.report


# By name -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """A deletion that a user asks for, and what is known about it."""

    entry: Entry
    components: tuple[str, ...] = ()
    """Components to drop; empty: the whole checkpoint is to be deleted."""
    nbytes: int
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
    expect_all_files_here(store)
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
            f"{entry.folder}: nothing was dropped, because these are all of its components. "
            "To delete the whole checkpoint: holdfast rm"
        )


def delete_as_planned(
    store: Store, asked: DeletionPlan, *, reason: str, emit: Emitter, watch: Wait | None = None
) -> str:
    """Delete or thin a checkpoint as `examine` described it; return why it was kept, or "".

    Whatever keeps it (`keeps`, `is_latest`) is overridden: the caller has asked the user. Claims
    the run meanwhile, and watches leases of readers on other hosts as `prune` does.
    """
    folder, base = asked.entry.folder, asked.goes_on_from
    readers = _watch_readers(store, {folder}, emit, watch)
    if leases := readers.find_leases(folder):  # check before the mark, which blocks new readers
        return f"{leases[0].who} reads it"
    _expect_nothing_new(store, asked)
    if base is not None:
        _expect_whole(store, base)
    with _claimed(store, _choose_after_delete(store, asked, reason), emit) as (_, claim):
        if base is not None:
            sync_checkpoint(store, base.folder)
        removal = _carry_out(store, asked, claim, reason, readers)
        if removal.is_done and not asked.components:
            _record_deletions(store, claim, [(folder, asked.entry.step, reason)], emit)
    if not removal.is_done:
        who = removal.leases[0].who if removal.leases else ""
        why = f"{who} reads it" if who else "it has since been pinned, tagged or deleted"
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
            claim=claim,
            reason=reason,
            readers=readers,
            even_held=even_held,
        )
    if latest_of(store) == folder:
        # Before the tombstone: `latest` must not name what is gone.
        check_ownership(store, claim.epoch, committed=False)
        name_latest(store, None if asked.goes_on_from is None else asked.goes_on_from.folder)
    return delete_checkpoint(
        store, folder, claim=claim, reason=reason, readers=readers, even_held=even_held
    )


def complete_deletion(store: Store, folder: str, *, emit: Emitter) -> None:
    """Remove what an interrupted deletion left of a checkpoint whose tombstone is there."""
    with _claimed(store, _standings(store), emit) as (_, claim):
        removal = delete_checkpoint(store, folder, claim=claim, reason="", readers=Readers(store))
        if removal.left:
            emit("warning", kept_of_others(store, folder, removal.left))


def _expect_nothing_new(store: Store, asked: DeletionPlan) -> None:
    """Raise `NoCheckpoint` if the checkpoint or its marks changed since the user was asked."""
    fresh = Catalog(store).entry(asked.entry.name)
    if fresh is None:
        raise NoCheckpoint(f"{store.url}/{asked.entry.folder}: it was deleted in the meantime")
    if (fresh.tags, fresh.marks.pinned) != (asked.entry.tags, asked.entry.marks.pinned):
        raise NoCheckpoint(
            f"{store.url}/{asked.entry.folder}: its pin or tags have changed; nothing was "
            "deleted. Run the command again"
        )


def _expect_whole(store: Store, base: Entry) -> None:
    """Raise `CorruptData` unless a checkpoint is whole, read back in full."""
    from holdfast.maintenance.verify import verify  # needs numpy; a dry run of `prune` does not

    report = verify(store, base.folder)
    if report.of_state:
        raise CorruptData(
            f"nothing was deleted: {base.folder}, from which the run would resume, cannot be "
            "read back:\n" + listing([str(problem) for problem in report.of_state])
        )


def _choose_after_delete(store: Store, asked: DeletionPlan, reason: str) -> Iterator[Choice]:
    """Yield, for each try to claim, the checkpoint to resume from afterwards; maybe a rollback."""
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
                f"{store.url}: the run has continued; nothing was deleted. Run the command again"
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


# Of damaged checkpoints --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """Description of a checkpoint whose manifest is damaged or lost."""

    folder: str
    why: str
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of each file in the folder."""
    pinned: bool
    tags: tuple[str, ...]
    is_latest: bool
    """Whether the file `latest` names this checkpoint."""
    goes_on_from: str | None
    """Folder of the checkpoint that the run would resume from after the deletion, judged by
    manifests alone; None: no such checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the checkpoint."""
        return sum(nbytes for _, nbytes in self.files)


def examine_damaged(store: Store, folder: str) -> Damaged:
    """Describe a checkpoint whose manifest is damaged or lost. Writes nothing."""
    expect_all_files_here(store)
    if layout.parse_attempt(folder) is None:
        raise UsageError(
            f"{folder!r} is not the name of a checkpoint's folder; `holdfast ls` lists the names"
        )
    files = tuple(
        (info.key.removeprefix(f"{folder}/"), info.nbytes) for info in store.list(f"{folder}/")
    )
    if not files:
        raise NoCheckpoint(f"{store.url}/{folder}: there is no such folder, or it is empty")
    catalog = Catalog(store)
    try:
        register = catalog.read(folder)
    except UnsupportedVersion:
        raise
    except FormatError as error:
        _expect_its_own(store, folder)
        marks, point = catalog.marks(folder), standing(store).point
        if point is None:
            expect_nothing_left_behind(catalog, folder)
        return Damaged(
            folder=folder,
            why=str(error),
            files=files,
            pinned=marks.pinned,
            tags=marks.tags,
            is_latest=latest_of(store) == folder,
            goes_on_from=point.folder if point is not None else None,
        )
    if isinstance(register, Manifest):
        raise UsageError(
            f"{folder}: nothing was deleted, because its manifest is intact; `holdfast prune` "
            "deletes by a rule"
        )
    what = "was deleted" if isinstance(register, Deleted) else "never became a checkpoint"
    raise UsageError(f"{folder}: it {what}; `holdfast gc` without --damaged removes what is left")


def _expect_its_own(store: Store, folder: str) -> None:
    """Raise `UsageError` if the manifest names another folder: this one was renamed."""
    from holdfast.root.byte_ranges import read_listing  # loads numpy, which `prune` does not need

    try:
        listing = read_listing(bare(store), folder)
    except FormatError:
        return
    if isinstance(listing, Manifest | Visible):
        name = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
        if str(name) != folder:
            raise UsageError(
                f"{folder}: nothing was deleted, because its manifest is intact and belongs in a "
                f"folder named {name}; rename it"
            )


def expect_nothing_left_behind(catalog: Catalog, folder: str) -> None:
    """Raise `UsageError` if, without `folder`, resume would use an abandoned checkpoint."""
    entries = (entry for entry in catalog.checkpoints() if entry.folder != folder)
    left = [entry.folder for entry in entries if not entry.manifest.lacks]
    if left:
        raise UsageError(
            f"{folder}: nothing was deleted. A rollback has left {left[0]} behind, and without "
            "this folder the next resume would use it. First resume the right folder, as in "
            f"resume({left[0]!r})"
        )


def delete_damaged(store: Store, folder: str, *, emit: Emitter, watch: Wait | None = None) -> str:
    """Delete a checkpoint whose manifest is damaged; return why it was kept, or an empty text.

    Claims the run meanwhile and watches leases of readers on other hosts, as `prune` does. After
    the deletion the run resumes from `goes_on_from`, also where it had been rolled back to the
    deleted checkpoint; checkpoints that the rollback abandoned stay abandoned.
    """
    damaged = examine_damaged(store, folder)
    readers = _watch_readers(store, {folder}, emit, watch)
    if leases := readers.find_leases(folder):  # check before the mark, which blocks new readers
        return f"{leases[0].who} reads it"
    with _claimed(store, _choose_without(store, folder), emit) as (_, claim):
        why, left = delete_unreadable_checkpoint(
            store,
            folder,
            claim=claim,
            reason="a person named it: its manifest could not be read",
            readers=readers,
        )
        if not why and damaged.is_latest:
            name_latest(store, damaged.goes_on_from)
        if left:
            emit("warning", kept_of_others(store, folder, left))
    if not why:
        readers.tidy(folder)
    return why


def _choose_without(store: Store, folder: str) -> Iterator[Choice]:
    """Yield, for each try to claim, the checkpoint to resume from once `folder` is deleted."""
    while True:
        choice = standing(store)
        stands_on_it = choice.point is not None and _newest_of_lineage(store) == folder
        yield replace(choice, is_rollback=True) if stands_on_it else choice


def _newest_of_lineage(store: Store) -> str | None:
    """Return the newest folder of the lineage that holds a checkpoint, damaged or not."""
    catalog = Catalog(store)
    for name in map(str, catalog.lineage()):
        try:
            if isinstance(catalog.read(name), Manifest):
                return name
        except (FormatError, SealError):
            return name
    return None
