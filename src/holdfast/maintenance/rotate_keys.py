"""Key rotation: which keys decrypt the checkpoints of a root, and how these keys are replaced.

Only boxes of wrapped keys are written, never data. A new box is put and read back before an old
one is deleted, so that the old or the new keys decrypt a checkpoint wherever a process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.encryption.manifests import boxes_of
from holdfast.errors import (
    AlreadyExists,
    CommitConflict,
    FormatError,
    HoldfastError,
    MissingKey,
    NotFound,
    SealError,
    StoreError,
    Tampered,
    WrongKey,
    some_of,
)
from holdfast.format import layout
from holdfast.format.envelope import KeyBox, Visible, decode_visible, encode_box
from holdfast.format.manifest import MAX_MANIFEST_NBYTES
from holdfast.format.suites import suite_named
from holdfast.keys import Key, unwrapped, wrapped
from holdfast.root.catalog import Catalog
from holdfast.root.documents import is_of_others, read_document
from holdfast.store.base import Store

_MAX_RACES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Encrypted checkpoint: folder, unencrypted part of the manifest, key boxes newest first."""

    folder: str
    visible: Visible
    boxes: dict[int, KeyBox]
    numbers: frozenset[int]
    """Numbers of all boxes, also of those that cannot be read."""

    @property
    def recipients(self) -> tuple[str, ...]:
        """Kind and id of each key that decrypts the checkpoint, without repeats."""
        found = (f"{r.kind} {r.id}" for box in self.boxes.values() for r in box.recipients)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rekeyed:
    """Outcome of key rotation for a checkpoint: `done`, `was so` (a no-op), or `failed`."""

    folder: str
    outcome: str
    reason: str = ""


def sealed_in(store: Store) -> Iterator[Sealed | Rekeyed]:
    """Yield a root's encrypted checkpoints, newest first; a failed `Rekeyed` if unreadable."""
    for name in Catalog(store).attempts():
        try:
            found = read_sealed_manifest(store, str(name))
        except (FormatError, StoreError) as error:
            yield Rekeyed(folder=str(name), outcome="failed", reason=str(error))
        else:
            if found is not None:
                yield found


def read_sealed_manifest(store: Store, folder: str) -> Sealed | None:
    """Read a checkpoint's visible manifest and key boxes; None if it is not encrypted."""
    try:
        Catalog(store).read(folder)
    except MissingKey:
        key = f"{folder}/{layout.MANIFEST}"
        document = read_document(store, key, max_nbytes=MAX_MANIFEST_NBYTES)
        visible = decode_visible(document, what=f"{store.url}/{key}")
        numbers = {n for n in map(layout.parse_keys, store.children(folder)) if n is not None}
        boxes = boxes_of(store, folder, visible)
        return Sealed(folder=folder, visible=visible, boxes=boxes, numbers=frozenset(numbers))
    return None


def rotate(
    store: Store, opening: Sequence[Key], sealing: Sequence[Key], *, keeps_old: bool = False
) -> Iterator[Rekeyed]:
    """Encrypt the data key of every encrypted checkpoint of a root for the new keys `sealing`.

    Boxes of the old keys are deleted, unless `keeps_old`. May be run again after it was cut short,
    and beside a training, which continues to encrypt for the keys that it was given.
    """
    for found in sealed_in(store):
        if isinstance(found, Rekeyed):
            yield found
            continue
        try:
            changed = _rotate_one(store, found, opening, sealing, keeps_old=keeps_old)
        except NotFound:
            continue  # deleted meanwhile
        except HoldfastError as error:
            yield Rekeyed(folder=found.folder, outcome="failed", reason=str(error))
        else:
            yield Rekeyed(folder=found.folder, outcome="done" if changed else "was so")


def _rotate_one(
    store: Store, found: Sealed, opening: Sequence[Key], sealing: Sequence[Key], *, keeps_old: bool
) -> bool:
    suite = suite_named(found.visible.suite, what=found.folder)
    newest = max(found.boxes)
    number = newest
    is_new = not _is_for(found.boxes[newest], sealing, found)
    if is_new:
        keys = (*opening, *sealing)
        data_key = unwrapped(keys, [*found.boxes.values()], suite, what=found.folder)
        box = wrapped(sealing, data_key, suite)
        if not keeps_old:
            _expect_opens(box, sealing, found)
        number = put_box(store, found.folder, newest, box)
    if keeps_old:
        return is_new
    # Delete unreadable boxes too: they may hold the old keys.
    others: list[str] = []
    for old in sorted(found.numbers - {number}):
        key = f"{found.folder}/{layout.keys_name(old)}"
        if old not in found.boxes and is_of_others(store, key):
            others.append(key)
            continue
        store.delete(key)
        is_new = True
    if others:
        raise FormatError(
            f"{store.url}: {some_of(others)}: not a valid key file of Holdfast, so it was not "
            "changed. Delete it if it is a damaged file of the old keys; else move it elsewhere"
        )
    return is_new


def _is_for(box: KeyBox, keys: Sequence[Key], found: Sealed) -> bool:
    """Whether each of these keys decrypts a key box, and no other key does."""
    each = [KeyBox(commitment=box.commitment, recipients=(one,)) for one in box.recipients]
    return all(_opens([key], box, found) for key in keys) and all(
        _opens(keys, one, found) for one in each
    )


def _opens(keys: Sequence[Key], box: KeyBox, found: Sealed) -> bool:
    """Whether any of the keys decrypts a box; a public key decrypts nothing."""
    suite = suite_named(found.visible.suite, what=found.folder)
    try:
        unwrapped(keys, [box], suite, what=found.folder)
    except (SealError, Tampered):
        return False
    return True


def _expect_opens(box: KeyBox, keys: Sequence[Key], found: Sealed) -> None:
    """Check that each key decrypts a new box before old ones are deleted; skip public keys."""
    suite = suite_named(found.visible.suite, what=found.folder)
    for key in keys:
        with suppress(WrongKey):
            unwrapped([key], [box], suite, what=found.folder)


def put_box(store: Store, folder: str, newest: int, box: KeyBox) -> int:
    """Store a key box under the first free number after `newest`; return the number."""
    data = encode_box(box)
    stop = min(newest + 1 + _MAX_RACES, layout.MAX_BOX_NUMBER + 1)
    for number in range(newest + 1, stop):
        key = f"{folder}/{layout.keys_name(number)}"
        try:
            store.put(key, data, if_absent=True)
        except AlreadyExists:
            continue
        if store.get(key) != data:
            raise CommitConflict(
                f"{store.url}/{key}: the stored keys differ from the ones that were written"
            )
        return number
    raise CommitConflict(f"{store.url}/{folder}: no number is left after keys-{newest:04d}.json")
