"""Removal of error texts and reasons from unencrypted records beside sealed checkpoints.

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
    decode_answer,
    decode_rejected,
    decode_retired,
    decode_thinned,
    decode_tiers,
    decode_upload,
    encode_answer,
    encode_rejected,
    encode_retired,
    encode_thinned,
    encode_tiers,
    encode_upload,
)
from holdfast.store.base import Buffer

NOT_TOLD = "not told: the checkpoints here are sealed"


def blank(name: str, data: bytes) -> bytes:
    """Remove the texts from a mark of a checkpoint that cannot be opened, or is deleted."""
    if name == layout.REJECTED:
        rejected = decode_rejected(data, what=name)
        return encode_rejected(Rejected(by=rejected.by, reasons=(NOT_TOLD,)))
    if layout.parse_retired(name) is not None:
        return encode_retired(Retired(by=decode_retired(data, what=name).by, reason=NOT_TOLD))
    raise NotFound(f"{name}: there is no checkpoint that can be opened beside it")


def blank_beside_plain(name: str, data: bytes) -> bytes:
    """Remove the texts of reasons from a sidecar of a checkpoint that is not sealed."""
    if layout.parse_notes(name) is not None:
        return data
    if layout.parse_thinned(name) is not None:
        thinned = decode_thinned(data, what=name)
        return encode_thinned(msgspec.structs.replace(thinned, reason=NOT_TOLD))
    return blank(name, data)


def discreet(key: str, data: Buffer) -> Buffer:
    """Remove the text of an error from a record that is stored unencrypted."""
    if key.startswith(f"{layout.REQUESTS}/") and layout.is_answer(key):
        answer = decode_answer(data, what=key)
        if answer.error is None:
            return data
        told = AnswerRecord(folder=None, error=NOT_TOLD, created=answer.created, asker=answer.asker)
        return encode_answer(told)
    if key == layout.TIERS:
        tiers = decode_tiers(data, what=key)
        error = None if tiers.error is None else NOT_TOLD
        return encode_tiers(msgspec.structs.replace(tiers, error=error))
    if key.startswith(f"{layout.UPLOADS}/"):
        upload = decode_upload(data, what=key)
        error = None if upload.error is None else NOT_TOLD
        return encode_upload(msgspec.structs.replace(upload, error=error))
    return data
