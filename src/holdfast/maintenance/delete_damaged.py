"""Deletion of a checkpoint whose manifest cannot be read, only at a user's request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.encryption.store import bare
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
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Deleted, Manifest
from holdfast.maintenance.prune import standing
from holdfast.ownership.claim import Choice, Wait
from holdfast.ownership.deletion import retract_unreadable
from holdfast.ownership.leases import Readers
from holdfast.ownership.owner import Ownership
from holdfast.root.attempts import latest_of
from holdfast.root.byte_ranges import read_listing
from holdfast.root.catalog import Catalog
from holdfast.root.commit import kept_of_others, name_latest
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """Description of a checkpoint whose manifest is damaged or lost."""

    folder: str
    why: str
    """What is wrong with the manifest."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of each file in the folder."""
    pinned: bool
    tags: tuple[str, ...]
    is_latest: bool
    """Whether the file `latest` names this checkpoint."""
    goes_on_from: str | None
    """Folder of the checkpoint that the run would resume from after the deletion, judged by
    manifests alone; None: no such checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the checkpoint."""
        return sum(nbytes for _, nbytes in self.files)


def examine(store: Store, folder: str) -> Damaged:
    """Describe a checkpoint whose manifest is damaged or lost. Writes nothing."""
    if layout.parse_attempt(folder) is None:
        raise UsageError(f"{folder!r} is no name of a checkpoint's folder; `holdfast ls` has them")
    files = tuple(
        (info.key.removeprefix(f"{folder}/"), info.nbytes) for info in store.list(f"{folder}/")
    )
    if not files:
        raise NoCheckpoint(f"{store.url}/{folder}: there is no such folder, or it is empty")
    catalog = Catalog(store)
    try:
        register = catalog.read(folder)
    except UnsupportedVersion:
        raise
    except FormatError as error:
        _expect_its_own(store, folder)
        marks, point = catalog.marks(folder), standing(store).point
        if point is None:
            expect_nothing_left_behind(catalog, folder)
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


def _expect_its_own(store: Store, folder: str) -> None:
    """Raise `UsageError` if the manifest names another folder: this one was renamed."""
    try:
        listing = read_listing(bare(store), folder)
    except FormatError:
        return
    if isinstance(listing, Manifest | Visible):
        name = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
        if str(name) != folder:
            raise UsageError(
                f"{folder}: nothing was deleted, for its manifest is sound and belongs into a "
                f"folder called {name}; rename it"
            )


def expect_nothing_left_behind(catalog: Catalog, folder: str) -> None:
    """Raise `UsageError` if, without `folder`, resume would use an abandoned checkpoint."""
    entries = (entry for entry in catalog.checkpoints() if entry.folder != folder)
    left = [entry.folder for entry in entries if not entry.manifest.lacks]
    if left:
        raise UsageError(
            f"{folder}: nothing was deleted. A rollback has left {left[0]} behind, and without "
            "this folder nothing else is there, so the next resume would take that. First resume "
            f"the folder to resume from, as in resume({left[0]!r})"
        )


def delete_damaged(store: Store, folder: str, *, emit: Emitter, watch: Wait | None = None) -> str:
    """Delete a checkpoint whose manifest is damaged; return why it was kept, or an empty text.

    Claims the run meanwhile and watches leases of readers on other hosts, as `prune` does. After
    the deletion the run resumes from `goes_on_from`, also where it had been rolled back to the
    deleted checkpoint; checkpoints that the rollback abandoned stay abandoned.
    """
    damaged = examine(store, folder)
    readers = Readers(store)
    readers.watch_leases({folder}, wait=watch or threading.Event().wait, emit=emit)
    if leases := readers.find_leases(folder):  # check before the mark, which blocks new readers
        return f"{leases[0].who} reads it"
    owner = Ownership(store, takeover=False, emit=emit)
    owner.claim_ownership(_choose_without(store, folder))
    claim = owner.claim
    assert claim is not None
    try:
        why, left = retract_unreadable(
            store,
            folder,
            claim=claim,
            reason="a person named it: its manifest could not be read",
            readers=readers,
        )
        if not why and damaged.is_latest:
            name_latest(store, damaged.goes_on_from)
        if left:
            emit("warning", kept_of_others(store, folder, left))
    except OutcomeUnknown:
        owner.is_clean = False
        raise
    finally:
        owner.release_run()
    if not why:
        readers.tidy(folder)
    return why


def _choose_without(store: Store, folder: str) -> Iterator[Choice]:
    """Yield, for each try to claim, the checkpoint to resume from once `folder` is deleted.

    Marked as a rollback if the run's latest was `folder`, so that checkpoints which a rollback to
    `folder` abandoned stay abandoned.
    """
    while True:
        choice = standing(store)
        stands_on_it = choice.point is not None and _newest_of_lineage(store) == folder
        yield replace(choice, is_rollback=True) if stands_on_it else choice


def _newest_of_lineage(store: Store) -> str | None:
    """Return the newest folder of the lineage that holds a checkpoint, damaged or not."""
    catalog = Catalog(store)
    for name in map(str, catalog.lineage()):
        try:
            if isinstance(catalog.read(name), Manifest):
                return name
        except (FormatError, SealError):
            return name
    return None
