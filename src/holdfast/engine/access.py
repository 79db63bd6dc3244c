"""From what people write to name a checkpoint to its store and its manifest; and keeping it there
while other tools read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.engine.checkpoint import Checkpoint, describe
from holdfast.engine.claims.claim import dropped
from holdfast.engine.claims.leases import KeptEntry, kept, leased
from holdfast.engine.roots.catalog import Catalog, Entry, standalone
from holdfast.engine.roots.sources import split_folder, split_source
from holdfast.engine.sealed.sealing import sealing
from holdfast.errors import FormatError, NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import Manifest
from holdfast.keys import Encryption
from holdfast.store import open_store
from holdfast.store.base import Store


def place_of(source: str | os.PathLike[str]) -> tuple[Store, str, str]:
    """(store, which, folder) that a source names.

    For the folder of one checkpoint `which` is empty; for a root, or `root@which`, `folder` is.

    Raises:
        UsageError: it is no source, or no such store is known.
    """
    root, which = split_source(source)
    parent, folder = split_folder(root) if which is None else ("", "")
    if folder:
        return open_store(parent), "", folder
    return open_store(root), "latest" if which is None else which, ""


def locate(source: str | os.PathLike[str]) -> tuple[Store, Entry]:
    """The store and the checkpoint that a source names; of a root, its newest. Keeps nothing.

    Raises:
        NoCheckpoint: nothing there answers.
        FormatError: its manifest is damaged.
    """
    store, which, folder = place_of(source)
    entry = standalone(store, folder) if folder else Catalog(store).resolve(which)
    return store, entry


@contextmanager
def located(
    source: str | os.PathLike[str] | Store,
    *,
    which: int | str | None = None,
    emit: Emitter | None = None,
    encrypt: Encryption | None = None,
) -> Iterator[tuple[Store, KeptEntry]]:
    """The store and the checkpoint that a source names, kept while the block lasts.

    Of a root the newest whose deletion has not begun; of a store `which` may say another.
    `encrypt` opens sealed ones.

    Raises:
        UsageError: `which` is said of something that is not a store.
        NoCheckpoint: nothing there answers, or its deletion has begun.
        FormatError: its manifest is damaged.
    """
    if isinstance(source, str | os.PathLike):
        if which is not None:
            raise UsageError(f"which={which!r}: of a path or a URL, write {source}@{which}")
        store, which, folder = place_of(source)
    else:
        store, which, folder = open_store(source), "latest" if which is None else which, ""
    store = sealing(store, encrypt)
    if folder:
        with leased(store, folder, emit=emit) as refused:
            notes = (refused,) if refused else ()
            yield store, KeptEntry(entry=standalone(store, folder), notes=notes)
        return
    with kept(Catalog(store), which, emit=emit) as found:
        yield store, found


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Keep a checkpoint from being deleted or thinned while the block lasts.

    `source` is what `load_weights` takes: a root (its newest checkpoint), `root@step=1000`,
    `root@tag`, or the folder of one checkpoint. Other programs may read the files at `path` as
    long as the block lasts. Where this process may not write there is no such promise, and
    `notes` says so, as it names components that retention has dropped before.

    Raises:
        NoCheckpoint: nothing there answers, or its deletion has begun; at the end of the block,
            that it was deleted all the same.
        FormatError: its manifest is damaged.
    """
    with located(source) as (store, found):
        entry = found.entry
        lost = dropped(store, entry.folder, entry.manifest, entry.marks)
        gone = (f"retention has dropped {', '.join(lost)} of it",) if lost else ()
        yield describe(store, entry, notes=(*found.notes, *gone))
        _expect_there(store, entry.folder)


def _expect_there(store: Store, folder: str) -> None:
    """Without a lease, or when this process slept for long, it may have been deleted."""
    try:
        is_there = isinstance(Catalog(store).read(folder), Manifest)
    except FormatError:
        return  # renamed by a person, or damaged: not deleted
    if not is_there:
        raise NoCheckpoint(
            f"{store.url}/{folder}: it was deleted while it was read; what was read may be "
            "incomplete"
        )
