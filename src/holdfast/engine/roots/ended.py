"""Attempts whose registers have their last value: aborted or deleted (docs/design.md, rule 10).

They are many where runs are killed often, and each costs a request as long as it is looked at. So
a process looks at each once; and whoever owns the run writes down which they are, for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from holdfast.engine.roots.documents import read_if_there
from holdfast.errors import FormatError
from holdfast.format import layout
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.records import MAX_ENDED_NBYTES, Ended, decode_ended, encode_ended
from holdfast.store.base import Store, sync_folder

_WORTH_A_RECORD = 4
"""Fewer new ones are looked at again by the next process."""
_MOST_LISTED = 100_000
_KNOWN: WeakKeyDictionary[Store, Known] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Known:
    """What this process knows of the ended attempts in one store."""

    def __init__(self) -> None:
        self.aborted: set[str] = set()
        self.deleted: set[str] = set()
        self._listed: frozenset[str] = frozenset()
        self._read: frozenset[str] = frozenset()

    def __contains__(self, folder: str) -> bool:
        return folder in self.deleted or folder in self.aborted

    def is_listed(self, folder: str) -> bool:
        """Whether a record names it."""
        return folder in self._listed

    def note(self, folder: str, register: Aborted | Deleted) -> None:
        """A register was read, and this is its last value."""
        (self.deleted if isinstance(register, Deleted) else self.aborted).add(folder)

    def take(self, store: Store, names: Iterable[str]) -> None:
        """Read the records among the names in a root, each once."""
        records = {name for name in names if layout.parse_ended(name) is not None} - self._read
        for name in sorted(records):
            self._read |= {name}
            try:
                found = read_if_there(store, name, decode_ended, max_nbytes=MAX_ENDED_NBYTES)
            except FormatError:
                continue  # it would only have saved time
            if found is not None:
                self.aborted |= {*found.aborted}
                self.deleted |= {*found.deleted}
                self._listed |= {*found.aborted, *found.deleted}

    def write(self, store: Store, epoch: int, there: Iterable[str]) -> None:
        """Have a record of those that are `there`, in place of older ones, if it is worth one."""
        here = {*there}
        if len(self._new(here)) < _WORTH_A_RECORD:
            return
        for folder in self._new(here):
            sync_folder(store, folder)
        aborted, deleted = sorted(self.aborted & here), sorted(self.deleted & here)
        record = Ended(
            epoch=epoch, aborted=(*aborted[-_MOST_LISTED:],), deleted=(*deleted[-_MOST_LISTED:],)
        )
        own = layout.ended_name(epoch)
        store.put(own, encode_ended(record))
        self._listed = frozenset((*record.aborted, *record.deleted))
        for name in store.children():
            number = layout.parse_ended(name)
            if number is not None and number < epoch:
                store.delete(name)

    def forget(self, store: Store) -> None:
        """Remove the records, because what one of them names is a checkpoint all the same."""
        self.aborted, self.deleted, self._listed = set(), set(), frozenset()
        for name in store.children():
            if layout.parse_ended(name) is not None:
                store.delete(name)

    def _new(self, here: set[str]) -> set[str]:
        return ((self.aborted | self.deleted) & here) - self._listed


def known_ended(store: Store) -> Known:
    """What this process knows of a store; nothing yet, at first."""
    with _LOCK:
        try:
            return _KNOWN.setdefault(store, Known())
        except TypeError:  # a store of somebody's own, which cannot be referred to weakly
            return Known()
