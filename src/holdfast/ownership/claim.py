"""Claims on a run: check for a live owner, heartbeats, closes (docs/design.md, rules 2 and 3).

The order of checks and puts is part of the protocol: tests/protocol, tests/ownership/test_claim.py.
`check_owner` prevents accidents; `root.commit.check_ownership` makes two writers safe.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from holdfast.errors import (
    CommitConflict,
    DeadlineExceeded,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotFound,
    OwnedElsewhere,
    SealError,
    StoreError,
    UsageError,
    time_limit,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Manifest, Reference
from holdfast.format.records import Alive, Closed, WriterRecord
from holdfast.launched import present_ranks
from holdfast.ownership.process import is_this_process, liveness, this_process, utc_text
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.root.commit import put_once, sync_checkpoint
from holdfast.root.documents import expect_apart, read_if_there
from holdfast.root.remaining import parts_of
from holdfast.store.base import Store
from holdfast.threads.workers import Background

HEARTBEAT_S = 10.0
"""Seconds between heartbeats; only a claimer that cannot inspect the process reads them."""
WATCH_S = 3 * HEARTBEAT_S
"""Seconds without a new heartbeat after which a claim's owner counts as dead."""
_MAX_RACES = 100

_DROPPED_S = 5.0
"""Seconds to wait for the garbage collection of a dropped manager of this process."""

Wait = Callable[[float], object]

held: set[str] = set()
"""Nonces of this process's claims whose managers are neither closed nor garbage-collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of this process on a run: its writer epoch, nonce and starting checkpoint."""

    epoch: int
    nonce: str
    resumed_from: Reference | None


def check_owner(store: Store, *, takeover: bool, emit: Emitter, watch: Wait | None = None) -> int:
    """Check that no live process owns the run; return the newest claim's epoch, 0 without claims.

    On the owner's host this is exact. If the process ran elsewhere, cannot be inspected or is
    just ending, the heartbeat is watched for up to `WATCH_S` seconds (`watch(seconds)` waits; a
    test may pass its own). Writes nothing. With `takeover`, warns instead of raising.
    """
    epoch = Catalog(store).highest_epoch()
    if epoch == 0:
        expect_apart(store)
        return 0
    try:
        owner = Catalog(store).writer(epoch)
    except FormatError as error:
        emit("warning", f"claim {epoch} cannot be read and is ignored: {error}")
        return epoch
    if owner is None:
        text = f"{store.url}/{layout.writer_key(epoch)} is lost and ignored"
        emit("warning", f"{text}; the run resumes after its saves", epoch=epoch)
        return epoch
    who, how = f"process {owner.process.pid} on {owner.process.host}", "Wait for it, stop it"
    if is_held_here(owner, patience_s=0.0 if takeover else _DROPPED_S):
        who = "another manager of this process, which is neither closed nor dropped,"
        how = "Close it first (one that was dropped lasts as long as its save)"
    elif not is_live(store, owner, emit=emit, watch=watch):
        return epoch
    text = f"{store.url}: {who} owns this run (writer {epoch}, since {owner.created})"
    if not takeover:
        ranks = present_ranks()
        if ranks.world_size > 1:
            how = (
                f"This is rank {ranks.rank} of {ranks.world_size}: if the owner is another rank of "
                "this run, each has made a manager for itself (ranks=None, or made before "
                f"init_process_group); leave ranks out, and make it afterwards. Else {how.lower()}"
            )
        raise OwnedElsewhere(f"{text}. {how}, or pass takeover=True")
    emit("warning", f"{text}; taking over", epoch=epoch)
    return epoch


def is_held_here(owner: WriterRecord, *, patience_s: float = 0.0) -> bool:
    """Whether a claim is of an open manager of this process; a dropped one gets `patience_s`."""
    if owner.nonce not in held or not is_this_process(owner.process):
        return False
    deadline = time.monotonic() + patience_s
    gc.collect()  # a dropped manager may be part of a cycle, or still end its last save
    while owner.nonce in held and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    return owner.nonce in held


def is_live(store: Store, owner: WriterRecord, *, emit: Emitter, watch: Wait | None = None) -> bool:
    """Whether the process of a claim lives and has not closed it; False for this process."""
    if is_closed(store, owner.epoch, owner.nonce):
        return False
    state = liveness(owner.process)
    if state != "unknown":
        return state == "alive"
    emit(
        "warning",
        f"whether writer {owner.epoch} on {owner.process.host} still lives cannot be seen from "
        f"here; watching its heartbeat for up to {WATCH_S:.0f} s",
    )
    wait = watch if watch is not None else threading.Event().wait
    first = _read_beat(store, owner)
    for _ in range(3):
        wait(WATCH_S / 3)
        if _read_beat(store, owner) != first:
            return True
        if liveness(owner.process) == "dead":
            return False
    return False


def is_closed(store: Store, epoch: int, nonce: str | None = None) -> bool:
    """Whether the writer of an epoch closed cleanly; with `nonce`, whether that claim did."""
    try:
        record = read_if_there(store, layout.closed_key(epoch), Closed.decode)
    except FormatError:
        return False
    return record is not None and nonce in (None, record.nonce)


def nothing_in_flight(store: Store, epoch: int) -> bool:
    """Whether no put of an epoch can still arrive: it was closed, or its process has ended.

    The end of the process proves that only if puts are calls of the local kernel; a request to an
    object store may outlive its sender.
    """
    if is_closed(store, epoch):
        return True
    if not store.has_folders:
        return False
    try:
        writer = Catalog(store).writer(epoch)
    except FormatError:
        return False
    if writer is None or liveness(writer.process) != "dead":
        return False
    return not has_finisher(store, epoch)


def has_finisher(store: Store, epoch: int) -> bool:
    """Whether a process may still be finishing the last save of a dead one (decision 0069)."""
    try:
        alive = read_if_there(store, layout.alive_key(epoch), Alive.decode)
    except FormatError:
        return False
    process = None if alive is None else alive.process
    return process is not None and liveness(process) != "dead"


def nothing_arrives(store: Store, epoch: int, *, own: int | None) -> bool:
    """Whether no put by another claim than `own`, or a later uploader, can arrive in an epoch."""
    newest = Catalog(store).highest_epoch()
    epochs = (later for later in range(epoch, max(epoch, newest) + 1) if later != own)
    return all(nothing_in_flight(store, later) for later in epochs)


def ends_with_its_put(store: Store, *, is_sent_to: bool) -> bool:
    """Whether an attempt's manifest is its last put: on a disk that gets no uploads."""
    return store.has_folders and not is_sent_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint to resume from (None: start anew), and newer ones that were skipped."""

    point: Reference | None
    passed_over: frozenset[str] = frozenset()
    """Folders of newer checkpoints that cannot be used."""
    is_rollback: bool = False
    """Whether the user chose it by name, or chose to start anew: others are left on purpose."""
    purpose: str = ""
    """What the claim is for, if not for a training: recorded in it."""


def claim_run(
    store: Store,
    choices: Iterator[Choice],
    *,
    takeover: bool,
    emit: Emitter,
    tiered: bool = False,
    above: int = 0,
) -> Claim:
    """Claim the run, to resume from the checkpoint that `choices` gives.

    The next of `choices` is taken, and computed only then, if another claim came first, if the
    chosen checkpoint is being deleted, or if an earlier writer committed something newer before
    the claim fenced it off. On an error, a claim that was put already is closed. `tiered` is
    recorded in the claim, whose epoch will be greater than `above`.
    """
    claim: Claim | None = None
    try:
        for _ in range(_MAX_RACES):
            after = check_owner(store, takeover=takeover, emit=emit)
            choice = next(choices)
            put = _put_claim(store, after, choice, takeover=takeover, tiered=tiered, above=above)
            if put is None:
                continue
            claim = put
            if is_still_right(Catalog(store), claim, choice):
                return claim
        raise OwnedElsewhere(f"{store.url}: lost the race for the run {_MAX_RACES} times")
    except BaseException:
        # The claim failed, but while this process lives it would keep other processes away.
        if claim is not None:
            with suppress(HoldfastError):  # the error that counts is on its way
                put_closed(store, claim)
        raise


def _put_claim(
    store: Store, after: int, choice: Choice, *, takeover: bool, tiered: bool, above: int
) -> Claim | None:
    """Put the claim that follows epoch `after`; None if the caller has to choose again."""
    point = choice.point
    epoch = epoch_after(Catalog(store), after, point)
    store.make_folder(layout.WRITERS)
    if epoch is None or not is_settled(Catalog(store), point):
        return None
    epoch = max(epoch, above + 1)
    record = new_writer(epoch, choice, takeover=takeover, tiered=tiered)
    try:
        put_once(store, layout.writer_key(epoch), record.encode())
    except CommitConflict:
        return None
    return Claim(epoch=epoch, nonce=record.nonce, resumed_from=point)


def new_writer(epoch: int, choice: Choice, *, takeover: bool, tiered: bool = False) -> WriterRecord:
    """Create the record of a claim of this process, with a new nonce."""
    return WriterRecord(
        epoch=epoch,
        nonce=os.urandom(16).hex(),
        resumed_from=choice.point,
        rollback=choice.is_rollback,
        takeover=takeover,
        created=utc_text(),
        process=this_process(),
        tiered=tiered,
        purpose=choice.purpose,
    )


def epoch_after(catalog: Catalog, after: int, point: Reference | None) -> int | None:
    """Return the epoch for a claim that follows `after`; None if another claim came first."""
    newest = after
    if after == 0:
        # Attempts that were copied into this root without their claims must sort below ours.
        newest = max((name.epoch for name in _with_registers(catalog)), default=0)
    point_epoch = 0 if point is None else point.epoch
    if max(newest, point_epoch) > after and catalog.highest_epoch() > after:
        return None
    if point is not None and point_epoch > newest:
        raise UsageError(
            f"{catalog.store.url}/{point.folder} was copied here from another run: its writer "
            f"epoch {point_epoch} is later than any in this run ({newest}). Resume it in a "
            "root of its own"
        )
    return newest + 1


def _with_registers(catalog: Catalog) -> Iterator[AttemptName]:
    """Yield the attempts that have a register; a folder without one may be a user's own."""
    for name in catalog.attempts():
        try:
            if catalog.read(str(name)) is not None:
                yield name
        except (FormatError, SealError):
            yield name


def is_settled(catalog: Catalog, point: Reference | None) -> bool:
    """Make the checkpoint that the run resumes from durable; False if it was deleted meanwhile."""
    try:
        if point is not None:
            sync_checkpoint(catalog.find_store(point.folder), point.folder)
    except NotFound:
        return False
    return True


def is_still_right(catalog: Catalog, claim: Claim, choice: Choice) -> bool:
    """Whether a choice is valid after the claim: not deleted; the newest, unless a rollback."""
    point = choice.point
    if point is not None and not _is_resumable(catalog, point):
        return False
    if choice.is_rollback:
        return True
    newest = next(iterate_committed(catalog, below=claim.epoch, but=choice.passed_over), None)
    if newest is None and catalog.has_skipped():
        newest = next(iterate_committed(catalog, below=claim.epoch, but=choice.passed_over), None)
    return newest == (point.folder if point is not None else None)


def iterate_committed(catalog: Catalog, *, below: int, but: frozenset[str]) -> Iterator[str]:
    """Yield the lineage's folders below an epoch with any manifest, even damaged; newest first."""
    for name in catalog.lineage(below=below):
        if str(name) in but:
            continue
        try:
            register = catalog.read(str(name))
        except (FormatError, SealError):
            yield str(name)
        else:
            if isinstance(register, Manifest):
                yield str(name)


def expect_claim(store: Store, claim: Claim) -> None:
    """Raise `StoreError` if this process's claim is gone, as a moved root would be made anew."""
    record = read_if_there(store, layout.writer_key(claim.epoch), WriterRecord.decode)
    if record is None or record.nonce != claim.nonce:
        raise StoreError(
            f"{store.url}/{layout.writer_key(claim.epoch)}: the record of this process's claim is "
            "gone; was the root moved, deleted or unmounted?"
        )


def _is_resumable(catalog: Catalog, point: Reference) -> bool:
    # Marks first: a deleter that is done has removed its mark, but has put the tombstone before.
    store = catalog.find_store(point.folder)
    try:
        marks = catalog.marks(point.folder)
        register = catalog.read(point.folder)
    except FormatError:
        return False
    if catalog.find_store(point.folder) is not store:
        return False  # just deleted in this tier, and the marks of the other one were not read
    if is_being_deleted(store, marks):
        return False
    if not isinstance(register, Manifest) or register.save_id != point.save_id:
        return False
    return not dropped(store, point.folder, register, marks)


def is_being_deleted(store: Store, marks: Marks) -> bool:
    """Whether a checkpoint has a deletion mark of a writer that may still be active."""
    return any(not nothing_in_flight(store, epoch) for epoch in marks.retired_by)


def dropped(store: Store, folder: str, manifest: Manifest, marks: Marks) -> tuple[str, ...]:
    """List components that cannot be loaded: retention has dropped or may be dropping them."""
    dropping = {name for name, epoch in marks.thinned_by if not nothing_in_flight(store, epoch)}
    whole = parts_of(store, folder, manifest, marks).whole
    return tuple(name for name in manifest.components if name in dropping or name not in whole)


def put_closed(store: Store, claim: Claim) -> None:
    """Record a clean close: no put of this claim's epoch is in flight any more."""
    record = Closed(epoch=claim.epoch, nonce=claim.nonce)
    put_once(store, layout.closed_key(claim.epoch), record.encode())
    store.delete(layout.alive_key(claim.epoch))


def settled_choice(entry: Entry, *, is_rollback: bool) -> Iterator[Choice]:
    """Yield one checkpoint as the only choice for `claim_run`; raise if it asks for another."""
    yield Choice(point=entry.reference, is_rollback=is_rollback)
    raise NoCheckpoint(
        f"{entry.folder}: it is being deleted, or the run has resumed from a newer one; "
        "resume again"
    )


class ClaimHeartbeat:
    """Background thread that renews the `alive` record of a claim until it is stopped."""

    def __init__(self, store: Store, claim: Claim, emit: Emitter) -> None:
        self._store = store
        self._claim = claim
        self._emit = emit
        self._background = Background("holdfast-heartbeat")
        self._beats = self._background.submit(self._send_heartbeats)

    def ask_to_stop(self) -> None:
        """Ask the heartbeat to stop; does not wait."""
        self._background.ask_to_stop()

    def stop_heartbeat(self, *, is_over: bool, timeout_s: float) -> None:
        """Stop the heartbeat; if `is_over` (nothing is in flight), record a clean close.

        The heartbeat's thread records it: that one runs already, when the interpreter starts no
        more threads, and the caller waits no longer than `timeout_s` seconds.

        Raises:
            DeadlineExceeded: the storage hangs; names the operation, which may still end later.
            HoldfastError: the close cannot be recorded.
        """
        last = self._beats
        if is_over:
            last = self._background.submit(partial(put_closed, self._store, self._claim))
        if not self._background.stop_jobs([last], timeout_s=timeout_s):
            what = "recording the close" if self._beats.done() else "a heartbeat"
            raise DeadlineExceeded(
                f"{self._store.url}: {what} hangs in the storage: not done after "
                f"{time_limit(timeout_s)}"
            )
        if is_over:
            last.result()

    def _send_heartbeats(self) -> None:
        beat = 0
        while True:
            beat += 1
            record = Alive(epoch=self._claim.epoch, nonce=self._claim.nonce, beat=beat)
            try:
                self._store.put(layout.alive_key(self._claim.epoch), record.encode())
            except StoreError as error:
                self._emit("housekeeping_failed", f"heartbeat: {error}")
            if self._background.sleep(HEARTBEAT_S):
                return


def _read_beat(store: Store, owner: WriterRecord) -> int:
    try:
        alive = read_if_there(store, layout.alive_key(owner.epoch), Alive.decode)
    except FormatError:
        return 0
    return alive.beat if alive is not None else 0
