"""Access to a checkpoint that a user names: resolve it, and lease it while it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.encryption.store import sealing
from holdfast.errors import FormatError, NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import Manifest
from holdfast.keys import Encryption
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import dropped
from holdfast.ownership.leases import KeptEntry, hold_lease, leased
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.root.address import make_which_error, split_folder, split_source
from holdfast.root.catalog import Catalog, Entry, standalone
from holdfast.root.single import alone
from holdfast.root.upload_records import expect_leading_disk
from holdfast.store import open_store
from holdfast.store.base import Store


def open_address(source: str | os.PathLike[str]) -> tuple[Store, str, str]:
    """Open a source's store; return (store, which, folder): one of the two names a checkpoint."""
    root, which = split_source(source)
    parent, folder = split_folder(root) if which is None else ("", "")
    if folder:
        return alone(open_store(parent), folder), "", folder
    return open_store(root), "latest" if which is None else which, ""


def locate(source: str | os.PathLike[str]) -> tuple[Store, Entry]:
    """Resolve a source, a root to its newest checkpoint, without a lease against deletion."""
    store, which, folder = open_address(source)
    entry = standalone(store, folder) if folder else Catalog(store).find_checkpoint(which)
    return store, entry


@contextmanager
def locate_with_lease(
    source: str | os.PathLike[str] | Store,
    *,
    which: int | str | None = None,
    emit: Emitter | None = None,
    encrypt: Encryption | None = None,
) -> Iterator[tuple[Store, KeptEntry]]:
    """Resolve a source to its store and checkpoint, with a lease while the block lasts.

    A root means the newest checkpoint whose deletion has not begun; for a store, `which` may choose
    another. Raises `NoCheckpoint` if there is none, or `FormatError` for a damaged manifest.
    """
    if isinstance(source, str | os.PathLike):
        if which is not None:
            raise make_which_error(source, which)
        store, which, folder = open_address(source)
    else:
        store, which, folder = open_store(source), "latest" if which is None else which, ""
    store = sealing(store, encrypt)
    if folder:
        with leased(store, folder, emit=emit) as refused:
            notes = (refused,) if refused else ()
            yield store, KeptEntry(entry=standalone(store, folder), notes=notes)
        return
    with hold_lease(Catalog(store), which, emit=emit) as entry:
        yield store, entry


def add_metrics(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    metrics: Mapping[str, Any],
    *,
    replace: bool = False,
    encrypt: Encryption | None = None,
) -> None:
    """Add metrics to a checkpoint after its save, such as those of an evaluation.

        holdfast.add_metrics("runs/gpt@step=500", {"eval/mmlu": 0.61})

    Any process may do so, also on another machine and while the run trains. Retention rules,
    `best` and all commands count them as if they had been given to the save. `checkpoint` is
    `root@which`, a checkpoint's folder, or a `Checkpoint`. The checkpoint itself is unchanged: the
    metrics are in a file beside it. Several processes may add metrics at once. `encrypt` holds the
    keys of an encrypted checkpoint.

    Raises:
        UsageError: `checkpoint` names a whole root; a value is no number; the checkpoint has
            another value of that name, and `replace` is not set; or runs read no metrics there.
        NoCheckpoint: no checkpoint matches, or its deletion has begun.
    """
    if isinstance(checkpoint, Checkpoint):
        checkpoint = f"{checkpoint.root}@{checkpoint.folder}"
    store, which, folder = open_address(checkpoint)
    if not folder and split_source(checkpoint)[1] is None:
        raise UsageError(f"{os.fspath(checkpoint)!r}: name one checkpoint, as root@step=500")
    store = sealing(store, encrypt)
    entry = standalone(store, folder) if folder else Catalog(store).find_checkpoint(which)
    expect_leading_disk(store)
    annotate(store, entry, metrics=metrics, replace=replace)


@contextmanager
def reading(source: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Keep a checkpoint from being deleted or thinned while the block lasts.

    `source` is what `load_weights` takes: a root (its newest checkpoint), `root@step=1000`,
    `root@tag`, or the folder of one checkpoint. Other programs may read the files at `path` as
    long as the block lasts. Where this process may not write there is no such promise, and
    `notes` says so, as it names components that retention has dropped before.

    Raises:
        NoCheckpoint: no checkpoint matches, or its deletion has begun; at the end of the block,
            that it was deleted all the same.
        FormatError: its manifest is damaged.
    """
    with locate_with_lease(source) as (store, kept_entry):
        entry = kept_entry.entry
        lost = dropped(store, entry.folder, entry.manifest, entry.marks)
        gone = (f"retention has dropped {', '.join(lost)} of it",) if lost else ()
        yield build_checkpoint(store, entry, notes=(*kept_entry.notes, *gone))
        _expect_kept(store, entry.folder)


def _expect_kept(store: Store, folder: str) -> None:
    """Raise `NoCheckpoint` if a checkpoint without a lease was deleted while it was read."""
    try:
        is_committed = isinstance(Catalog(store).read(folder), Manifest)
    except FormatError:
        return  # renamed by a user, or damaged: not deleted
    if not is_committed:
        raise NoCheckpoint(
            f"{store.url}/{folder}: it was deleted while it was read; what was read may be "
            "incomplete"
        )
