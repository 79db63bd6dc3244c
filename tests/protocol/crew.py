"""Savers, claimers, gc, retention, pins and readers: the real code, told what a run would do.

Each function here makes an actor for `scheduler.run`. What people would be told goes into a
`Record`, against which `check` holds the store after every single step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import repeat

from holdfast.errors import (
    CommitConflict,
    NoCheckpoint,
    NotFound,
    OutcomeUnknown,
    Superseded,
)
from holdfast.events import Emitter
from holdfast.format.manifest import ComponentEntry, FileEntry, Manifest, Reference, Timestamp
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.retention import Deleter
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import Choice, Claim, claim_run, dropped, is_being_deleted
from holdfast.ownership.leases import leased
from holdfast.policy.rule import Rule
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import commit, create_attempt
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore

from .scheduler import Actor

_FILES = ("index.json", "model-00000.json", "optimizer-00000.json")
_DIGEST = "blake3:" + "0" * 64
_EMIT = Emitter()
_NEWEST = Last(1)
_COMPONENTS = {
    name: ComponentEntry(kind="tree", files=(f"{name}-00000.json",), nbytes=1, num_tensors=0)
    for name in ("model", "optimizer")
}


@dataclass(slots=True)
class Record:
    """What people were told, and what the store has shown so far."""

    stands: tuple[int, int] | None = None
    """Order of the checkpoint at which the run stands, as last told."""
    epoch: int = 0
    """The epoch that told so."""
    behind: str = ""
    """A resume of the latest that went on from before what had been acknowledged."""
    acknowledged: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    reading: list[str] = field(default_factory=list)
    """Folders that somebody reads under a lease."""
    committed: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    lost_readers: int = 0
    rollbacks: set[tuple[int, int]] = field(default_factory=set)
    """Orders of checkpoints to which a person has asked to roll back."""
    owners: dict[int, str] = field(default_factory=dict)
    """Folders that the owners of epochs went on from."""

    def tell_saved(self, folder: str, order: tuple[int, int]) -> None:
        """A save was acknowledged."""
        self.acknowledged.add(folder)
        if order[0] >= self.epoch:
            self.stands, self.epoch = order, order[0]

    def tell_resumed(self, claim: Claim, *, is_rollback: bool) -> None:
        """A process goes on from a checkpoint."""
        point = claim.resumed_from
        assert point is not None
        self.owners[claim.epoch] = point.folder
        if claim.epoch < self.epoch:
            return
        may_be_older = is_rollback or point.order in self.rollbacks
        if self.stands is not None and point.order < self.stands and not may_be_older:
            self.behind = f"writer {claim.epoch} goes on from {point.order}, not {self.stands}"
        self.stands, self.epoch = point.order, claim.epoch


def first_run(store: Store, record: Record, *, num_saves: int = 2) -> Claim:
    """Claim epoch 1 and save; the start of every scenario."""
    claim = claim_run(store, repeat(Choice(point=None)), takeover=False, emit=_EMIT)
    for sequence in range(1, num_saves + 1):
        save(store, claim, sequence, record)
    return claim


def save(store: Store, claim: Claim, sequence: int, record: Record) -> bool:
    """One save by the engine's protocol; False when its outcome is not a success.

    Raises:
        Superseded: a later writer owns the run.
    """
    attempt = create_attempt(
        store, label="s", epoch=claim.epoch, nonce=claim.nonce, sequence=sequence
    )
    for name in _FILES:
        store.put(f"{attempt.folder}/{name}", b"1", if_absent=True)
    manifest = _manifest(attempt.save_id, claim.epoch, sequence, claim.resumed_from)
    try:
        commit(store, attempt, manifest)
    except (CommitConflict, OutcomeUnknown):
        return False
    record.tell_saved(attempt.folder, manifest.order)
    return True


def _manifest(save_id: str, epoch: int, sequence: int, parent: Reference | None) -> Manifest:
    return Manifest(
        save_id=save_id,
        label="s",
        epoch=epoch,
        sequence=sequence,
        parent=parent,
        timestamp=Timestamp(step=100 * epoch + sequence),
        created="",
        save_class="permanent",
        reason="manual",
        tags=(),
        metrics={},
        world_size=1,
        components=_COMPONENTS,
        block_nbytes=4096,
        files={name: FileEntry(nbytes=1, digest=_DIGEST) for name in _FILES},
        numerics={},
        environment={},
        timings={},
    )


def saver(claim: Claim, record: Record, *, first: int, num_saves: int = 2) -> Actor:
    """An owner that saves, and whose retention keeps one."""

    def actor(store: Store) -> None:
        _work(store, claim, record, first=first, num_saves=num_saves)

    return actor


def _work(store: Store, claim: Claim, record: Record, *, first: int, num_saves: int) -> None:
    has_committed = False
    for sequence in range(first, first + num_saves):
        try:
            has_committed |= save(store, claim, sequence, record)
            _retain(store, claim, has_committed=has_committed or first > 1)
        except Superseded:
            return


def _retain(store: Store, claim: Claim, *, has_committed: bool, rule: Rule = _NEWEST) -> None:
    deleter = Deleter(store, rule, Emitter(()))
    for entry in Catalog(store).checkpoints():
        deleter.trust(entry)  # the files here are dummies that no reading back would accept
    deleter.carry_out(claim, has_committed=has_committed)


def deleter(claim: Claim) -> Actor:
    """An owner whose retention runs."""

    def actor(store: Store) -> None:
        _retain(store, claim, has_committed=True)

    return actor


def thinner(claim: Claim) -> Actor:
    """An owner whose retention drops the optimizer of all but the newest."""

    def actor(store: Store) -> None:
        rule = Last(1) | All().then_drop("optimizer")
        _retain(store, claim, has_committed=True, rule=rule)

    return actor


def taker(
    record: Record, *, rolls_back: bool, num_saves: int = 1, point: Reference | None = None
) -> Actor:
    """A process that takes the run over from the latest, or from the oldest, and then saves.

    `point`: what it has chosen already.
    """
    chosen = point

    def actor(store: Store) -> None:
        choices = [Choice(point=chosen, is_rollback=rolls_back)] if chosen is not None else None

        def choose() -> Choice:
            if choices is None:
                choice = _choose(store, rolls_back=rolls_back)
            elif not choices:
                raise NoCheckpoint("the chosen one is gone")
            else:
                choice = choices.pop()
            if rolls_back and choice.point is not None:
                record.rollbacks.add(choice.point.order)
            return choice

        try:
            claim = claim_run(store, iter(choose, None), takeover=True, emit=_EMIT)
        except (OutcomeUnknown, NoCheckpoint):
            return
        record.tell_resumed(claim, is_rollback=rolls_back)
        _work(store, claim, record, first=1, num_saves=num_saves)

    return actor


def _choose(store: Store, *, rolls_back: bool) -> Choice:
    entries = list(Catalog(store).lineage_entries())
    usable = [entry for entry in entries if _is_usable(store, entry)]
    if not usable:
        raise NoCheckpoint("none")
    passed_over = {entry.folder for entry in entries} - {entry.folder for entry in usable}
    return Choice(
        point=usable[-1 if rolls_back else 0].reference,
        passed_over=frozenset(passed_over),
        is_rollback=rolls_back,
    )


def _is_usable(store: Store, entry: Entry) -> bool:
    if is_being_deleted(store, entry.marks):
        return False
    return not dropped(store, entry.folder, entry.manifest, entry.marks)


def oldest(store: Store) -> Reference:
    """The oldest checkpoint there is."""
    return Catalog(store).checkpoints()[-1].reference


def collector() -> Actor:
    """gc, twice: a late writer may leave something after the first."""

    def actor(store: Store) -> None:
        for _ in range(2):
            collect_garbage(store)

    return actor


def pinner(record: Record) -> Actor:
    """A person pins the oldest checkpoint."""

    def actor(store: Store) -> None:
        entries = Catalog(store).checkpoints()
        if not entries:
            return
        try:
            annotate(store, entries[-1], pinned=True)
        except (NoCheckpoint, OutcomeUnknown):
            return
        record.pinned.add(entries[-1].folder)

    return actor


def reader(record: Record) -> Actor:
    """Somebody looks for a checkpoint that can be read, and looks again when it changes."""

    def actor(store: Store) -> None:
        catalog = Catalog(store)
        before: object = None
        while True:
            seen = []
            for name in catalog.attempts():
                entry = catalog.entry(name)
                if entry is not None and _is_readable(store, entry):
                    return
                seen.append((name, entry is not None))
            if seen == before:
                break
            before = seen
        record.lost_readers += 1

    return actor


def leaser(record: Record) -> Actor:
    """Somebody reads the oldest checkpoint, which must not go meanwhile."""

    def actor(store: Store) -> None:
        entries = Catalog(store).checkpoints()
        if not entries:
            return
        entry = entries[-1]
        try:
            with leased(store, entry.folder):
                lost = dropped(
                    store, entry.folder, entry.manifest, Catalog(store).marks(entry.folder)
                )
                if not lost:
                    record.reading.append(entry.folder)
                    assert _is_readable(store, entry), "V13 what is read under a lease is gone"
                    record.reading.remove(entry.folder)
        except (NoCheckpoint, OutcomeUnknown):
            return

    return actor


def _is_readable(store: Store, entry: Entry) -> bool:
    try:
        return all(store.get(f"{entry.folder}/{name}") for name in entry.manifest.files)
    except NotFound:
        return False


def check(store: MemoryStore, record: Record) -> None:
    """Every invariant that can be seen in the store, after every step."""
    committed = {}
    for name in Catalog(store).attempts():
        folder = str(name)
        register = Catalog(store).read(folder)
        if isinstance(register, Manifest):
            committed[folder] = register
            there = store.children(folder)
            missing = set(register.files) - set(there)
            marked = {component for component, _ in Catalog(store).marks(folder).thinned_by}
            for component in marked:
                missing -= set(register.components[component].files)
            assert not missing, f"V1 {folder} is torn"
            assert folder not in record.finished, f"V2 {folder} is back"
        elif register is not None:
            record.finished.add(folder)
    record.finished |= record.committed - set(committed)
    record.committed |= set(committed)
    assert record.acknowledged <= record.committed, "V3 told OK though nothing was committed"
    assert record.pinned <= set(committed), "V8 a pinned checkpoint is gone"
    for folder in record.reading:
        assert folder in committed, "V13 what is read under a lease is gone"
        missing = set(committed[folder].files) - set(store.children(folder))
        assert not missing, "V13 what is read under a lease is thinned"
    assert not record.lost_readers, "V7 a reader finds nothing"
    assert Catalog(store).head() is not None, "V4 the run stands nowhere"
    _check_owner(store, record, committed)


def _check_owner(store: MemoryStore, record: Record, committed: Mapping[str, Manifest]) -> None:
    epoch = Catalog(store).highest_epoch()
    if epoch in record.owners and all(manifest.epoch < epoch for manifest in committed.values()):
        point = record.owners[epoch]
        assert point in committed, "V5 what the owner resumed from is gone"
        missing = set(committed[point].files) - set(store.children(point))
        assert not missing, "V5 what the owner resumed from is thinned"


def check_standing(store: MemoryStore, record: Record) -> None:
    """At every moment and after it: the run stands where people were told, or at a newer one."""
    assert not record.behind, f"V10 {record.behind}"
    head = Catalog(store).head()
    assert head is not None
    assert record.stands is not None
    is_there = head.order >= record.stands or head.order in record.rollbacks
    assert is_there, f"V4 the run stands at {head.order}, people were told {record.stands}"


def is_lossy(key: str) -> bool:
    """Where the network is bad: manifests, claims and marks, but not the files."""
    return not key.endswith(_FILES)
