"""Reading a checkpoint with other tools, without being cut off by retention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.engine.access.locate import located
from holdfast.engine.checkpoint import Checkpoint, describe
from holdfast.engine.claims.claim import dropped
from holdfast.engine.roots.catalog import Catalog
from holdfast.errors import FormatError, NoCheckpoint
from holdfast.format.manifest import Manifest
from holdfast.store.base import Store


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
