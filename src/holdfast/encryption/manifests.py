"""Decryption of a checkpoint's manifest with a user's keys, and redaction of records beside it.

Error texts and reasons in unencrypted records may contain names of parts of the state, so they are
removed in an encrypted run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.errors import CorruptData, FormatError, LimitExceeded, NotFound, Tampered
from holdfast.format import layout
from holdfast.format.envelope import (
    MAX_STRETCHING_KIB,
    Contents,
    KeyBox,
    Visible,
    decode_box,
    decode_visible,
    open_sealed,
)
from holdfast.format.records import (
    AnswerRecord,
    Rejected,
    Retired,
    Thinned,
    TiersRecord,
    UploadRecord,
)
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.format.suites import suite_named
from holdfast.keys import Key, unwrapped
from holdfast.root.documents import read_document
from holdfast.store.base import Buffer, Store

_MAX_READS = 3
"""Attempts to list and read boxes: a newer box may replace one between list and read."""


def decrypt_manifest(store: Store, folder: str, document: bytes, keys: Sequence[Key]) -> Contents:
    """Decrypt a folder's stored manifest `document` with the user's `keys`."""
    what = f"{store.url}/{folder}/{layout.MANIFEST}"
    visible = decode_visible(document, what=what)
    name = layout.parse_attempt(folder)
    if name is not None and name.label != visible.label:
        raise Tampered(f"{what}: it was sealed under the label {visible.label!r}")
    boxes = [*boxes_of(store, folder, visible).values()]
    suite = suite_named(visible.suite, what=what)
    data_key = unwrapped(keys, boxes, suite, what=what)
    return open_sealed(document, visible, data_key, what=what)


def boxes_of(store: Store, folder: str, visible: Visible) -> dict[int, KeyBox]:
    """Read the boxes of wrapped keys, number → box, newest first; skips unreadable ones."""
    return {number: box for number, (box, _) in _boxes(store, folder, visible).items()}


def box_documents(store: Store, folder: str, visible: Visible) -> dict[str, bytes]:
    """Read the stored bytes of the boxes of wrapped keys, by file name; skips unreadable ones."""
    boxes = _boxes(store, folder, visible)
    return {layout.keys_name(number): data for number, (_, data) in boxes.items()}


def _boxes(store: Store, folder: str, visible: Visible) -> dict[int, tuple[KeyBox, bytes]]:
    where = f"{store.url}/{folder}"
    problem: FormatError = CorruptData(f"{where}: the keys beside the manifest are gone")
    for _ in range(_MAX_READS):
        found: dict[int, tuple[KeyBox, bytes]] = {}
        work = 0
        names = store.children(folder)
        numbers = {n for n in map(layout.parse_keys, names) if n is not None}
        for number in sorted(numbers or {1}, reverse=True):
            key = f"{folder}/{layout.keys_name(number)}"
            try:
                data = read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES)
                box = decode_box(data, what=f"{store.url}/{key}")
            except NotFound:
                continue
            except FormatError as error:
                problem = error
                continue
            if box.commitment != visible.commitment:
                problem = Tampered(f"{store.url}/{key}: the keys of another checkpoint")
            elif work + box.stretching_kib > MAX_STRETCHING_KIB:
                problem = LimitExceeded(f"{store.url}/{key}: too many passphrases to try")
            else:
                work += box.stretching_kib
                found[number] = box, data
        if found:
            return found
    raise problem


REDACTED = "not told: the checkpoints here are sealed"


def redact_mark(name: str, data: bytes) -> bytes:
    """Replace the reasons in a mark of a deleted, lost or damaged checkpoint by a fixed text."""
    if name == layout.REJECTED:
        rejected = Rejected.decode(data, what=name)
        return Rejected(by=rejected.by, reasons=(REDACTED,)).encode()
    if layout.parse_retired(name) is not None:
        return Retired(by=Retired.decode(data, what=name).by, reason=REDACTED).encode()
    raise NotFound(f"{name}: it has no checkpoint that can be opened")


def redact_sidecar(name: str, data: bytes) -> bytes:
    """Replace the reason in a mark of an unencrypted checkpoint; notes are returned as they are."""
    if layout.parse_notes(name) is not None:
        return data
    if layout.parse_thinned(name) is not None:
        thinned = Thinned.decode(data, what=name)
        return msgspec.structs.replace(thinned, reason=REDACTED).encode()
    return redact_mark(name, data)


def redact_record(key: str, data: Buffer) -> Buffer:
    """Replace the error text in an answer, upload or tiers record; return others as they are."""
    if key.startswith(f"{layout.REQUESTS}/") and layout.is_answer(key):
        answer = AnswerRecord.decode(data, what=key)
        if answer.error is None:
            return data
        return msgspec.structs.replace(answer, error=REDACTED).encode()
    if key == layout.TIERS:
        tiers = TiersRecord.decode(data, what=key)
        error = None if tiers.error is None else REDACTED
        return msgspec.structs.replace(tiers, error=error).encode()
    if key.startswith(f"{layout.UPLOADS}/"):
        upload = UploadRecord.decode(data, what=key)
        error = None if upload.error is None else REDACTED
        return msgspec.structs.replace(upload, error=error).encode()
    return data
