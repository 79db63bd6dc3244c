"""Encrypted checkpoints: verification without their keys, and rotation of these keys.

Verification compares stored bytes with stored digests, and so finds damage by the storage. Changes
of both bytes and digests can only be found with a key. Rotation writes only boxes of wrapped keys,
never data. A new box is put and read back before an old one is deleted, so that the old or the new
keys decrypt a checkpoint wherever a process is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.encryption.files import boxes_of
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
from holdfast.format.blocks import file_digest, list_blocks
from holdfast.format.envelope import (
    MAX_MARK_NBYTES,
    KeyBox,
    Visible,
    check_mark,
    decode_box,
    decode_visible,
    encode_box,
    is_mark,
)
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, FileEntry
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.format.suites import suite_named
from holdfast.keys import Key, unwrapped, wrapped
from holdfast.maintenance.verify_reads import (
    BlockToCheck,
    CheckedBytes,
    FolderReader,
    Problem,
    Progress,
    VerifyReport,
    look_at,
    problem_of,
)
from holdfast.root.catalog import Catalog
from holdfast.root.documents import is_of_others, read_document
from holdfast.store.base import Store

NOTE = "encrypted, and no key was given: compared as stored, not decrypted"


def scrub(store: Store, folder: str, *, progress: Progress | None = None) -> VerifyReport:
    """Compare every stored byte of an encrypted checkpoint with its digests, without a key."""
    reader = FolderReader(store, folder)
    while True:
        names = reader.list_names()
        with suppress(MissingKey):
            reader.manifest()
        report = _scrubbed(reader, folder, names, progress)
        # Files that retention deleted meanwhile are not damaged: check again without them.
        if report.ok or not _has_lost_components(reader, names):
            return report


def _has_lost_components(reader: FolderReader, names: Sequence[str]) -> bool:
    with suppress(MissingKey):
        reader.manifest()
    return _dropped(reader, reader.list_names()) != _dropped(reader, names)


def _dropped(reader: FolderReader, names: Sequence[str]) -> set[str]:
    return {name for name in names if layout.parse_thinned(name) and not reader.is_of_user(name)}


def _scrubbed(
    reader: FolderReader, folder: str, names: tuple[str, ...], progress: Progress | None
) -> VerifyReport:
    visible = reader.read_decoded(layout.MANIFEST, MAX_MANIFEST_NBYTES, decode_visible)
    dropped = bool(_dropped(reader, names))
    problems, notes = [*_sidecars(reader, names)], [NOTE]
    if dropped:
        notes.append("retention dropped components of it, and the list of their files is encrypted")
    total = sum(entry.nbytes for entry in visible.files.values())
    tally = CheckedBytes(folder, progress, total=total)
    problems += _check_files(reader, visible.files, tally, may_be_gone=dropped)
    notes += [f"{name} is not listed in the manifest" for name in _find_unlisted(visible, names)]
    return VerifyReport(
        folder=folder,
        step=None,
        problems=tuple(problems),
        notes=tuple(notes),
        nbytes=total,
        num_files=len(visible.files),
        num_tensors=0,
    )


def _check_files(
    reader: FolderReader, files: Mapping[str, FileEntry], tally: CheckedBytes, *, may_be_gone: bool
) -> Iterator[Problem]:
    """Compare each file with its length and digest in the manifest; yield the problems."""
    whole: dict[str, FileEntry] = {}
    for name, entry in files.items():
        try:
            nbytes = reader.measure_file(name)
        except (StoreError, FormatError) as error:
            yield from _unread(name, error, may_be_gone=may_be_gone)
        else:
            if nbytes == entry.nbytes:
                whole[name] = entry
                continue
            expected, found = f"{entry.nbytes} bytes", f"{nbytes} bytes"
            yield Problem(file=name, message="wrong length", expected=expected, found=found)
        tally.count_checked(entry.nbytes)
    looks = _digests(reader, whole, tally)
    # Read files that differ a second time: a transient error is not damage.
    other = {name: whole[name] for name, look in looks.items() if _differs(look, whole[name])}
    looks |= _digests(reader, other, CheckedBytes("", None))
    for name, look in looks.items():
        if isinstance(look, HoldfastError):
            yield from _unread(name, look, may_be_gone=may_be_gone)
        elif _differs(look, whole[name]):
            message = "other bytes than written"
            yield Problem(file=name, message=message, expected=whole[name].digest, found=look)


def _differs(look: str | HoldfastError, entry: FileEntry) -> bool:
    return isinstance(look, str) and look != entry.digest


def _unread(name: str, error: HoldfastError, *, may_be_gone: bool) -> Iterator[Problem]:
    if not isinstance(error, NotFound):
        yield problem_of(name, error)
    elif not may_be_gone:
        yield Problem(file=name, message="is missing")


def _digests(
    reader: FolderReader, files: Mapping[str, FileEntry], tally: CheckedBytes
) -> dict[str, str | HoldfastError]:
    """Compute the digest of each stored file, or the error that reading it gave."""
    digests = {name: bytearray() for name in files}
    failed: dict[str, HoldfastError] = {}

    def blocks() -> Iterator[BlockToCheck]:
        for name, entry in files.items():
            for number, (start, stop) in enumerate(list_blocks(entry.nbytes)):
                if name in failed:
                    tally.count_checked(entry.nbytes - start)
                    break
                plain = start, stop
                yield BlockToCheck(
                    file=name, number=number, start=start, stop=stop, expected=b"", plain=plain
                )

    for seen in look_at(reader, blocks()):
        name = seen.block.file
        tally.count_checked(seen.block.stop - seen.block.start)
        digests[name] += seen.digest
        if seen.error is not None:
            failed.setdefault(name, seen.error)
    return {
        name: failed.get(name) or file_digest(entry.nbytes, bytes(digests[name]))
        for name, entry in files.items()
    }


def _sidecars(reader: FolderReader, names: tuple[str, ...]) -> Iterator[Problem]:
    boxes = [name for name in names if layout.parse_keys(name) is not None]
    if not boxes:
        yield Problem(file=layout.keys_name(1), message="is missing: this checkpoint is unreadable")
    for name in (*boxes, *filter(layout.is_sidecar, names)):
        check = _check_box if name in boxes else _check_sidecar
        yield from reader.problems(name, MAX_MARK_NBYTES, check)


def _check_box(data: bytes, *, what: str) -> None:
    decode_box(data[: MAX_CHECKED_NBYTES + 1], what=what)


def _check_sidecar(data: bytes, *, what: str) -> None:
    if is_mark(data) or layout.parse_notes(what) is not None:
        check_mark(data, what, what=what)


def _find_unlisted(visible: Visible, names: tuple[str, ...]) -> list[str]:
    known = {layout.MANIFEST, *visible.files}
    return [
        name
        for name in names
        if name not in known and not layout.is_sidecar(name) and layout.parse_keys(name) is None
    ]


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
