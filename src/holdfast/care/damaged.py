"""Deleting a checkpoint whose manifest cannot be read, which no rule does: a person names it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from holdfast.care.prune import standing
from holdfast.care.retention import may_remove_whole
from holdfast.engine.claims.claim import Wait
from holdfast.engine.claims.leases import Readers
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.roots.commit import retract_unreadable
from holdfast.engine.roots.lost import latest_of
from holdfast.errors import (
    FormatError,
    NoCheckpoint,
    OutcomeUnknown,
    SealError,
    UnsupportedVersion,
    UsageError,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import Deleted, Manifest
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """What is known of a checkpoint whose manifest is damaged or lost."""

    folder: str
    why: str
    """What is wrong with the manifest."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of what lies there."""
    pinned: bool
    tags: tuple[str, ...]
    is_latest: bool
    """Whether `latest` names it."""
    goes_on_from: str | None
    """Folder of the checkpoint from which the run goes on without it; None: there is none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(nbytes for _, nbytes in self.files)


def examine(store: Store, folder: str) -> Damaged:
    """Look at a checkpoint whose manifest is damaged or lost. Writes nothing.

    Raises:
        NoCheckpoint: there is no such folder.
        UnsupportedVersion: a newer Holdfast wrote the manifest.
        UsageError: no folder of a checkpoint, or one that is not damaged so; says what it is.
    """
    if layout.parse_attempt(folder) is None:
        raise UsageError(f"{folder!r} is no name of a checkpoint's folder; `holdfast ls` has them")
    catalog = Catalog(store)
    files = tuple(
        (info.key.removeprefix(f"{folder}/"), info.nbytes) for info in store.list(f"{folder}/")
    )
    if not files:
        raise NoCheckpoint(f"{store.url}/{folder}: there is no such folder, or it is empty")
    try:
        register = catalog.read(folder)
    except UnsupportedVersion:
        raise
    except SealError as error:
        raise UsageError(f"{folder}: nothing was deleted, for it is not damaged: {error}") from None
    except FormatError as error:
        marks, point = catalog.marks(folder), standing(store).point
        return Damaged(
            folder=folder,
            why=str(error),
            files=files,
            pinned=marks.pinned,
            tags=marks.tags,
            is_latest=latest_of(store) == folder,
            goes_on_from=point.folder if point is not None else None,
        )
    if isinstance(register, Manifest):
        raise UsageError(
            f"{folder}: nothing was deleted, for its manifest is sound; `holdfast prune` deletes "
            "by a rule"
        )
    what = "was deleted" if isinstance(register, Deleted) else "never became a checkpoint"
    raise UsageError(f"{folder}: it {what}; `holdfast gc` without --damaged removes what is left")


def delete(store: Store, folder: str, *, emit: Emitter, watch: Wait | None = None) -> bool:
    """Delete a checkpoint that `examine` describes; False where somebody reads it, so it stays.

    Claims the run for that long, as `prune` does, and waits for readers as it does.

    Raises:
        OwnedElsewhere: a live process owns the run.
        Superseded: another process claimed the run meanwhile.
        UsageError: it is not damaged any more.
    """
    examine(store, folder)
    readers = Readers(store)
    readers.watch({folder}, wait=watch or threading.Event().wait, emit=emit)
    owner = Ownership(store, takeover=False, emit=emit)
    owner.take(lambda: standing(store))
    claim = owner.claim
    assert claim is not None
    try:
        gone = retract_unreadable(
            store,
            folder,
            epoch=claim.epoch,
            reason="a person named it: its manifest could not be read",
            may_remove_whole=lambda epoch: may_remove_whole(store, claim, epoch, is_sent_to=True),
            is_read=lambda: bool(readers.of(folder)),
        )
    except OutcomeUnknown:
        owner.is_clean = False
        raise
    finally:
        owner.release()
    if gone:
        readers.tidy(folder)
    return gone
