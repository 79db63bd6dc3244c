"""Uploads and retention of a run whose local tier is a disk of each host (decision 0068).

The leader decides, and gives orders to the other hosts in its save thread, after each claim and
commit. Each host leader sends its host's files to the remote tier, reads files back, and deletes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from typing_extensions import override

from holdfast.errors import (
    CommitConflict,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    OwnershipError,
    some_of,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import TiersRecord, UploadRecord, UploadState, WriterRecord
from holdfast.maintenance.housekeeping import Housekeeper, UploadQueries
from holdfast.maintenance.retention import Deleter, Removed
from holdfast.maintenance.verify import verify
from holdfast.ownership.claim import Claim
from holdfast.ownership.deletion import delete_checkpoint, thin
from holdfast.ownership.leases import Readers
from holdfast.ownership.owner import Following, Ownership
from holdfast.ownership.process import utc_text
from holdfast.ownership.tiered import claim_document
from holdfast.ownership.tiered_options import TieredOptions
from holdfast.ranks.coordinator import GRACE_S, Coordinator, Watch, decode_message
from holdfast.ranks.hosts import Hosts
from holdfast.replication import upload
from holdfast.replication.upload import HostNames, UploadInterrupted, list_sizes
from holdfast.replication.upload_thread import LOOK_S, UploadThread
from holdfast.root.byte_ranges import read_listing
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import check_ownership, put_once
from holdfast.root.documents import is_there, read_if_there, was_made_by
from holdfast.root.upload_records import MAX_ERROR_CHARS, Ledger
from holdfast.store.base import Store

if TYPE_CHECKING:
    from holdfast.loading.hosts import HostRecords

_FIRST_S = 60.0
"""How long a rank waits for the first order after a commit, as another rank may have failed."""
_SLEEP_S = 0.25
"""How soon the thread notices an order while it waits, in seconds."""
_PAUSE_MAX_S = 10.0
"""Longest pause between two looks for files of other hosts, in seconds."""


class _RootNote(msgspec.Struct, frozen=True, tag="root"):
    """Order, after a claim, to answer which manifests a host lacks, and to remove leftovers."""

    claim: bytes
    committed: tuple[str, ...]
    """Folders of all checkpoints that are known, and of saves that may be."""


class _DocumentsNote(msgspec.Struct, frozen=True, tag="documents"):
    """Order to write a checkpoint's index, trees and manifest where they are lacking."""

    folder: str
    documents: dict[str, bytes]


class _UploadsNote(msgspec.Struct, frozen=True, tag="uploads"):
    """Order to send the files of these checkpoints, the newest first, and of no others."""

    folders: tuple[str, ...]


class _ReadBackNote(msgspec.Struct, frozen=True, tag="read back"):
    """Order to read a checkpoint's files, and to answer what is wrong with them."""

    folder: str


class _DeletionsNote(msgspec.Struct, frozen=True, tag="deletions"):
    """Last order: delete what the leader has deleted in its root."""

    removed: tuple[Removed, ...]


_Note: TypeAlias = _RootNote | _DocumentsNote | _UploadsNote | _ReadBackNote | _DeletionsNote


class HostOrders:
    """Orders of the leader to all ranks, in rounds named for what they follow."""

    def __init__(
        self,
        ranks: Coordinator,
        records: HostRecords,
        *,
        timeout_s: float,
        emit: Emitter,
    ) -> None:
        """All ranks make theirs at the same point. `timeout_s` limits each message."""
        self.records = records
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._emit = emit
        self._manager = ranks.number()
        self._uses: Counter[str] = Counter()
        self._name = ""
        self._num_notes = 0

    @property
    def hosts(self) -> Hosts:
        """The hosts, which are known after the first load or plan of a save."""
        return self.records.hosts

    @property
    def names(self) -> HostNames | None:
        """Names of the hosts; None: there is only one."""
        if self.is_alone:
            return None
        hosts, own = self.hosts, self.hosts.names[self.hosts.own]
        others = frozenset(hosts.names) - {own}
        return HostNames(own=own, others=others, is_leading=hosts.is_leading)

    def start(self, event: str) -> None:
        """Begin the orders after an event, such as a commit, that all ranks count alike."""
        self._uses[event] += 1
        again = f" ({self._uses[event]})" if self._uses[event] > 1 else ""
        self._name = f"orders of manager {self._manager} after {event}{again}"
        self._num_notes = 0

    @property
    def is_alone(self) -> bool:
        """Whether all ranks share one disk, so that nobody waits for orders."""
        return len(self.hosts.names) == 1

    def announce(self, note: _Note) -> None:
        """Give an order, in the leader."""
        if self.is_alone:
            return
        self._num_notes += 1
        data = msgspec.msgpack.encode(note)
        self._ranks.announce(self._tag, data, timeout_s=self._timeout_s)

    def receive(self) -> _Note:
        """Wait for the next order, in a follower."""
        self._num_notes += 1
        timeout_s = min(self._timeout_s, _FIRST_S) if self._num_notes == 1 else self._timeout_s
        timeout_s += GRACE_S
        heard = self._ranks.hear(self._tag, timeout_s=timeout_s, watch=self._make_watch())
        kind: Any = _Note
        note: _Note = decode_message(heard, kind, self._tag)
        return note

    def answer(self, text: str) -> None:
        """Answer the last order; empty: it was carried out."""
        self._ranks.post(self._tag, text.encode(), timeout_s=self._timeout_s)

    def collect_answers(self) -> list[str]:
        """Collect the answers of all ranks to the last order, in the leader."""
        if self.is_alone:
            return []
        tag = self._tag
        self._ranks.post(tag, b"", timeout_s=self._timeout_s)
        found = self._ranks.collect(tag, timeout_s=self._timeout_s, watch=self._make_watch())
        return [data.decode() for data in found.expect_all(tag)]

    def _make_watch(self) -> Watch:
        return Watch(partial(self._emit, "warning"), "housekeeping of all hosts")

    @property
    def _tag(self) -> str:
        return f"{self._name}, {self._num_notes}"


class LeadingHousekeeper(Housekeeper):
    """Local retention of the leader, which takes effect on all hosts, in its save thread."""

    def __init__(
        self,
        owner: Ownership,
        deleter: Deleter,
        orders: HostOrders,
        uploads: UploadQueries,
    ) -> None:
        super().__init__(owner, deleter)
        deleter.others = self
        self._orders = orders
        self._uploads = uploads
        self._ordering_thread: int | None = None
        """Thread that gives orders now; None: no host listens."""
        self._released: list[str] = []
        """Folders that are to be deleted although no rule says so."""

    @override
    def apply_retention(self, entry: Entry) -> None:
        with self._trying("orders to hosts"):
            self._start_orders(entry.folder)
        super().apply_retention(entry)
        released = self._released if self._ordering_thread is not None else []
        while released:
            super().delete_local_copy(released.pop())
        with self._trying("orders to hosts"):
            self._end_orders()

    @override
    def remove_unfinished(self, *, spared: Collection[str] = ()) -> None:
        claim = self._owner.claim
        if claim is not None:
            spared = (*spared, *self._orders.records.list_undecided(claim))
            with self._trying("orders to hosts"):
                self._start_orders(f"claim {claim.epoch}", claim, spared)
            with self._trying("orders to hosts"):
                self._end_orders()
        super().remove_unfinished(spared=spared)

    @override
    def retain(self) -> None:
        if self._ordering_thread == threading.get_ident():  # else the next save does
            super().retain()

    @override
    def delete_local_copy(self, folder: str) -> None:
        self._released.append(folder)

    def _start_orders(
        self, event: str, claim: Claim | None = None, spared: Collection[str] = ()
    ) -> None:
        """Order uploads; after a `claim`, restore the manifests of hosts first."""
        self._orders.start(event)
        if claim is not None:
            self._restore_manifests(claim, spared)
        self._orders.announce(_UploadsNote(tuple(self._uploads.list_uploads())))
        self._ordering_thread = threading.get_ident()

    def _end_orders(self) -> None:
        """Order the deletions that were done here since the start, if that has succeeded."""
        if self._ordering_thread is not None:
            self._ordering_thread = None
            self._orders.announce(_DeletionsNote(self._deleter.take_removed()))

    def _restore_manifests(self, claim: Claim, spared: Collection[str]) -> None:
        """Have hosts write the manifests that they lack, as they were lost before the outcome.

        Each then removes leftovers, except of `spared` saves.
        """
        entries, unread = Catalog(self._store).survey()
        committed = (*(entry.folder for entry in entries), *(folder for folder, _ in unread))
        document = claim_document(self._store, claim.epoch)
        self._orders.announce(_RootNote(document, (*committed, *spared)))
        lacking = {
            name for answer in self._orders.collect_answers() for name in answer.splitlines()
        }
        for entry in entries:
            if entry.folder not in lacking:
                continue
            names = filter(layout.is_document, entry.manifest.files)
            keys = {name: f"{entry.folder}/{name}" for name in (*names, layout.MANIFEST)}
            documents: dict[str, bytes] = {}
            with self._trying(f"documents of {entry.folder}"):
                documents = {name: self._store.get(key) for name, key in keys.items()}
            if documents:
                self._orders.announce(_DocumentsNote(entry.folder, documents))

    def read_back(self, folder: str) -> str:
        """Return the problems of a checkpoint's files on other hosts; empty if there are none."""
        self._orders.announce(_ReadBackNote(folder))
        hosts = self._orders.hosts
        answers = enumerate(self._orders.collect_answers())
        bad = [f"{hosts.names[hosts.of_rank[rank]]}: {text}" for rank, text in answers if text]
        return "; ".join(bad)


class FollowingHousekeeper(Housekeeper):
    """Carries out the leader's orders, in the save thread of a follower."""

    def __init__(
        self,
        owner: Ownership,
        deleter: Deleter,
        orders: HostOrders,
        uploads: HostUploads,
    ) -> None:
        super().__init__(owner, deleter)
        self._orders = orders
        self._uploads = uploads
        self._readers = Readers(self._store)
        self._left: dict[str, Removed] = {}
        """Deletions that were ordered and not yet done, by folder."""
        self._lacking: set[str] = set()
        """Folders of checkpoints whose manifest is not in this root."""

    @override
    def apply_retention(self, entry: Entry) -> None:
        self._follow(entry.folder)

    @override
    def retain(self) -> None:
        """No-op: the leader decides."""

    @override
    def remove_unfinished(self, *, spared: Collection[str] = ()) -> None:
        claim = self._owner.claim
        if claim is not None:
            self._left.clear()
            self._follow(f"claim {claim.epoch}")

    def _follow(self, event: str) -> None:
        with self._trying("orders to hosts"):
            self._orders.start(event)
            hosts = self._orders.hosts
            if self._orders.is_alone:
                return
            is_apart = hosts.is_host_leader and not hosts.is_leading
            while True:
                note = self._orders.receive()
                if isinstance(note, _RootNote):
                    self._orders.answer(self._tidy_root(note) if is_apart else "")
                elif isinstance(note, _ReadBackNote):
                    self._orders.answer(self._read_back(note.folder) if is_apart else "")
                elif is_apart:
                    self._carry_out(note)
                if isinstance(note, _DeletionsNote):
                    return

    def _carry_out(self, note: _DocumentsNote | _UploadsNote | _DeletionsNote) -> None:
        if isinstance(note, _UploadsNote):
            self._uploads.take_orders(note.folders)
        elif isinstance(note, _DeletionsNote):
            self._delete(note.removed)
        elif note.folder in self._lacking:
            with self._trying(f"manifest of {note.folder}"):
                for name, data in note.documents.items():
                    if name != layout.MANIFEST:
                        self._store.put(f"{note.folder}/{name}", data)
                key = f"{note.folder}/{layout.MANIFEST}"
                put_once(self._store, key, note.documents[layout.MANIFEST])

    def _tidy_root(self, note: _RootNote) -> str:
        """Remove leftovers of earlier claims; return the checkpoints without a manifest here."""
        claim = self._owner.claim
        self._lacking.clear()
        with self._trying("leftovers on a host"):
            assert claim is not None, "it was adopted"
            self._store.make_folder(layout.WRITERS)
            put_once(self._store, layout.writer_key(claim.epoch), note.claim)
            attempts = Catalog(self._store).attempts()
            for folder in {*map(str, attempts)}.intersection(note.committed):
                if not is_there(self._store, f"{folder}/{layout.MANIFEST}"):
                    self._lacking.add(folder)
            own = [str(name) for name in attempts if name.epoch >= claim.epoch]
            super().remove_unfinished(spared=(*note.committed, *own))
        return "\n".join(self._lacking)

    def _read_back(self, folder: str) -> str:
        try:
            report = verify(self._store, folder)
        except HoldfastError as error:
            return str(error)
        return "; ".join(map(str, report.of_state[:3]))

    def _delete(self, removed: Sequence[Removed]) -> None:
        """Delete checkpoints that the leader has deleted from this host's root, and leftovers."""
        self._left |= {one.folder: one for one in removed}
        claim = self._owner.claim
        for one in [*self._left.values()]:
            with self._trying(f"deletion of {one.folder}"):
                if claim is not None and self._delete_one(claim, one):
                    del self._left[one.folder]

    def _delete_one(self, claim: Claim, one: Removed) -> bool:
        """Delete a checkpoint's files here, or components of it; return whether that is done."""
        name = layout.parse_attempt(one.folder)
        entry = None if name is None else Catalog(self._store).entry(name)
        if entry is None or not _is_of_this_run(self._store, entry):
            return True
        if one.components:
            removal = thin(
                self._store,
                one.folder,
                one.components,
                claim=claim,
                reason=one.reason,
                readers=self._readers,
                even_held=True,
            )
        else:
            removal = delete_checkpoint(
                self._store,
                one.folder,
                claim=claim,
                reason=one.reason,
                readers=self._readers,
                is_sent_to=False,
                even_held=True,
                listed=entry.manifest.files,
            )
            if removal.is_done:
                self._readers.tidy(one.folder)
        return removal.is_done


def _is_of_this_run(store: Store, entry: Entry) -> bool:
    """Whether the claims in a host's root prove that this run has made a checkpoint."""
    try:
        claim = Catalog(store).writer(entry.name.epoch)
    except FormatError:
        return False
    return claim is not None and was_made_by(entry.name, claim.nonce)


class HostUploads(UploadThread):
    """Sends the files of one host to the remote tier, as the leader has ordered.

    In ranks that do not lead another host than the leader's, nothing is ordered.
    """

    def __init__(
        self,
        local: Store,
        remote: Store,
        orders: HostOrders,
        options: TieredOptions,
        emit: Emitter,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the longest that callers wait."""
        super().__init__(
            local,
            remote,
            options,
            emit,
            changed=threading.Condition(),
            timeout_s=timeout_s,
        )
        self._orders = orders
        self._ledger = Ledger(local)
        self.claim: Claim | None = None
        self._clear_cached_facts()

    @override
    def _clear_cached_facts(self) -> None:
        self._ordered: tuple[str, ...] = ()
        """Folders to be uploaded, the newest first."""
        self._sent: set[str] = set()
        """Those of which this host has sent its files, or has none to send."""
        self._refused: set[str] = set()
        """Those of which it cannot send some file."""
        self._tries: Counter[str] = Counter()
        self._copies: dict[str, tuple[frozenset[str], float]] = {}
        """By folder: copies here that the remote tier lacks, and when they became fewer."""

    def take_orders(self, folders: Sequence[str]) -> None:
        """Upload this host's files of these checkpoints, and of no others."""
        with self._changed:
            dropped = {*self._ordered}.difference(folders)
            self._ordered = tuple(folders)
            self._sent &= {*folders}
            self._refused &= {*folders}
        with self._noting():
            for folder in dropped:
                self._ledger.remove_note(folder)
        self._wake()

    @property
    def _waiting(self) -> list[str]:
        return [name for name in self._ordered if name not in self._sent]

    @property
    def _sendable(self) -> list[str]:
        return [name for name in self._waiting if name not in self._refused]

    @override
    def _describe_queue(self) -> str:
        waiting = self._waiting
        return f"{len(waiting)} checkpoints: {some_of(waiting)}" if waiting else ""

    @override
    def unsent(self) -> str:
        text = self._describe_queue()
        if not text:
            return ""
        return (
            f"{self._remote.url}: this host's files of {text} were not sent. They are in "
            f"{self._local.url}; run the program again on this host to upload them"
        )

    @override
    def resume_uploads(self) -> None:
        """Drop what is known, record the host in its root, and wait for orders."""
        hosts = self._orders.hosts
        if self.claim is None or not hosts.is_host_leader or hosts.is_leading:
            return
        names = self._orders.names
        assert names is not None, "there are several hosts"
        self._sender.hosts, self._sender.nonce = names, self.claim.nonce
        record = TiersRecord(
            remote=self._remote.url, changed=utc_text(), epoch=self.claim.epoch, host=names.own
        )
        self._ledger.note_tiers(record)
        super().resume_uploads()

    # In the thread

    @override
    def _run_uploads(self) -> None:
        claim = self.claim
        if claim is None or not self._ordered:
            return
        if not self._is_claimed(claim):
            if not self._sleep(LOOK_S):
                self._wake()
            return
        check_ownership(self._remote, claim.epoch, committed=None)
        tried: set[str] = set()  # once a round, so that those that fail delay no copies
        while left := [name for name in self._sendable if name not in tried]:
            if self._background.is_stopping:
                return
            tries, limit = self._tries, self._options.tries
            folder = min(left, key=lambda name: tries[name] // limit)
            tried.add(folder)
            self._tries[folder] += 1
            self._send_own(folder)
        self._watch_copies()

    def _is_claimed(self, claim: Claim) -> bool:
        """Whether the leader's claim is in the remote tier yet."""
        key = layout.writer_key(claim.epoch)
        record = read_if_there(self._remote, key, WriterRecord.decode)
        return record is not None and record.nonce == claim.nonce

    def _sleep(self, seconds: float) -> bool:
        """Wait, at most until the next order; return whether the thread is to stop."""
        end = time.monotonic() + seconds
        while not self._is_woken and (left_s := end - time.monotonic()) > 0:
            if self._background.sleep(min(left_s, _SLEEP_S)):
                return True
        return self._background.is_stopping

    def _send_own(self, folder: str) -> None:
        name = layout.parse_attempt(folder)
        entry = None if name is None else Catalog(self._local).entry(name)
        if entry is None:
            self._sent.add(folder)
            text = f"{folder}: {self._local.url} has no manifest, so none of it is sent from there"
            self._emit_remote("warning", text, folder=folder)
            return
        self._note(entry, "sending")
        here = self._sender.find_files(folder, entry.manifest)
        try:
            cost = self._sender.upload_files(folder, here.own)
        except (NoCheckpoint, CommitConflict):
            self._sent.add(folder)  # deleted or given up there: the leader knows whether by itself
            return
        except FormatError as error:
            self._note_copies(folder, here.copies)
            self._refused.add(folder)
            self._refuse_upload(entry, error)
            return
        except (UploadInterrupted, OwnershipError):
            self._note(entry, "waiting")
            raise
        except Exception as error:  # noqa: BLE001 - it is logged and retried
            self._note_copies(folder, here.copies)
            self._handle_upload_failure(error, entry)
            return
        self._note_copies(folder, here.copies)
        with self._changed:
            self._sent.add(folder)
        self._count_success()
        self._note(entry, "sending", sent_nbytes=cost.nbytes)

    def _note_copies(self, folder: str, copies: Set[str]) -> None:
        if copies:
            self._copies.setdefault(folder, (frozenset(copies), time.monotonic()))

    def _watch_copies(self) -> None:
        """Send copies of other hosts' files, if those hosts do not, until there are new orders."""
        pause_s = LOOK_S
        while self._copies and not self._background.is_stopping:
            for folder in [*self._copies]:
                self._look_after_copies(folder)
            if self._is_woken:
                return
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _look_after_copies(self, folder: str) -> None:
        lacking, changed_s = self._copies[folder]
        left: frozenset[str] = frozenset()
        if folder in self._ordered and read_listing(self._remote, folder) is None:
            left = lacking.difference(list_sizes(self._remote, folder))
        if len(left) < len(lacking):
            changed_s = time.monotonic()
        elif time.monotonic() - changed_s >= upload.COPIES_QUIET_S:
            self._sender.upload_files(folder, left)
            left = frozenset()
        if left:
            self._copies[folder] = left, changed_s
        else:  # committed there, sent, or not wanted
            del self._copies[folder]

    # Notes on disk

    @override
    def _record_failure(self, entry: Entry | None, text: str, state: UploadState) -> None:
        if entry is not None:
            self._note(entry, state, error=text)

    def _note(
        self, entry: Entry, state: UploadState, *, sent_nbytes: int = 0, error: str = ""
    ) -> None:
        record = UploadRecord(
            remote=self._remote.url,
            state=state,
            nbytes=entry.manifest.nbytes,
            changed=utc_text(),
            sent_nbytes=sent_nbytes,
            tries=self._tries[entry.folder],
            error=error[:MAX_ERROR_CHARS] or None,
        )
        with self._noting():
            self._ledger.put_note(entry.folder, record)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Log that an upload state could not be recorded, instead of raising the error."""
        try:
            yield
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"notes on uploads: {error}")


class HostFollowing(Following):
    """A follower's copy of the leader's claim, under which its host's files are sent."""

    def __init__(self, store: Store, uploads: HostUploads, *, emit: Emitter) -> None:
        super().__init__(store, takeover=False, emit=emit)
        self._uploads = uploads

    @override
    def adopt(self, claim: Claim) -> None:
        if self.claim == claim:
            return
        self._uploads.pause()
        super().adopt(claim)
        self._uploads.claim = claim
        self._uploads.resume_uploads()


def follow_hosts(
    orders: HostOrders,
    local: Store,
    remote: Store,
    options: TieredOptions,
    deleter: Deleter,
    emit: Emitter,
    *,
    timeout_s: float,
) -> tuple[HostFollowing, HostUploads, FollowingHousekeeper]:
    """Create the owner, uploads and housekeeper of a follower, for its host's disk."""
    uploads = HostUploads(local, remote, orders, options, emit, timeout_s=timeout_s)
    owner = HostFollowing(local, uploads, emit=emit)
    return owner, uploads, FollowingHousekeeper(owner, deleter, orders, uploads)
