"""Deletion of whole checkpoints and of components, safe beside readers and later writers.

The order of marks, ownership check, pins and leases is part of the protocol (docs/design.md, rules
4, 6 and 8): tests/protocol runs it beside readers, pins and later writers.

The caller has made sure that what justifies a deletion is durable, and has looked for leases
before, because the mark that is put first mostly stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import (
    AlreadyExists,
    FormatError,
    NotFound,
    SealError,
    StoreError,
    UnsupportedVersion,
)
from holdfast.format import layout
from holdfast.format.manifest import Deleted, Manifest
from holdfast.format.records import Retired, Thinned
from holdfast.ownership.claim import Claim, ends_with_its_put, nothing_arrives
from holdfast.ownership.leases import FoundLease, Readers
from holdfast.root.catalog import Catalog, Marks
from holdfast.root.commit import check_ownership, remove_files
from holdfast.root.documents import is_own_mark
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Outcome of deleting or thinning one checkpoint."""

    is_done: bool
    leases: tuple[FoundLease, ...] = ()
    """Leases that kept the checkpoint from deletion, read after the mark was put."""
    left: tuple[str, ...] = ()
    """Files in its folder that others have put there; they stay."""


_NOT_REMOVED = Removal(is_done=False)
_HIDES = (
    "not written by Holdfast, although it has the name of the record of a deletion. The "
    "checkpoint stays; move the file elsewhere"
)


def delete_checkpoint(
    store: Store,
    folder: str,
    *,
    claim: Claim,
    reason: str,
    readers: Readers,
    is_sent_to: bool = True,
    unclear: Collection[str] = (),
    even_held: bool = False,
    listed: Collection[str] | None = None,
    notes_number: int | None = None,
) -> Removal:
    """Delete one checkpoint unless it is pinned, tagged or leased by a reader.

    In this order: mark, ownership check, pins, leases, tombstone, files. Only files that its
    manifest lists are deleted; `listed` has their names if its tombstone was put before.

    `is_sent_to` is as for `may_remove_whole`. The registers of `unclear` folders stay. With
    `even_held` pins and tags do not keep it: a person has said so. `notes_number` is that of the
    notes that the decision rests on: if there are newer ones, the checkpoint stays for now.
    """
    by, mark_name = f"writer {claim.epoch}", layout.retired_name(claim.epoch)
    mark = Retired(by=by, reason=reason).encode()
    ours = _put_marks(store, folder, claim, {mark_name: mark})
    if ours is None:
        return _NOT_REMOVED
    if not ours:
        reason = f"{reason} (marked before)"
    catalog = Catalog(store)
    marks, register = catalog.marks(folder), catalog.read(folder)
    if isinstance(register, Manifest):
        if is_held(register, marks) and not even_held:
            return _NOT_REMOVED
        if notes_number not in (None, marks.notes_number):
            store.delete_many(ours)
            return _NOT_REMOVED
        if leases := readers.find_leases(folder):
            return Removal(is_done=False, leases=leases)
        listed = register.files
        _put_tombstone(store, folder, Deleted(save_id=register.save_id, by=by, reason=reason))
    name = layout.parse_attempt(folder)
    whole = False
    if name is not None and folder not in unclear:
        whole = may_remove_whole(store, claim, name.epoch, is_sent_to=is_sent_to)
    if listed is not None and ours:
        listed = {*listed, mark_name}
    left = remove_files(store, folder, whole=whole, listed=listed)
    return Removal(is_done=True, left=left)


def delete_unreadable_checkpoint(
    store: Store, folder: str, *, claim: Claim, reason: str, readers: Readers
) -> tuple[str, tuple[str, ...]]:
    """Delete a checkpoint whose manifest is damaged or lost, at a user's request.

    In the order of `delete_checkpoint`, but pins do not keep it. Returns why it stays, empty if it
    is deleted, and the files of others that were left in its folder.
    """
    by = f"writer {claim.epoch}"
    mark = Retired(by=by, reason=reason).encode()
    ours = _put_marks(store, folder, claim, {layout.retired_name(claim.epoch): mark})
    if ours is None:
        return "its folder is gone", ()
    name = layout.parse_attempt(folder)
    why = "somebody reads it" if readers.find_leases(folder) else _why_sound(store, folder)
    if name is None:
        why = why or "its name is not that of a checkpoint"
    if why or name is None:
        for key in ours:
            store.delete(key)
        return why, ()
    save_id = name.id8.ljust(32, "0")  # no more of it is known
    _put_tombstone(store, folder, Deleted(save_id=save_id, by=by, reason=reason))
    whole = may_remove_whole(store, claim, name.epoch, is_sent_to=True)
    return "", remove_files(store, folder, whole=whole)


def _why_sound(store: Store, folder: str) -> str:
    """Explain why a manifest is not damaged or lost after all; empty if it is."""
    try:
        register = Catalog(store).read(folder)
    except (UnsupportedVersion, SealError) as error:
        return str(error)
    except FormatError:
        return ""
    what = "its manifest" if isinstance(register, Manifest) else "that it is no checkpoint"
    return f"{what} can be read again"


def thin(
    store: Store,
    folder: str,
    components: Sequence[str],
    *,
    claim: Claim,
    reason: str,
    readers: Readers,
    even_held: bool = False,
    notes_number: int | None = None,
) -> Removal:
    """Delete components of a checkpoint unless it is pinned, tagged or leased by a reader.

    In this order: marks, ownership check, pins, leases, files. `even_held` and `notes_number` are
    as for `delete_checkpoint`.
    """
    by = f"writer {claim.epoch}"
    thinned = [Thinned(by=by, component=component, reason=reason) for component in components]
    names = [layout.thinned_name(component, claim.epoch) for component in components]
    # Without those that this epoch has put before: some files may be gone already.
    ours = _put_marks(
        store, folder, claim, {n: mark.encode() for n, mark in zip(names, thinned, strict=True)}
    )
    if ours is None:
        return _NOT_REMOVED
    catalog = Catalog(store)
    marks, register = catalog.marks(folder), catalog.read(folder)
    if not isinstance(register, Manifest):
        return _NOT_REMOVED
    is_outdated = notes_number not in (None, marks.notes_number)
    if is_outdated or (is_held(register, marks) and not even_held):
        store.delete_many(ours)
        return _NOT_REMOVED
    if leases := readers.find_leases(folder):
        return Removal(is_done=False, leases=leases)
    files = [file for component in components for file in register.components[component].files]
    store.delete_many([f"{folder}/{file}" for file in files])
    return Removal(is_done=True)


def _put_marks(
    store: Store, folder: str, claim: Claim, marks: Mapping[str, bytes]
) -> list[str] | None:
    """Mark a checkpoint as being deleted or thinned, and check ownership.

    Returns the keys of the marks that were not there before; None if the folder is gone.

    Raises:
        StoreError: a user's file has the name of a mark, so that no reader would see one.
        Superseded: a later writer owns the run.
    """
    ours: list[str] = []
    for name, data in marks.items():
        key = f"{folder}/{name}"
        try:
            store.put(key, data, if_absent=True)
            ours.append(key)
        except AlreadyExists as error:
            if not is_own_mark(store, key):
                raise StoreError(f"{store.url}/{key}: {_HIDES}") from error
        except NotFound:
            return None
    check_ownership(store, claim.epoch, committed=True)
    return ours


def is_held(manifest: Manifest, marks: Marks) -> bool:
    """Whether a checkpoint is pinned or tagged, which keeps it from deletion."""
    return marks.pinned or bool(marks.tags) or bool(manifest.tags)


def _put_tombstone(store: Store, folder: str, tombstone: Deleted) -> None:
    store.put(f"{folder}/{layout.MANIFEST}", tombstone.encode())


def may_remove_whole(store: Store, claim: Claim, epoch: int, *, is_sent_to: bool) -> bool:
    """Whether the tombstone of a deleted checkpoint of `epoch` may be removed with its folder.

    The checkpoint had a manifest, so the put of that has arrived. In our own epoch that was the
    only put; on a local disk in any other epoch too, unless the root is the remote tier of a run
    (`is_sent_to`).
    """
    if epoch == claim.epoch or ends_with_its_put(store, is_sent_to=is_sent_to):
        return True
    return nothing_arrives(store, epoch, own=claim.epoch)
