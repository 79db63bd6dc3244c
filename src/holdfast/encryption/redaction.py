"""Removal of error texts and reasons from unencrypted records beside encrypted checkpoints.

Such texts may contain names of parts of the state.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import NotFound
from holdfast.format import layout
from holdfast.format.records import (
    AnswerRecord,
    Rejected,
    Retired,
    Thinned,
    TiersRecord,
    UploadRecord,
)
from holdfast.store.base import Buffer

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
