"""Leases of readers, which keep a checkpoint from deletion (docs/design.md, rule 8).

A reader puts its lease and then checks whether a deletion has begun; a deleter puts its mark and
then looks for leases. So at least one of them sees the other, and gives way.
"""

from __future__ import annotations

import atexit
import errno
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from holdfast.errors import (
    AccessDenied,
    DeadlineExceeded,
    FormatError,
    NoCheckpoint,
    NotFound,
    OutcomeUnknown,
    SealError,
    StoreError,
    StoreFull,
    TransientStoreError,
    UnsupportedStore,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.blocks import block_digest
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Manifest
from holdfast.format.records import Lease
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.ownership.claim import Wait, is_being_deleted, nothing_in_flight
from holdfast.ownership.process import Liveness, liveness, this_process, utc_text
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.root.commit import put_once
from holdfast.root.documents import read_document
from holdfast.store.base import Store
from holdfast.threads.workers import Background

BEAT_S = 10.0
"""Seconds between renewals of a lease; only deleters on another host read them."""
SILENT_S = 120.0
"""Seconds after which a deleter ignores an unchanged lease of another host.

Measured by the deleter's own clock: twelve renewals, so that storage that hangs ends no lease.
"""
_STOP_TIMEOUT_S = 30.0
_NO_LEASE = "read without a lease, so that retention may delete it meanwhile"


class BeingDeleted(NoCheckpoint):
    """The deletion of a checkpoint has begun: it still exists, but may vanish at any moment."""


# The reader's side -------------------------------------------------------------------------------


@contextmanager
def leased(
    store: Store, folder: str, *, emit: Emitter | None = None, nonce: str = ""
) -> Iterator[str]:
    """Keep a checkpoint from being deleted or thinned while the block lasts, by a lease.

    Yields why there is no lease, for the user; empty if there is one. Marks of the checkpoint
    that were read before the block may be outdated. If nobody ever claimed the run, nobody
    deletes, and no lease is needed, unless its `nonce` (32 hex) is given, by which others look for
    it. A store that can only be read takes none.

    Raises:
        BeingDeleted: its deletion has begun.
        NoCheckpoint: it no longer exists.
    """
    if store.reads_only:
        yield f"{_NO_LEASE}: {store.url} can only be read"
        return
    is_needed = bool(nonce) or Catalog(store).highest_epoch() > 0
    if layout.parse_attempt(folder) is None or not is_needed:
        yield ""
        return
    lease = _HeldLease(store, folder, emit or Emitter(), nonce or os.urandom(16).hex())
    try:
        refused = lease.acquire_lease()
        if not refused:
            _expect_standing(store, folder)
            lease.keep_up()
        yield refused
    finally:
        lease.release_lease()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntry:
    """A checkpoint under a lease, with its marks as read after the lease was put."""

    entry: Entry
    notes: tuple[str, ...]
    """Why it may be deleted all the same; empty if it cannot be."""


@contextmanager
def hold_lease(
    catalog: Catalog, which: str | int, *, emit: Emitter | None = None
) -> Iterator[KeptEntry]:
    """Resolve `which` (see `Catalog.find_checkpoint`), and hold a lease on it while the block
    lasts.

    If it is replaced meanwhile, resolves anew; "latest" skips checkpoints whose deletion has
    begun.
    """
    passed_over: list[str] = []
    with ExitStack() as stack:
        while True:
            entry = _find_entry(catalog, which, passed_over)
            store = catalog.find_store(entry.folder)
            try:
                refused = stack.enter_context(leased(store, entry.folder, emit=emit))
                break
            except NoCheckpoint:
                passed_over.append(entry.folder)
                if _find_entry(catalog, which, passed_over).folder in passed_over:
                    raise
        fresh = Catalog(store).entry(entry.name)
        if fresh is None:
            raise NoCheckpoint(f"{store.url}/{entry.folder}: it was deleted")
        yield KeptEntry(entry=fresh, notes=(refused,) if refused else ())


def _find_entry(catalog: Catalog, which: str | int, but: Collection[str]) -> Entry:
    if which == "latest" and but:
        newest = catalog.newest(but=but)
        if newest is not None:
            return newest
    return catalog.find_checkpoint(which)


def _expect_standing(store: Store, folder: str) -> None:
    # Marks first: a deleter that is done has removed its mark, but has put the tombstone before.
    catalog = Catalog(store)
    marks = catalog.marks(folder)
    try:
        is_there = isinstance(catalog.read(folder), Manifest)
    except (FormatError, SealError):
        is_there = True  # the reader reports the damage
    if not is_there:
        raise NoCheckpoint(f"{store.url}/{folder}: it was deleted")
    expect_kept(store, folder, marks)


def expect_kept(store: Store, folder: str, marks: Marks) -> None:
    """Raise `BeingDeleted` if a checkpoint has a deletion mark of a writer that may be active."""
    if not is_being_deleted(store, marks):
        return
    active = [epoch for epoch in marks.retired_by if not nothing_in_flight(store, epoch)]
    options = " ".join(f"--dead-epoch {epoch}" for epoch in active)
    raise BeingDeleted(
        f"{store.url}/{folder}: writer {', '.join(map(str, active))} started to delete it and may "
        "still be running. Use another checkpoint. If that writer is gone, `holdfast gc ROOT "
        f"{options}` removes its mark"
    )


class _HeldLease:
    """A lease of this process, renewed until it is released."""

    def __init__(self, store: Store, folder: str, emit: Emitter, nonce: str) -> None:
        self._store = store
        self._emit = emit
        self._nonce = nonce
        self._key = layout.lease_key(folder, self._nonce)
        self._folder = folder
        self._process = this_process()
        self._created = utc_text()
        self._beat = 1
        self._may_exist = False
        self._background = Background("holdfast-lease")
        self._renewed: Future[None] | None = None

    def acquire_lease(self) -> str:
        """Put the lease; return the reason, for the user, if the storage refuses it, else ""."""
        try:
            self._may_exist = True
            refused = self._put_first()
            if refused:
                return refused
            # Marks of deleters are looked for next; a cache of names must not hide them.
            self._store.refresh_folder(self._folder)
        except (AccessDenied, StoreFull, UnsupportedStore) as error:
            self._remove_quietly()
            return f"{_NO_LEASE}: {error}"
        except StoreError:
            self._remove_quietly()
            raise
        return ""

    def keep_up(self) -> None:
        """Start to renew the lease in the background, until it is released."""
        self._renewed = self._background.submit(self._renew)
        # At exit the threads that release it stop before globals that hold a reader are dropped.
        atexit.register(self.release_lease)

    def release_lease(self) -> None:
        """Remove the lease; a failure is logged. No-op in a forked child, whose parent has it."""
        if not self._may_exist:  # released, maybe at exit, after which modules are dropped
            return
        self._may_exist = False
        atexit.unregister(self.release_lease)
        if os.getpid() != self._process.pid:
            return
        # On the background thread, as a delete may hang in the store.
        self._background.ask_to_stop()
        jobs = [self._background.submit(partial(self._store.delete, self._key))]
        if self._renewed is not None:
            jobs.append(self._renewed)
        try:
            if not self._background.stop_jobs(jobs, timeout_s=_STOP_TIMEOUT_S):
                raise DeadlineExceeded(
                    f"giving the lease back hangs in the store: not done after "
                    f"{_STOP_TIMEOUT_S:.0f} s"
                )
            for job in jobs:
                job.result()
        except (DeadlineExceeded, StoreError) as error:
            self._emit("housekeeping_failed", f"{self._key}: {error}")

    def _put_first(self) -> str:
        # The folder is made only if it is missing: making an existing one waits for the disk each
        # time.
        try:
            put_once(self._store, self._key, self._encode_lease())
            return ""
        except (TransientStoreError, AccessDenied, StoreFull, UnsupportedStore, OutcomeUnknown):
            raise
        except StoreError:
            # The first lease of this root, or the folder was removed, or is not a folder.
            pass
        try:
            self._store.make_folder(layout.READERS)
        except TransientStoreError:
            raise
        except StoreError as error:
            self._may_exist = False
            return f"{_NO_LEASE}: {error}"
        put_once(self._store, self._key, self._encode_lease())
        return ""

    def _renew(self) -> None:
        while not self._background.sleep(BEAT_S):
            self._beat += 1
            try:
                self._store.put(self._key, self._encode_lease())
            except StoreError as error:
                self._emit("housekeeping_failed", f"{self._key}: {error}")

    def _encode_lease(self) -> bytes:
        return Lease(
            nonce=self._nonce, beat=self._beat, created=self._created, process=self._process
        ).encode()

    def _remove_quietly(self) -> None:
        with suppress(StoreError):
            self._store.delete(self._key)
        self._may_exist = False


# The deleter's side ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLease:
    """A lease read from a root, and whether its process lives, as far as this host can tell."""

    key: str
    name: AttemptName
    lease: Lease | None
    """None if it cannot be read. Then its process is unknown, and only its age decides."""
    state: Liveness
    digest: bytes

    @property
    def folder(self) -> str:
        """Folder name of the leased checkpoint."""
        return str(self.name)

    @property
    def who(self) -> str:
        """Text for messages that says which process holds the lease."""
        if self.lease is None:
            return f"a process whose lease {self.key} cannot be read"
        process = self.lease.process
        return f"process {process.pid} on {process.host} (since {self.lease.created})"


def find_leases(store: Store, *, folder: str | None = None) -> Iterator[FoundLease]:
    """Yield all leases of a root or on one checkpoint, also those of dead processes."""
    for name in _list_leases(store):
        parsed = layout.parse_lease(name)
        if parsed is None or folder not in (None, str(parsed[0])):
            continue
        lease = _read_lease(store, f"{layout.READERS}/{name}", *parsed)
        if lease is not None:
            yield lease


def _list_leases(store: Store) -> tuple[str, ...]:
    try:
        store.refresh_folder(layout.READERS)
        return store.children(layout.READERS)
    except StoreError as error:
        # Stores do not follow links, so no lease can be behind one.
        is_link = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ELOOP
        if f"{layout.READERS}/" in store.children() and not is_link:
            raise
        return ()


def _read_lease(store: Store, key: str, name: AttemptName, nonce: str) -> FoundLease | None:
    """Read a lease; None if it was released meanwhile."""
    lease, data = None, b""
    try:
        data = read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES)
        lease = Lease.decode(data, what=key)
    except NotFound:
        return None
    except (FormatError, AccessDenied):
        lease = None
    if lease is not None and not lease.nonce.startswith(nonce):
        lease = None  # a copy of another lease
    return FoundLease(
        key=key,
        name=name,
        lease=lease,
        state="unknown" if lease is None else liveness(lease.process),
        digest=block_digest(data),
    )


class Readers:
    """Leases of a root as read by one deleter, with the time at which each last changed."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}

    def find_leases(self, folder: str) -> tuple[FoundLease, ...]:
        """Return the leases on a checkpoint, without those whose process is dead or silent."""
        leases = tuple(find_leases(self._store, folder=folder))
        keys = {lease.key for lease in leases}
        self._seen = {
            key: seen
            for key, seen in self._seen.items()
            if key in keys or not key.startswith(f"{layout.READERS}/{folder}.")
        }
        return tuple(lease for lease in leases if self._may_live(lease))

    def watch_leases(self, folders: Collection[str], *, wait: Wait, emit: Emitter) -> None:
        """Watch leases of other hosts until each is renewed, or unchanged for `SILENT_S` seconds.

        For a deleter that runs only once. `wait(seconds)` waits; a test may pass its own.
        """
        first = {lease.key: lease for lease in self._of_unknown_state(folders)}
        for lease in first.values():
            self._may_live(lease)  # records the time, from which it is unchanged
            emit(
                "warning",
                f"{lease.folder} is read by {lease.who}; watching its lease for up to "
                f"{SILENT_S:.0f} s",
            )
        end = self._clock() + SILENT_S
        while first and self._clock() < end:
            wait(BEAT_S)
            now = {lease.key: lease for lease in self._of_unknown_state(folders)}
            first = {
                key: lease
                for key, lease in first.items()
                if key in now and now[key].digest == lease.digest
            }

    def tidy(self, folder: str) -> None:
        """Remove the leases on a checkpoint that no longer exists."""
        for lease in find_leases(self._store, folder=folder):
            if lease.lease is not None:
                self._store.delete(lease.key)
            self._seen.pop(lease.key, None)

    def _of_unknown_state(self, folders: Collection[str]) -> Iterator[FoundLease]:
        for lease in find_leases(self._store):
            if lease.state == "unknown" and lease.folder in folders:
                yield lease

    def _may_live(self, lease: FoundLease) -> bool:
        if lease.state != "unknown":
            return lease.state != "dead"
        digest, since_s = self._seen.get(lease.key, (b"", 0.0))
        if digest != lease.digest:
            self._seen[lease.key] = (lease.digest, self._clock())
            return True
        return self._clock() - since_s < SILENT_S
