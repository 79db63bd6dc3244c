"""Owning a run: claims, owners, heartbeats, clean closes (docs/design.md, rules 2 and 3).

Ownership is a courtesy that prevents accidents; the fence in `engine.commit` is what makes two
writers safe.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from holdfast.engine.catalog import Catalog, Marks
from holdfast.engine.commit import put_once, settle
from holdfast.engine.documents import read_if_there
from holdfast.engine.process import liveness, this_process, utc_now
from holdfast.engine.workers import Workers
from holdfast.errors import CommitConflict, FormatError, OwnedElsewhere, StoreError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import Manifest, Reference
from holdfast.format.records import (
    Alive,
    Closed,
    Writer,
    decode_alive,
    decode_closed,
    decode_writer,
    encode_alive,
    encode_closed,
    encode_writer,
)
from holdfast.store.base import Store, make_folder

HEARTBEAT_S = 10.0
"""Seconds between heartbeats; only a claimer on another host ever looks at them."""
WATCH_S = 3 * HEARTBEAT_S
"""A heartbeat that does not change for so long belongs to nobody."""
_MAX_RACES = 100

Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """This process's claim of a run."""

    epoch: int
    nonce: str
    resumed_from: Reference | None


def check_owner(store: Store, *, takeover: bool, emit: Emitter, watch: Wait | None = None) -> None:
    """Raise `OwnedElsewhere` when a live process owns the run. Writes nothing.

    On the owner's host this is exact. Elsewhere the heartbeat is watched for up to `WATCH_S`
    seconds (`watch(seconds)` waits; a test may pass its own).
    """
    epoch = Catalog(store).highest_epoch()
    if epoch == 0:
        return
    try:
        owner = Catalog(store).writer(epoch)
    except FormatError as error:
        emit("warning", f"claim {epoch} cannot be read and binds nobody: {error}")
        return
    if owner is None or not is_live(store, owner, emit=emit, watch=watch):
        return
    text = (
        f"{store.url}: process {owner.process.pid} on {owner.process.host} owns this run "
        f"(writer {epoch}, since {owner.created})"
    )
    if not takeover:
        raise OwnedElsewhere(f"{text}. Wait for it, stop it, or pass takeover=True")
    emit("warning", f"{text}; taking over", epoch=epoch)


def is_live(store: Store, owner: Writer, *, emit: Emitter, watch: Wait | None = None) -> bool:
    """Whether the process of a claim still lives and has not closed; ourselves do not count."""
    if is_closed(store, owner.epoch):
        return False
    state = liveness(owner.process)
    if state != "unknown":
        return state == "alive"
    emit(
        "warning",
        f"writer {owner.epoch} ran on {owner.process.host}; watching its heartbeat "
        f"for up to {WATCH_S:.0f} s",
    )
    wait = watch if watch is not None else threading.Event().wait
    first = _beat(store, owner)
    for _ in range(3):
        wait(WATCH_S / 3)
        if _beat(store, owner) != first:
            return True
    return False


def is_closed(store: Store, epoch: int) -> bool:
    """Whether the epoch's writer recorded a clean close."""
    try:
        return read_if_there(store, layout.closed_key(epoch), decode_closed) is not None
    except FormatError:
        return False


def is_proven_dead(store: Store, epoch: int) -> bool:
    """Whether nothing of that epoch can be in flight: closed, or its process gone for sure."""
    if is_closed(store, epoch):
        return True
    try:
        writer = Catalog(store).writer(epoch)
    except FormatError:
        return False
    return writer is not None and liveness(writer.process) == "dead"


def put_claim(
    store: Store, *, resumed_from: Reference | None, takeover: bool, emit: Emitter
) -> Claim | None:
    """Put the next claim. None when `resumed_from` went away meanwhile: choose another.

    Raises:
        OwnedElsewhere: another live process claimed first.
    """
    make_folder(store, layout.WRITERS)
    if resumed_from is not None:
        settle(store, resumed_from.folder)
    for _ in range(_MAX_RACES):
        record = Writer(
            epoch=_next_epoch(store),
            nonce=os.urandom(16).hex(),
            resumed_from=resumed_from,
            takeover=takeover,
            created=utc_now(),
            process=this_process(),
        )
        try:
            put_once(store, layout.writer_key(record.epoch), encode_writer(record))
        except CommitConflict:
            check_owner(store, takeover=takeover, emit=emit)
            continue
        if resumed_from is not None and not _still_stands(store, resumed_from):
            return None
        return Claim(epoch=record.epoch, nonce=record.nonce, resumed_from=resumed_from)
    raise OwnedElsewhere(f"{store.url}: lost the race for the run {_MAX_RACES} times")


def expect_claim(store: Store, claim: Claim) -> None:
    """Raise `StoreError` unless our claim is still in the root.

    A root that was moved or unmounted would otherwise be made anew, empty, by the next save.
    """
    found = read_if_there(store, layout.writer_key(claim.epoch), decode_writer)
    if found is None or found.nonce != claim.nonce:
        raise StoreError(
            f"{store.url}/{layout.writer_key(claim.epoch)}: the record of this process's claim is "
            "gone; was the root moved, deleted or unmounted?"
        )


def _next_epoch(store: Store) -> int:
    catalog = Catalog(store)
    highest = catalog.highest_epoch()
    if highest == 0:
        # Folders copied here without their claims keep their order below ours.
        highest = max((name.epoch for name in catalog.attempts()), default=0)
    return highest + 1


def _still_stands(store: Store, point: Reference) -> bool:
    catalog = Catalog(store)
    try:
        register = catalog.read(point.folder)
    except FormatError:
        return False
    return (
        isinstance(register, Manifest)
        and register.save_id == point.save_id
        and not is_being_deleted(store, catalog.marks(point.folder))
    )


def is_being_deleted(store: Store, marks: Marks) -> bool:
    """Marked by a deleter that may still be at it."""
    if not marks.retired:
        return False
    return marks.retired_by is None or not is_proven_dead(store, marks.retired_by)


def put_closed(store: Store, claim: Claim) -> None:
    """Record that nothing of this epoch is in flight any more."""
    record = Closed(epoch=claim.epoch, nonce=claim.nonce)
    put_once(store, layout.closed_key(claim.epoch), encode_closed(record))
    store.delete(layout.alive_key(claim.epoch))


class Heartbeat:
    """Renews the `alive` record of a claim until it is stopped."""

    def __init__(self, store: Store, claim: Claim, emit: Emitter) -> None:
        self._store = store
        self._claim = claim
        self._emit = emit
        self._stop = threading.Event()
        self._workers = Workers(1, "holdfast-heartbeat")
        self._done: Future[None] = self._workers.submit(self._run)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End it; waits for a beat under way."""
        self._stop.set()
        self._done.result(timeout=timeout_s)
        self._workers.close()

    def _run(self) -> None:
        beat = 0
        while True:
            beat += 1
            record = Alive(epoch=self._claim.epoch, nonce=self._claim.nonce, beat=beat)
            try:
                self._store.put(layout.alive_key(self._claim.epoch), encode_alive(record))
            except StoreError as error:
                self._emit("housekeeping_failed", f"heartbeat: {error}")
            if self._stop.wait(HEARTBEAT_S):
                return


def _beat(store: Store, owner: Writer) -> int:
    try:
        alive = read_if_there(store, layout.alive_key(owner.epoch), decode_alive)
    except FormatError:
        return 0
    return alive.beat if alive is not None else 0
