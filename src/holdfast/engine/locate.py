"""What people write to name a checkpoint: `root`, `root@which`, or a checkpoint's own folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from holdfast.engine.catalog import Catalog, Entry, standalone
from holdfast.engine.leases import leased
from holdfast.errors import NoCheckpoint
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.store import open_store
from holdfast.store.base import Store

_MAX_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A checkpoint that stays while somebody reads it."""

    store: Store
    entry: Entry
    notes: tuple[str, ...]
    """Why it may go all the same; empty where it cannot."""


def split_source(source: str | os.PathLike[str]) -> tuple[str, str | None]:
    """(root, which) of `root@which`; which is None without one. A path with an @ in it that is
    there wins."""
    text = os.fspath(source)
    root, at, which = text.rpartition("@")
    if not at or os.path.isdir(text):
        return text, None
    return root, which


def locate(source: str | os.PathLike[str]) -> tuple[Store, Entry]:
    """The store and the checkpoint that a source names; of a root, its newest.

    Raises:
        NoCheckpoint: nothing there answers.
        FormatError: its manifest is damaged.
    """
    store, find = _finder(source)
    return store, find(())


@contextmanager
def located(source: str | os.PathLike[str], *, emit: Emitter | None = None) -> Iterator[Located]:
    """The checkpoint that a source names, kept while the block lasts.

    Of a root the newest whose deletion has not begun. When a named one is replaced meanwhile,
    what the name means by then.

    Raises:
        NoCheckpoint: nothing there answers, or its deletion has begun.
        FormatError: its manifest is damaged.
    """
    store, find = _finder(source)
    passed_over: list[str] = []
    with ExitStack() as stack:
        while True:
            entry = find(passed_over)
            try:
                notes = stack.enter_context(leased(store, entry.folder, emit=emit))
            except NoCheckpoint:
                passed_over.append(entry.folder)
                if len(passed_over) == _MAX_LOOKS or find(passed_over).folder in passed_over:
                    raise
            else:
                break
        # Marks that were read before the lease may be outdated.
        fresh = Catalog(store).entry(entry.name) if entry.folder == str(entry.name) else entry
        if fresh is None:
            raise NoCheckpoint(f"{store.url}/{entry.folder}: it was deleted")
        yield Located(store=store, entry=fresh, notes=(notes,) if notes else ())


def _finder(
    source: str | os.PathLike[str],
) -> tuple[Store, Callable[[Collection[str]], Entry]]:
    """The store, and how to find the checkpoint; of a root the newest but for some folders."""
    root, which = split_source(source)
    if which is None and os.path.isfile(os.path.join(root, layout.MANIFEST)):
        parent, folder = os.path.split(os.path.abspath(root))
        store = open_store(parent)
        return store, lambda _: standalone(store, folder)
    store = open_store(root)
    catalog = Catalog(store)

    def find(but: Collection[str]) -> Entry:
        if which in (None, "latest") and but:
            others = (entry for entry in catalog.lineage_entries() if entry.folder not in but)
            found = catalog.latest(others)
            if found is not None:
                return found
        return catalog.resolve("latest" if which is None else which)

    return store, find
