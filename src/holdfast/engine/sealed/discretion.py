"""Removal of error texts and reasons from unencrypted records beside encrypted checkpoints.

Such texts may name parts of the state.
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

NOT_TOLD = "not told: the checkpoints here are sealed"


def blank(name: str, data: bytes) -> bytes:
    """Remove the texts from a mark of a checkpoint that cannot be decrypted, or is deleted."""
    if name == layout.REJECTED:
        rejected = Rejected.decode(data, what=name)
        return Rejected(by=rejected.by, reasons=(NOT_TOLD,)).encode()
    if layout.parse_retired(name) is not None:
        return Retired(by=Retired.decode(data, what=name).by, reason=NOT_TOLD).encode()
    raise NotFound(f"{name}: there is no checkpoint that can be opened beside it")


def blank_beside_plain(name: str, data: bytes) -> bytes:
    """Remove the texts of reasons from a sidecar of a checkpoint that is not encrypted."""
    if layout.parse_notes(name) is not None:
        return data
    if layout.parse_thinned(name) is not None:
        thinned = Thinned.decode(data, what=name)
        return msgspec.structs.replace(thinned, reason=NOT_TOLD).encode()
    return blank(name, data)


def discreet(key: str, data: Buffer) -> Buffer:
    """Remove the text of an error from a record that is stored unencrypted."""
    if key.startswith(f"{layout.REQUESTS}/") and layout.is_answer(key):
        answer = AnswerRecord.decode(data, what=key)
        if answer.error is None:
            return data
        told = AnswerRecord(folder=None, error=NOT_TOLD, created=answer.created, asker=answer.asker)
        return told.encode()
    if key == layout.TIERS:
        tiers = TiersRecord.decode(data, what=key)
        error = None if tiers.error is None else NOT_TOLD
        return msgspec.structs.replace(tiers, error=error).encode()
    if key.startswith(f"{layout.UPLOADS}/"):
        upload = UploadRecord.decode(data, what=key)
        error = None if upload.error is None else NOT_TOLD
        return msgspec.structs.replace(upload, error=error).encode()
    return data
