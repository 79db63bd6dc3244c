"""Cache of which attempts are aborted or deleted, by store (docs/design.md, rule 10).

Runs that are killed often have many of them, and reading each register costs a request. So a
process reads each once, and the owner of the run records which have ended, for the next process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from holdfast.errors import FormatError, StoreError
from holdfast.format import layout
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.records import MAX_ENDED_NBYTES, Ended
from holdfast.root.documents import read_if_there
from holdfast.root.lost_manifests import latest_of
from holdfast.store.base import Store

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
