"""`holdfast uploads`: list the upload state of each checkpoint of a local root.

Needs no key: of encrypted checkpoints it reads the unencrypted part of the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.cli import options
from holdfast.cli.documents import Document
from holdfast.cli.options import command
from holdfast.cli.output import Answer, Code, TextTable, format_nbytes
from holdfast.cli.target import open_root, open_root_store
from holdfast.encryption.store import bare
from holdfast.errors import FormatError, HoldfastError, NoCheckpoint
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Deleted, Manifest
from holdfast.format.records import TiersRecord, UploadRecord
from holdfast.root.byte_ranges import read_listing
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger, find_elsewhere
from holdfast.store.base import Store


class LastUpload(Document, frozen=True):
    """Upload that ended last."""

    folder: str
    """Folder of the checkpoint."""
    nbytes: int
    """Bytes that were sent."""
    upload_s: float
    """Seconds that it took."""
    requests: int
    """Requests that it took."""


class Uploaded(Document, frozen=True):
    """Checkpoint of `uploads`. What its note does not say is null."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where it is encrypted."""
    nbytes: int
    """Bytes of its files, those in this root."""
    state: str
    """`uploaded`, `waiting`, `sending`, `failed`, `refused`, `deleted` (there), `unwanted` or
    `unknown`."""
    sent_nbytes: int | None
    """Bytes that are there already."""
    tries: int | None
    """Tries so far."""
    error: str | None
    """Error of the last try."""
    changed: str | None
    """UTC time of the note."""


class UploadsAnswer(Document, frozen=True):
    """Answer of `uploads`."""

    root: str
    """Path of the local root."""
    remote: str
    """URL of the remote root."""
    host: str | None
    """Host of which this root is the disk, with its files only; null if the root has all files."""
    unreachable: str | None
    """Why the remote root was not looked at."""
    error: str | None
    """Last error of the uploads."""
    changed: str | None
    """UTC time of the record."""
    last: LastUpload | None
    """Upload that ended last."""
    checkpoints: Sequence[Uploaded]
    """Checkpoints, newest first."""
    waiting: int
    """How many are not uploaded yet."""
    waiting_nbytes: int
    """Their bytes."""


@command("uploads", options.root, answer=UploadsAnswer)
def show_uploads(root: str) -> Answer:
    """Show which checkpoints are uploaded, waiting or failed.

    ROOT is the local root of a run with two tiers.
    """
    store = bare(open_root(root))
    ledger = Ledger(store)
    tiers = ledger.tiers()
    if tiers is None:
        raise NoCheckpoint(f"{store.url}: nothing is uploaded from here (see Tiered)")
    remote, unreachable = _remote(tiers)
    notes = ledger.read_notes()
    lines = [*_list_uploads(store, remote, notes)]
    waiting = [line for line in lines if line.state in _WAITING]
    document = UploadsAnswer(
        root=store.url,
        remote=tiers.remote,
        host=tiers.host or None,
        unreachable=unreachable,
        error=tiers.error,
        changed=tiers.changed,
        last=_last(tiers),
        checkpoints=lines,
        waiting=len(waiting),
        waiting_nbytes=sum(line.nbytes for line in waiting),
    )
    is_bad = any(line.state in ("failed", "refused") for line in lines)
    return Answer(
        document=document, parts=_format_uploads(document), code=Code.FOUND if is_bad else Code.OK
    )


def _remote(tiers: TiersRecord) -> tuple[Store | None, str | None]:
    """Open the remote root; return None and the reason if it cannot be read."""
    try:
        remote = open_root_store(tiers.remote)
        remote.children()
    except HoldfastError as error:
        return None, str(error)
    return remote, None


def _list_uploads(
    store: Store, remote: Store | None, notes: Mapping[str, UploadRecord | None]
) -> Iterator[Uploaded]:
    for folder in map(str, Catalog(store).attempts()):
        try:
            listing = read_listing(store, folder)
        except FormatError:
            continue  # `holdfast verify` reports the damage
        if not isinstance(listing, Manifest | Visible):
            continue
        note = notes.get(folder)
        noted = ("waiting" if note is None else note.state) if folder in notes else ""
        yield Uploaded(
            folder=folder,
            step=listing.timestamp.step if isinstance(listing, Manifest) else None,
            nbytes=_count_nbytes(store, folder, listing),
            state=_remote_state(folder, remote, noted) or noted or "unknown",
            **_noted(note),
        )


def _count_nbytes(store: Store, folder: str, listing: Manifest | Visible) -> int:
    """Count the bytes of a checkpoint's files, without those on other hosts' disks."""
    others: set[str] = set()
    if isinstance(listing, Manifest) and listing.hosts:
        elsewhere = find_elsewhere(store, listing, store.children(folder))
        others = {name for files in elsewhere.values() for name in files}
    return sum(f.stored_nbytes for name, f in listing.files.items() if name not in others)


def _noted(note: UploadRecord | None) -> dict[str, Any]:
    names = ("sent_nbytes", "tries", "error", "changed")
    return {name: None if note is None else getattr(note, name) for name in names}


def _remote_state(folder: str, remote: Store | None, noted: str) -> str:
    """Return the state of a checkpoint in the remote tier; empty if that cannot be read."""
    if remote is None:
        return ""
    try:
        register = read_listing(remote, folder)
    except HoldfastError:
        return ""
    if isinstance(register, Manifest | Visible):
        return "uploaded"
    if isinstance(register, Deleted) or noted == "uploaded":
        return "deleted"
    return noted or "unwanted"


def _last(tiers: TiersRecord) -> LastUpload | None:
    if tiers.folder is None:
        return None
    return LastUpload(
        folder=tiers.folder, nbytes=tiers.nbytes, upload_s=tiers.upload_s, requests=tiers.requests
    )


_WAITING = ("waiting", "sending", "failed", "refused")
_WORDS: Mapping[str, str] = {
    "unwanted": "not wanted there",
    "unknown": "?",
    "deleted": "deleted there",
    "refused": "cannot be sent",
    "failed": "failed, will be tried again",
}


def _format_uploads(document: UploadsAnswer) -> list[str | TextTable]:
    parts: list[str | TextTable] = [
        TextTable(
            columns=("step", "folder", "size", "upload", "sent", "tries"),
            rows=[_row(line) for line in document.checkpoints],
            right=frozenset({0, 2, 4, 5}),
            whole=frozenset({0, 1}),
        )
    ]
    parts += [
        f"{line.folder}: {line.error}"
        for line in document.checkpoints
        if line.error and line.state in ("failed", "refused")
    ]
    if document.host:
        parts.append(f"this is the disk of {document.host}; other hosts upload their files")
    parts.append(
        f"to {document.remote}: {document.waiting} waiting, "
        f"{format_nbytes(document.waiting_nbytes)}"
    )
    last = document.last
    if last is not None:
        rate = format_nbytes(int(last.nbytes / max(last.upload_s, 1e-9)))
        parts.append(
            f"last: {last.folder}, {format_nbytes(last.nbytes)} in {last.upload_s:.1f} s "
            f"({rate}/s, {last.requests} requests)"
        )
    if document.error:
        parts.append(f"error ({document.changed}): {document.error}")
    if document.unreachable:
        parts.append(f"the remote tier cannot be read from here: {document.unreachable}")
    return parts


def _row(line: Uploaded) -> tuple[str, ...]:
    is_sent = line.sent_nbytes is not None and line.state in _WAITING
    return (
        "sealed" if line.step is None else str(line.step),
        line.folder,
        format_nbytes(line.nbytes),
        _WORDS.get(line.state, line.state),
        format_nbytes(line.sent_nbytes or 0) if is_sent else "",
        str(line.tries or ""),
    )
