"""State of attempts without a usable manifest: lost, never committed, aborted or deleted.

A missing register means a lost manifest or a save that never committed: `Evidence` distinguishes
them (docs/design.md, rule 7). `EndedAttempts` caches, by store, which are aborted or deleted (rule
10). Runs that are killed often have many of them, and reading each register costs a request. So a
process reads each once, and the owner of the run records which have ended, for the next process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

from holdfast.errors import FormatError, NotFound, SealError, StoreError
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    Manifest,
    Reference,
    decode_register,
)
from holdfast.format.records import MAX_ENDED_NBYTES, Ended, WriterRecord
from holdfast.root.documents import is_there, read_document, read_if_there
from holdfast.store.base import Store


class Evidence:
    """Evidence in the records of one root about attempts that have no manifest.

    Each record is read once, when it is first needed, so use an instance for one query only.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._latest: str | None = None
        self._points: dict[str, int] = {}
        """Folder → an epoch whose writer resumed from it, of the claims that were read."""
        self._newest_tiered = 0
        """Newest epoch whose claim, of those read, was put in two roots or by a copy."""
        self._epochs: list[int] | None = None
        """Epochs whose claims were not read yet, oldest first; None: not listed yet."""
        self._closed_cleanly: dict[int, bool] = {}
        """Epoch → whether its writer recorded a clean close, in a run with one root."""
        self._uploads: Collection[str] | None = None
        """Names of the notes on uploads; None: not listed yet."""

    def of_commit(self, name: AttemptName) -> str:
        """Describe the evidence that an attempt without a manifest was committed; empty if none.

        `latest`, a note on its upload, or a pin or mark beside its files was put after the commit.
        Claims, manifests of later writers, and a clean close prove it only if no other file is
        missing, and only in a run with one root: both of two tiers have the claims, and one may
        have the files of a save that was never committed there. So may a root to which `holdfast
        cp` has copied checkpoints with their claims.
        """
        folder = str(name)
        names = self._store.children(folder)
        if not any(map(layout.is_data_name, names)):
            return ""  # deleted, or only begun
        sidecar = next(filter(layout.is_sidecar, names), None)
        if sidecar is not None:
            return f"{sidecar} was put beside it"
        if self._latest_folder() == folder:
            return f"{layout.LATEST!r} names it"
        if self._has_upload_note(folder):
            return "it was to be sent to the other tier"
        why = self._continuation(name)
        return why if why and self._has_all(folder, names) else ""

    def _continuation(self, name: AttemptName) -> str:
        """Describe the claim or clean close that shows an attempt was committed; empty if none."""
        epoch = self._resumed_by(name)
        if self._newest_tiered > name.epoch:
            return ""
        if epoch:
            return f"writer {epoch} resumed from it"
        if name.epoch not in self._closed_cleanly:
            is_closed = is_there(self._store, layout.closed_key(name.epoch))
            self._closed_cleanly[name.epoch] = is_closed and not self._is_tiered(name.epoch)
        is_ended = self._closed_cleanly[name.epoch]
        return "all of its files are there, and its writer has ended cleanly" if is_ended else ""

    def _has_upload_note(self, folder: str) -> bool:
        if self._uploads is None:
            self._uploads = frozenset(self._store.children(layout.UPLOADS))
        return layout.upload_key(folder).removeprefix(f"{layout.UPLOADS}/") in self._uploads

    def _is_tiered(self, epoch: int) -> bool:
        with suppress(FormatError):
            claim = read_if_there(self._store, layout.writer_key(epoch), WriterRecord.decode)
            return claim is not None and claim.tiered
        return False

    def _latest_folder(self) -> str:
        if self._latest is None:
            self._latest = latest_of(self._store)
        return self._latest

    def _resumed_by(self, name: AttemptName) -> int:
        """Return an epoch whose writer resumed from an attempt; 0 if there is none."""
        if self._epochs is None:
            claims = map(layout.parse_writer, self._store.children(layout.WRITERS))
            self._epochs = sorted({*filter(None, claims), *(n.epoch for n in self._attempts())})
        while self._epochs and self._epochs[-1] > name.epoch:
            epoch = self._epochs.pop()
            point = self._resumed_from(epoch)
            if point is not None:
                self._points.setdefault(point.folder, epoch)
        return self._points.get(str(name), 0)

    def _resumed_from(self, epoch: int) -> Reference | None:
        """Return the checkpoint that an epoch resumed from, by its claim or a manifest of it."""
        with suppress(FormatError):
            claim = read_if_there(self._store, layout.writer_key(epoch), WriterRecord.decode)
            if claim is not None and claim.tiered:
                self._newest_tiered = max(self._newest_tiered, epoch)
                return None
            if claim is not None:
                return claim.resumed_from
        for name in self._attempts():
            with suppress(FormatError, SealError, NotFound):
                if name.epoch == epoch:
                    key = f"{name}/{layout.MANIFEST}"
                    data = read_document(self._store, key, max_nbytes=MAX_MANIFEST_NBYTES)
                    register = decode_register(data, what=key)
                    if isinstance(register, Manifest):
                        return register.parent
        return None

    def _attempts(self) -> list[AttemptName]:
        listed = (layout.parse_attempt(name.rstrip("/")) for name in self._store.children())
        return [name for name in listed if name is not None]

    def _has_all(self, folder: str, names: Collection[str]) -> bool:
        """Whether an attempt has all files but the manifest; with a file of keys, True."""
        if any(layout.parse_keys(name) is not None for name in names):
            return True  # the keys are put right before the manifest
        from holdfast.format.index_parts import files_of_index  # takes numpy

        if layout.INDEX not in names:
            return False
        key = f"{folder}/{layout.INDEX}"
        try:
            data = read_document(self._store, key, max_nbytes=layout.MAX_INDEX_NBYTES)
            return {*files_of_index(data, what=key)} <= {*names}
        except (FormatError, NotFound):
            return False


def latest_of(store: Store) -> str:
    """Return the name of the folder to which `latest` points; empty if there is no pointer."""
    try:
        return store.pointed(layout.LATEST) or ""
    except FormatError:
        return ""


_WORTH_A_RECORD = 4
"""Least number of newly ended attempts to record; if fewer, the next process reads them again."""
_MOST_LISTED = 100_000
_KNOWN: WeakKeyDictionary[Store, EndedAttempts] = WeakKeyDictionary()


class EndedAttempts:
    """Attempts in one store that this process knows to be aborted or deleted."""

    def __init__(self) -> None:
        self.aborted: set[str] = set()
        self.deleted: set[str] = set()
        self._listed: frozenset[str] = frozenset()
        self._read: frozenset[str] = frozenset()

    def __contains__(self, folder: str) -> bool:
        return folder in self.deleted or folder in self.aborted

    def is_listed(self, folder: str) -> bool:
        """Whether a record in the store lists a folder as aborted or deleted."""
        return folder in self._listed

    def add_attempt(self, folder: str, register: Aborted | Deleted) -> None:
        """Add an attempt whose register was read as aborted or deleted."""
        (self.deleted if isinstance(register, Deleted) else self.aborted).add(folder)

    def read_new_records(self, store: Store, names: Collection[str]) -> None:
        """Add what unread records among a root's `names` list; forget attempts without a folder."""
        # An upload may create such a folder again.
        for name in names:
            if layout.parse_ended(name) is not None and name not in self._read:
                self._add_record(store, name)
        there = {name.rstrip("/") for name in names}
        self.aborted, self.deleted = self.aborted & there, self.deleted & there
        self._listed &= there

    def _add_record(self, store: Store, name: str) -> None:
        try:
            found = read_if_there(store, name, Ended.decode, max_nbytes=MAX_ENDED_NBYTES)
        except (FormatError, StoreError):
            return  # a record only saves time
        self._read |= {name}
        if found is not None:
            latest = {latest_of(store)}  # committed, even if the record lists it
            self.aborted |= {*found.aborted} - latest
            self.deleted |= {*found.deleted} - latest
            self._listed |= {*found.aborted, *found.deleted} - latest

    def write_ended_record(self, store: Store, epoch: int, there: Iterable[str]) -> None:
        """Record which of `there` are aborted or deleted, if enough are new; remove old records."""
        here = {*there}
        if len(self._find_unrecorded(here)) < _WORTH_A_RECORD:
            return
        for folder in self._find_unrecorded(here):
            store.sync_folder(folder)
        aborted, deleted = sorted(self.aborted & here), sorted(self.deleted & here)
        record = Ended(
            epoch=epoch, aborted=(*aborted[-_MOST_LISTED:],), deleted=(*deleted[-_MOST_LISTED:],)
        )
        own = layout.ended_name(epoch)
        if own in store.children() and not _is_record(store, own):
            return
        store.put(own, record.encode())
        self._listed = frozenset((*record.aborted, *record.deleted))
        for name in store.children():
            number = layout.parse_ended(name)
            if number is not None and number < epoch and _is_record(store, name):
                store.delete(name)

    def clear_records(self, store: Store) -> None:
        """Clear this cache and delete its records, after one wrongly listed a checkpoint."""
        self.aborted, self.deleted, self._listed = set(), set(), frozenset()
        for name in store.children():
            if layout.parse_ended(name) is not None and _is_record(store, name):
                store.delete(name)

    def _find_unrecorded(self, here: set[str]) -> set[str]:
        return ((self.aborted | self.deleted) & here) - self._listed


def _is_record(store: Store, name: str) -> bool:
    """Whether a file with the name of such a record is one."""
    try:
        return read_if_there(store, name, Ended.decode, max_nbytes=MAX_ENDED_NBYTES) is not None
    except FormatError:
        return False


def known_ended(store: Store) -> EndedAttempts:
    """Return this process's `EndedAttempts` of a store; create it at the first call."""
    try:
        return _KNOWN.setdefault(store, EndedAttempts())
    except TypeError:  # a user's own store that allows no weak references
        return EndedAttempts()
