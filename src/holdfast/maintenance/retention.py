"""Deletion of what the retention rule does not keep, one checkpoint at a time, oldest first.

Whole checkpoints are deleted first, then components of some that stay. A dry run calls
`plan_retention` only. The steps of one deletion are in `ownership.deletion`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    OutcomeUnknown,
    StoreError,
    Superseded,
)
from holdfast.events import Emitter
from holdfast.format.manifest import Deleted, Manifest, encode_manifest
from holdfast.format.records import WriterRecord
from holdfast.ownership.annotations import reject
from holdfast.ownership.claim import Claim, dropped
from holdfast.ownership.deletion import delete_checkpoint, thin
from holdfast.ownership.leases import FoundLease, Readers
from holdfast.policy.retention import Decision, judge, may_rest_on, renamed, unmet
from holdfast.policy.rule import MAIN, Candidate, Rule, flat
from holdfast.policy.rules import Best
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import kept_of_others, sync_checkpoint
from holdfast.root.remaining import parts_of
from holdfast.store.base import Store, is_one_file

_MANY_UNMEASURED = 3
"""Checkpoints without a metric from which a rule that needs it is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDecision:
    """A retention decision and the checkpoint that it is about."""

    entry: Entry
    decision: Decision

    @property
    def nbytes(self) -> int:
        """Bytes of tensors and trees that carrying out the decision frees."""
        if not self.decision.keep:
            return self.decision.entry.nbytes
        parts = self.entry.manifest.components
        return sum(parts[name].nbytes for name in self.decision.drop)


def plan_retention(
    catalog: Catalog,
    entries: Iterable[Entry],
    rule: Rule,
    *,
    epoch: int,
    resumed_from: tuple[int, int] | None,
    replaces: bool = False,
) -> tuple[PlannedDecision, ...]:
    """Decide for each committed checkpoint of this run whether it stays, newest first.
    Leaves out checkpoints of epochs after `epoch`, the caller's: a later writer decides on them.
    Those from before a fresh start are left out too, and so stay.
    """
    lineage = {name.order for name in catalog.lineage()}
    first = catalog.fresh_epoch(anew=False)
    by_order = {entry.order: entry for entry in entries if first <= entry.name.epoch <= epoch}
    decisions = judge(
        [candidate(catalog.store, entry) for entry in by_order.values()],
        rule,
        resumed_from=resumed_from,
        lineage=lineage,
        replaces=replaces,
        share_files=lambda a, b: share_files(catalog.store, by_order[a], by_order[b]),
    )
    return tuple(
        PlannedDecision(entry=by_order[made.entry.order], decision=made) for made in decisions
    )


def share_files(store: Store, one: Entry, other: Entry) -> bool:
    """Whether two checkpoints are hard-linked to a common file, so that damage hits both."""
    if not store.has_links:
        return False
    files = other.manifest.files
    same = (name for name, entry in one.manifest.files.items() if files.get(name) == entry)
    return any(is_one_file(store, f"{one.folder}/{n}", f"{other.folder}/{n}") for n in same)


def candidate(store: Store, entry: Entry) -> Candidate:
    """Describe a checkpoint as the retention rules need it."""
    manifest, marks = entry.manifest, entry.marks
    parts = parts_of(store, entry.folder, manifest, marks)
    return Candidate(
        order=entry.order,
        timestamp=manifest.timestamp,
        created=manifest.created,
        save_class=manifest.save_class,
        nbytes=parts.nbytes,
        metrics=entry.metrics,
        tags=entry.tags,
        pinned=marks.pinned,
        rejected=bool(marks.rejected),
        retired=marks.retired,
        components=parts.whole,
        begun=parts.begun,
        dropped=dropped(store, entry.folder, manifest, marks),
        healthy=not manifest.unhealthy,
        savers=manifest.savers,
        left_out=manifest.left_out,
    )


@dataclass(slots=True, kw_only=True)
class Pruned:
    """Result of applying a retention rule: its decisions, newest first, and the deletions."""

    planned: tuple[PlannedDecision, ...] = ()
    deleted: list[str] = field(default_factory=list)
    thinned: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(folder, why) of deletions that failed, and of checkpoints that were found damaged."""
    is_clean: bool = True
    """Whether every put is known to have ended."""
    postponed: list[tuple[str, str]] = field(default_factory=list)
    """(folder, why) of checkpoints that are being read or uploaded; they stay until the next time.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A deletion that was done: of a checkpoint, or of components of it."""

    folder: str
    reason: str
    components: tuple[str, ...] = ()
    """Those that were dropped; empty: the whole checkpoint was deleted."""


class OtherHosts(Protocol):
    """Interface to the other hosts of a run that each have a part of every checkpoint."""

    def read_back(self, folder: str) -> str:
        """Return what is wrong with a checkpoint's files there; empty if nothing is."""
        ...


class Waiting(Protocol):
    """Interface that vetoes deletions, such as those of checkpoints not uploaded yet."""

    def holds(self, entry: Entry) -> str:
        """Return why a checkpoint must not be deleted yet; empty if it may be."""
        ...


class Deleter:
    """Deletes checkpoints that the rule does not keep, oldest first, while a claim owns the run.

    Nothing is deleted unless a newer checkpoint that stays and stands in for it was read in full
    and found whole: what this process resumed from, or else the newest, which is then read back
    (invariant 4). A checkpoint that is being read waits for the next time; each reader is reported
    once (rule 8).
    """

    others: OtherHosts | None = None
    """Hosts that read their files back, too; None: all files are here."""
    incomplete: Mapping[str, str] = {}
    """By folder, which files no host has: such a checkpoint counts as rejected."""
    _removed: tuple[Removed, ...] = ()

    def __init__(
        self,
        store: Store,
        rule: Rule,
        emit: Emitter,
        *,
        replaces: bool = False,
        is_sent_to: bool = True,
        readers: Readers | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """Create a deleter that has deleted nothing yet.
        With `replaces` a checkpoint replaces older ones of its step. `is_sent_to`: whether the
        root may be the remote tier of a run, where uploads put manifests.
        `waiting` vetoes deletions that the rule asks for."""
        self.store = store
        self._rule = rule
        self.emit = emit
        self._replaces = replaces
        self.is_sent_to = is_sent_to
        self._readers = readers if readers is not None else Readers(store)
        self._waiting = waiting
        self._reported: set[str] = set()
        """Subjects and lease keys that were reported, as each is reported once."""
        self._unclear: frozenset[str] = frozenset()
        self._verified: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        """Cached manifests by folder; they do not change until their deletion begins."""
        self._claims: dict[int, WriterRecord] = {}
        """Claims read under the claim `_claimed`, by epoch. They change only when a run is claimed
        whose two tiers had been claimed apart."""
        self._claimed = 0
        self._failures: dict[str, PlannedDecision] = {}
        """Deletions that failed or did not finish, by folder."""
        self.report = Pruned()

    def take_removed(self) -> tuple[Removed, ...]:
        """Return the deletions since the last call."""
        removed, self._removed = self._removed, ()
        return removed

    def trust(self, entry: Entry) -> None:
        """Mark a checkpoint as verified: the caller has read every byte and found it right."""
        self._verified.add(entry.manifest.save_id)

    def carry_out(
        self, claim: Claim, *, has_committed: bool, unclear: Collection[str] = ()
    ) -> None:
        """Apply the rule: delete what it does not keep now. `plan_retention` gives the same
        decisions.

        A deletion that fails is tried again next time. Until this claim has committed
        (`has_committed`), the checkpoint it resumed from is kept whole. The registers of `unclear`
        folders stay.
        """
        self._unclear = frozenset(unclear)
        point = claim.resumed_from
        keep = point.order if point is not None and not has_committed else None
        if self._claimed != claim.epoch:
            self._claimed, self._claims = claim.epoch, {}
        catalog = Catalog(self.store, claims=self._claims)
        entries, unread = catalog.survey(known=self._manifests)
        for folder, error in unread:
            if self._is_first_time(folder):
                text = f"{folder} is kept, whatever the rule, because it cannot be read: {error}"
                self.emit("warning", text, folder=folder)
        if self.incomplete:
            entries = tuple(map(self._reject_incomplete, entries))
        planned = plan_retention(
            catalog,
            entries,
            self._rule,
            epoch=claim.epoch,
            resumed_from=keep,
            replaces=self._replaces,
        )
        self.report = Pruned(planned=planned)
        self._manifests = {item.entry.folder: item.entry.manifest for item in planned}
        self._report_lacks(planned)
        self._retry_deletions(claim, catalog)
        # Check before any mark is written: a mark stays, and blocks new readers.
        due = [item for item in reversed(planned) if item.decision.drop or not item.decision.keep]
        work = [item for item in due if not self._must_stay(item.entry)]
        damaged: set[str] = set()
        settled: set[str] = set()
        for item in sorted(work, key=lambda item: item.decision.keep):
            base = self._proven_base(item, planned, damaged)
            if base is None:
                continue
            if base.folder not in settled:
                sync_checkpoint(self.store, base.folder)
                settled.add(base.folder)
            self._execute(claim, item)

    def _reject_incomplete(self, entry: Entry) -> Entry:
        lost = self.incomplete.get(entry.folder)
        return replace(entry, marks=replace(entry.marks, rejected=(lost,))) if lost else entry

    def delete_local_copy(
        self, claim: Claim, entry: Entry, *, unclear: Collection[str] = ()
    ) -> None:
        """Delete the copy here of a checkpoint that the other tier was seen to have, even the
        newest; unless it is pinned, tagged, read or waits for its upload. `latest` still names it:
        by that a process that cannot reach the other tier knows that it must not go back.
        """
        if entry.marks.pinned or entry.tags or self._must_stay(entry):
            return
        self._unclear = frozenset(unclear)
        why = "uploaded, and keep_local=0"
        made = Decision(entry=candidate(self.store, entry), keep=False, reason=why)
        self._execute(claim, PlannedDecision(entry=entry, decision=made))

    def _report_lacks(self, planned: Sequence[PlannedDecision]) -> None:
        """Warn of what parts of the rule need and no checkpoint has, once it cannot come late."""
        newest = max((item.entry.step for item in planned), default=0)
        entries = [item.decision.entry for item in planned]
        until = self.emit.first_metrics_at
        # A plain loop may save a few times before it measures.
        is_late = newest > until and (until >= 0 or len(entries) >= _MANY_UNMEASURED)
        lacks = unmet(entries, self._rule, of_metrics=is_late)
        for best, new in renamed([item.decision for item in planned], self._rule):
            if self._is_first_time(f"renamed {best}"):
                names = f" New are {', '.join(map(repr, new[:10]))}: was it renamed?" if new else ""
                self.emit(
                    "warning",
                    f"the rule {str(best)!r} needs the metric {best.metric!r}, which no checkpoint "
                    f"since the last resume has, and keeps all of these.{names} Correct the rule, "
                    "or pass the metric to a save",
                )
        for part, what in lacks.items():
            if self._is_first_time(part):
                self.emit(
                    "warning",
                    f"the rule {part!r} needs {what}, which no checkpoint has. It keeps "
                    "everything until one has: correct the rule, or pass the missing value to a "
                    "save",
                )

    def _retry_deletions(self, claim: Claim, catalog: Catalog) -> None:
        """Retry deletions that stopped half-way; their folders are in no plan any more."""
        for folder, item in [*self._failures.items()]:
            try:
                is_gone = isinstance(catalog.read(folder), Deleted)
            except FormatError:
                # It cannot be read any more: give the retry up; later plans leave it out.
                del self._failures[folder]
                self._manifests.pop(folder, None)
                continue
            if is_gone:
                self._execute(claim, item)

    def _proven_base(
        self, item: PlannedDecision, planned: Sequence[PlannedDecision], damaged: set[str]
    ) -> Entry | None:
        """Find a newer checkpoint that can replace `item`, or read some back to find one."""
        newer = [other.entry for other in planned if may_rest_on(other.decision, item.decision)]
        known = [entry for entry in newer if entry.manifest.save_id in self._verified]
        for entry in (*known, *newer):
            if entry.folder in damaged:
                continue
            is_read_back = self._is_manifest_unchanged if entry in known else self._reads_back_well
            if is_read_back(entry):
                return entry
            damaged.add(entry.folder)
        return None

    def _is_manifest_unchanged(self, entry: Entry) -> bool:
        """Whether the manifest of a verified checkpoint is still as it was when read back."""
        try:
            register = Catalog(self.store).read(entry.folder)
            # As bytes: a metric that is nan is not equal to itself.
            if isinstance(register, Manifest) and encode_manifest(register) == encode_manifest(
                entry.manifest
            ):
                return True
        except FormatError as error:
            self._report_failure(entry, error)
        self._verified.discard(entry.manifest.save_id)
        self._manifests.pop(entry.folder, None)
        return False

    def _reads_back_well(self, entry: Entry) -> bool:
        from holdfast.maintenance.verify import verify  # needs numpy; a dry run does not

        try:
            report = verify(self.store, entry.folder)
        except NoCheckpoint:
            return False  # a writer that took the run over has deleted it
        if not report.of_state:
            why = "" if self.others is None else self.others.read_back(entry.folder)
            if why:
                self._report_failure(entry, StoreError(f"it cannot be read back: {why}"))
                return False
            self.trust(entry)
            return True
        problems = "; ".join(str(problem) for problem in report.of_state[:3])
        if not any(problem.is_damage for problem in report.of_state):
            # A mark would stay; what could not be read may well be read the next time.
            self._report_failure(entry, StoreError(f"it cannot be read back now: {problems}"))
            return False
        self._report_failure(entry, CorruptData(f"read back, it is damaged: {problems}"))
        reject(self.store, entry.folder, by="retention", reason=f"read back: {problems}")
        return False

    def _execute(self, claim: Claim, item: PlannedDecision) -> None:
        """Delete a checkpoint, or thin one that the decision keeps; report what was done."""
        entry, why, is_kept = item.entry, item.decision.reason, item.decision.keep
        components = item.decision.drop if is_kept else ()
        self._failures.pop(entry.folder, None)
        try:
            if is_kept:
                removal = thin(
                    self.store,
                    entry.folder,
                    components,
                    claim=claim,
                    reason=why,
                    readers=self._readers,
                    notes_number=entry.marks.notes_number,
                )
            else:
                self._manifests.pop(entry.folder, None)
                removal = delete_checkpoint(
                    self.store,
                    entry.folder,
                    claim=claim,
                    reason=why,
                    readers=self._readers,
                    is_sent_to=self.is_sent_to,
                    unclear=self._unclear,
                    listed=entry.manifest.files,
                    notes_number=entry.marks.notes_number,
                )
            self._report_readers(entry, removal.leases)
            if removal.is_done:
                self._report_removal(entry, components, why, removal.left)
                self._warn_of_unmeasured(entry.step, item.decision)
        except Superseded:
            raise
        except HoldfastError as error:
            self._failures[entry.folder] = item
            self._report_failure(entry, error)

    def _report_removal(
        self, entry: Entry, components: Sequence[str], why: str, left: Sequence[str]
    ) -> None:
        folder, step = entry.folder, entry.step
        done = Removed(folder=folder, reason=why, components=tuple(components))
        self._removed = (*self._removed, done)
        if components:
            self.report.thinned.append(folder)
            text = f"dropped {', '.join(components)} of {folder}: {why}"
            self.emit("thinned", text, step=step, folder=folder, components=components)
            return
        if left:
            self.emit("warning", kept_of_others(self.store, folder, left))
        self.report.deleted.append(folder)
        text = f"deleted {folder}: {why}"
        self.emit(
            "retracted",
            text,
            step=step,
            folder=folder,
            root=self.store.url,
            reason=why,
            metrics=dict(entry.marks.notes.metrics),
        )
        self._readers.tidy(folder)

    def _warn_of_unmeasured(self, step: int, made: Decision) -> None:
        """Warn, once, that a checkpoint was deleted without the value that a rule waits for."""
        savers = () if made.keep else made.entry.savers or (MAIN,)
        for part, saver, _ in flat(self._rule):
            is_awaited = isinstance(part, Best) and saver in savers and part.awaits(made.entry)
            if is_awaited and self._is_first_time(f"unmeasured {part}"):
                self.emit(
                    "warning",
                    f"the checkpoint of step {step} was deleted before the metric of the rule "
                    f"{str(part)!r} was measured, as newer ones wait for it, too. Is an "
                    "evaluation running that adds this metric?",
                )

    def _must_stay(self, entry: Entry) -> bool:
        """Whether a checkpoint is still needed by an upload or a reader; reported once."""
        why = self._waiting.holds(entry) if self._waiting is not None else ""
        if why and self._is_first_time(entry.folder):
            self._postpone(entry, why)
        if why:
            return True
        leases = self._readers.find_leases(entry.folder)
        self._report_readers(entry, leases)
        return bool(leases)

    def _report_readers(self, entry: Entry, leases: Iterable[FoundLease]) -> None:
        for lease in leases:
            if self._is_first_time(lease.key):
                self._postpone(entry, f"{lease.who} reads it")

    def _report_failure(self, entry: Entry, error: HoldfastError) -> None:
        # The error itself is not kept: with its frames, it would hold a copy of the state.
        self.report.failed.append((entry.folder, str(error)))
        self.report.is_clean = self.report.is_clean and not isinstance(error, OutcomeUnknown)
        text = f"retention of {entry.folder}: {error}"
        self.emit("housekeeping_failed", text, step=entry.step)

    def _postpone(self, entry: Entry, why: str) -> None:
        folder = entry.folder
        self.report.postponed.append((folder, why))
        text = f"{folder} is deleted or thinned later: {why}"
        self.emit("postponed", text, step=entry.step, folder=folder)

    def _is_first_time(self, subject: str) -> bool:
        """Whether this is the first call with this subject."""
        is_first = subject not in self._reported
        self._reported.add(subject)
        return is_first
