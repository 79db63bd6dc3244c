"""Commits or aborts a save, checks who owns the run, and removes an attempt's files.

The order of store operations in each function is the commit protocol (docs/design.md, section 3;
tests/protocol, tests/root/test_commit.py). Nothing retries blindly: after an unclear outcome the
key is read back and all bytes are compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    CommitConflict,
    FormatError,
    NotFound,
    OutcomeUnknown,
    SealError,
    StoreError,
    Superseded,
    TransientStoreError,
    UnsupportedStore,
    some_of,
)
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    Manifest,
    decode_register,
    encode_manifest,
)
from holdfast.format.records import WriterRecord
from holdfast.format.strictjson import digest_of
from holdfast.root.catalog import Catalog
from holdfast.root.documents import is_own_file, read_document, read_if_there
from holdfast.store.base import Store, is_key

_MAX_PUTS = 5
_PAUSE_S = 0.1


@dataclass(slots=True, kw_only=True)
class SaveAttempt:
    """Attempt to save: its folder's name, its save id, and what is known of its manifest's put.

    `digest` is that of the manifest, "blake3:…", once it is encoded, or read by a follower.
    `put_sent`: whether that put may have taken effect. `is_unclear`: whether a repeat of it may
    still arrive, so that the register must stay, whether or not the save committed.
    """

    name: AttemptName
    save_id: str
    digest: str = ""
    put_sent: bool = False
    is_unclear: bool = False

    @property
    def folder(self) -> str:
        """Name of the attempt's folder inside the root."""
        return str(self.name)

    @property
    def manifest_key(self) -> str:
        """Key of the attempt's register: of its manifest, abort marker or tombstone."""
        return f"{self.folder}/{layout.MANIFEST}"


def create_attempt(
    store: Store, *, label: str, epoch: int, nonce: str, sequence: int
) -> SaveAttempt:
    """Create the folder of a new attempt, whose save id begins with digits that prove its claim."""
    first = layout.first_digits(label, epoch, sequence, nonce)
    save_id = first + os.urandom(12).hex()
    name = layout.attempt_name(label, epoch, sequence, save_id)
    store.make_folder(str(name), exclusive=True)
    return SaveAttempt(name=name, save_id=save_id)


def commit(store: Store, attempt: SaveAttempt, manifest: Manifest) -> None:
    """Commit a save whose files are durable: put its manifest, between two ownership checks."""
    data = encode_manifest(manifest)
    attempt.digest = digest_of(data, what=attempt.manifest_key)
    publish(store, attempt, data, epoch=attempt.name.epoch)


def publish(store: Store, attempt: SaveAttempt, data: bytes, *, epoch: int) -> None:
    """Commit an encoded manifest, as `commit`; `epoch` may be later than that of its save."""
    check_ownership(store, epoch, committed=False)
    attempt.put_sent = attempt.is_unclear = True
    try:
        attempt.is_unclear = put_once(store, attempt.manifest_key, data)
    except (CommitConflict, OutcomeUnknown):
        raise
    except StoreError as error:
        attempt.put_sent = attempt.is_unclear = _may_have_committed(store, attempt, error)
        raise
    try:
        check_ownership(store, epoch, committed=True)
    except StoreError as error:
        raise OutcomeUnknown(
            f"{store.url}/{attempt.folder}: the manifest is there, but whether this process still "
            f"owns the run cannot be read: {error}"
        ) from error


def _may_have_committed(store: Store, attempt: SaveAttempt, error: StoreError) -> bool:
    """Whether a refused put of a manifest may have taken effect all the same."""
    try:
        store.head(attempt.manifest_key)
    except NotFound:
        return False
    except StoreError:
        return True
    raise OutcomeUnknown(
        f"{store.url}/{attempt.manifest_key}: it exists, although its put was refused: {error}"
    ) from error


def abandon(store: Store, attempt: SaveAttempt) -> bool:
    """Remove a failed attempt's folder; return False instead if its manifest may have been put."""
    if attempt.put_sent:
        return False
    remove_files(store, attempt.folder, whole=True)
    return True


def put_once(store: Store, key: str, data: bytes) -> bool:
    """Put an object if absent, and read it back if the outcome is unclear.

    Returns whether a copy of the put may still be in flight: False only if the first put's reply
    was a success. If a put is a request to an object store and its outcome is unclear, the key is
    read back; if it is absent, the same bytes are put again. The first copy to arrive wins, and
    all others find the key taken, as long as the register is never removed.

    Raises:
        CommitConflict: the key holds something else.
        OutcomeUnknown: it is unknown whether the put took effect, or will.
    """
    for number in range(_MAX_PUTS):
        try:
            store.put(key, data, if_absent=True)
            return number > 0
        except AlreadyExists as error:
            _expect_ours(store, key, data, error)
            return True
        except (OutcomeUnknown, TransientStoreError) as error:
            if store.has_folders:
                # A sync failed: the name may be visible now and be gone after a crash.
                raise
            try:
                _expect_ours(store, key, data, error)
                return True
            except _Absent as missing:
                if isinstance(error, TransientStoreError) or number == _MAX_PUTS - 1:
                    raise OutcomeUnknown(str(missing)) from error
        except StoreError as error:
            if number == 0:
                raise  # certainly refused
            raise OutcomeUnknown(
                f"{store.url}/{key}: an earlier put may still take effect; then: {error}"
            ) from error
        time.sleep(_PAUSE_S * 2**number)
    raise AssertionError("the last put returns or raises")


class _Absent(OutcomeUnknown):
    """Error: the key of a failed put does not exist when it is read back."""


def _expect_ours(store: Store, key: str, data: bytes, error: StoreError) -> None:
    try:
        # The put found here, perhaps an earlier try of ours, may not have synced the folder.
        store.sync_folder(key.rpartition("/")[0])
        found = read_document(store, key, max_nbytes=MAX_MANIFEST_NBYTES)
    except NotFound:
        folder, _, name = key.rpartition("/")
        if isinstance(error, AlreadyExists) and f"{name}/" in store.children(folder):
            raise StoreError(
                f"{store.url}/{key}: a folder is in the place of this file, so nothing was put. "
                "Holdfast makes no such folder; look into it and move it out of the root"
            ) from error
        raise _Absent(
            f"{store.url}/{key}: the put failed ({error}) and may still take effect"
        ) from error
    except (StoreError, FormatError) as reading:
        raise OutcomeUnknown(f"{store.url}/{key}: not read back: {reading}") from error
    if found != data:
        raise CommitConflict(f"{store.url}/{key}: taken by {_describe(found)}") from error


def _describe(data: bytes) -> str:
    try:
        found = decode_register(data, what="register")
    except FormatError:
        return "something else"
    except SealError:
        return "another save, which is sealed"
    if isinstance(found, Aborted):
        return f"an abort marker of {found.by} ({found.reason})"
    if isinstance(found, Deleted):
        return f"a tombstone of {found.by} ({found.reason})"
    return f"save {found.save_id}"


def check_ownership(store: Store, epoch: int, *, committed: bool | None) -> None:
    """Raise `Superseded`, with what `committed` says, if a later writer has claimed the run."""
    key = layout.writer_key(epoch + 1)
    store.refresh_folder(layout.WRITERS)
    try:
        store.head(key)
    except NotFound:
        return
    outcome = {
        True: "this save was committed, but the run goes on from elsewhere",
        False: "this save was not committed",
        None: "whether this save was committed is not known",
    }[committed]
    raise Superseded(
        f"{store.url}: {_describe_claim(store, key)} took the run over (writer {epoch + 1} after "
        f"{epoch}); {outcome}. Stop this process, or resume with takeover=True to take it back",
        committed=bool(committed),
    )


def _describe_claim(store: Store, key: str) -> str:
    """Describe a claim's process for messages, also if its record cannot be read."""
    try:
        writer = read_if_there(store, key, WriterRecord.decode)
    except (FormatError, StoreError):
        writer = None
    if writer is None:
        return "a process whose record cannot be read"
    return f"process {writer.process.pid} on {writer.process.host} ({writer.created})"


def mark_aborted(store: Store, folder: str, *, by: str, reason: str) -> bool:
    """Put the abort marker of an attempt, if it has no manifest; False if it has committed."""
    data = Aborted(by=by, reason=reason).encode()
    try:
        store.put(f"{folder}/{layout.MANIFEST}", data, if_absent=True)
    except AlreadyExists:
        return not _is_manifest(store, folder)
    except NotFound:
        return True
    return True


def abort_for_silent_leader(store: Store, attempt: SaveAttempt, *, by: str, reason: str) -> bool:
    """Abort a silent leader's save unless it committed; return whether it committed (rule 11)."""
    committed: bool | None = None
    try:
        put_once(store, attempt.manifest_key, Aborted(by=by, reason=reason[:500]).encode())
    except CommitConflict:
        try:
            register = Catalog(store).read(attempt.folder)
        except SealError:
            committed = True
        except StoreError as error:
            raise OutcomeUnknown(
                f"{store.url}/{attempt.manifest_key}: the key is taken, but cannot be read: {error}"
            ) from error
        else:
            committed = isinstance(register, Manifest | Deleted)
        if committed:
            return True
    except NotFound:
        pass  # the folder is gone
    check_ownership(store, attempt.name.epoch, committed=committed)
    return False


def _is_manifest(store: Store, folder: str) -> bool:
    try:
        return isinstance(Catalog(store).read(folder), Manifest)
    except SealError:
        return True  # encrypted with any key, it is a manifest


def remove_files(
    store: Store, folder: str, *, whole: bool, listed: Collection[str] | None = None
) -> tuple[str, ...]:
    """Remove the files of an aborted or deleted attempt; if `whole`, its register and folder.

    Of files with the names of data, those that the manifest `listed` are removed; without a
    manifest, those whose first bytes are Holdfast's. All else was put there by others: it stays,
    with the register and the folder, and its names are returned.
    """
    files: list[str] = []
    marks: list[str] = []
    others: list[str] = []
    for info in store.list(f"{folder}/"):
        name = info.key.removeprefix(f"{folder}/")
        if name == layout.MANIFEST:
            continue
        if not is_key(info.key) or not is_own_file(store, info, name, listed):
            others.append(name.partition("/")[0])
        else:
            # As long as the index exists, so do the marks of its deleters (`Catalog.entry`).
            (marks if layout.is_sidecar(name) else files).append(info.key)
    for some in (files, marks):
        store.delete_many(some)
    left = tuple(dict.fromkeys((*others, *store.unlisted(folder))))
    if open_files := [name for name in left if name.startswith(_NFS_PREFIX)]:
        raise TransientStoreError(
            f"{store.url}/{folder}/{open_files[0]}: a deleted file is still open in another "
            "process, and NFS keeps it until it is closed"
        )
    if whole and not left:
        store.delete(f"{folder}/{layout.MANIFEST}")
        store.delete(f"{folder}/")
    else:
        store.sweep(folder)
        with suppress(AccessDenied, UnsupportedStore):
            store.abort_uploads(folder)
    return left


def kept_of_others(store: Store, folder: str, names: Sequence[str]) -> str:
    """Return the warning that a deletion has left these files, which others have put there."""
    return (
        f"{store.url}/{folder}: deleted, except what is not listed in its manifest: "
        f"{some_of(names)}. Holdfast did not write that; move it elsewhere"
    )


def remove_scratch(store: Store, folder: str) -> None:
    """Remove a temporary folder that this process, or a killed one, has made."""
    store.delete_many([info.key for info in store.list(f"{folder}/")])
    store.delete(f"{folder}/")


_NFS_PREFIX = ".nfs"


def name_latest(store: Store, folder: str | None) -> str:
    """Point `latest` to a checkpoint's folder, or remove it; return a warning if others own it."""
    try:
        found = store.pointed(layout.LATEST)
        is_other = found is None and layout.LATEST in store.unlisted("")
    except FormatError:
        found, is_other = None, True  # too long for a pointer
    if is_other or (found is not None and layout.parse_attempt(found) is None):
        return (
            f"{store.url}/{layout.LATEST}: not written by Holdfast, so it is left alone, and this "
            "run has no such pointer to its newest checkpoint. Nothing else depends on it; move "
            "it out of the root to get the pointer"
        )
    if folder is None:
        store.delete(layout.LATEST)
    else:
        store.point(layout.LATEST, folder)
    return ""


def sync_checkpoint(store: Store, folder: str) -> None:
    """Fsync a checkpoint's folder and the root, before anything relies on it (rule 5)."""
    store.sync_folder(folder)
    store.sync_folder("")
