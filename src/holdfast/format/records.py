"""Records of a root: claims, closes, heartbeats, sidecars, requests (docs/format.md, section 7)."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from holdfast.errors import FormatError
from holdfast.format import checked, strictjson
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import Hex128, Natural, Positive, Reference, check_reference
from holdfast.store.base import Buffer

MAX_ENDED_NBYTES = 16 * 1024 * 1024

T = TypeVar("T")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a process; start time `start` and boot `boot_id` are opaque texts."""

    host: str
    pid: Natural
    start: str
    boot_id: str
    pid_namespace: str


class WriterRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Claim of an epoch. `resumed_from` is the checkpoint that it continues from.

    `rollback`: a person chose that checkpoint by name; a claim of the latest only counts once it
    has committed.
    """

    epoch: Positive
    nonce: Hex128
    resumed_from: Reference | None
    rollback: bool
    takeover: bool
    created: str
    process: Process
    tiered: bool = False
    """Whether the run has two roots, one of which may lack the `resumed_from` checkpoint."""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """Record that an epoch ended cleanly."""

    epoch: Positive
    nonce: Hex128


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a writer; `beat` counts up."""

    epoch: Positive
    nonce: Hex128
    beat: Natural


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Folders of attempts whose registers are final, so that they need not be read.

    An optimisation only: nothing else depends on it.
    """

    epoch: Positive
    aborted: tuple[str, ...]
    deleted: tuple[str, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Lease: a process reads the checkpoint in the record's name; `beat` counts up."""

    nonce: Hex128
    beat: Natural
    created: str
    process: Process


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """All tags and the pin of a checkpoint."""

    tags: tuple[str, ...]
    pinned: bool


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """Mark that retention is about to delete a checkpoint."""

    by: str
    reason: str


class Thinned(msgspec.Struct, frozen=True, kw_only=True):
    """Mark that retention is about to drop a component of a checkpoint that stays."""

    by: str
    component: str
    reason: str


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """Mark that a resume found a checkpoint damaged."""

    by: str
    reasons: tuple[str, ...]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a save.

    `who` is for people; `process` shows whether somebody still waits for the answer."""

    id: Hex128
    who: str
    process: Process
    created: str
    reason: str = ""
    tags: tuple[str, ...] = ()


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request: the folder of the checkpoint, or the error."""

    folder: str | None
    error: str | None
    created: str
    asker: Process | None = None
    """The process that asked, if its request could be read."""


UploadState = Literal["waiting", "sending", "failed", "refused", "uploaded"]


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of the upload of a checkpoint from the local root to the remote one.

    `state` is `waiting`, `sending`, `failed` (it will be tried again), `refused` (it will not) or
    `uploaded`.
    """

    remote: str
    state: UploadState
    nbytes: Natural
    changed: str
    sent_nbytes: Natural = 0
    tries: Natural = 0
    error: str | None = None


class TiersRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Remote root of a local root, and the result of the last upload.

    `epoch` is a claim that the remote root had; 0: none was ever seen in it.
    """

    remote: str
    changed: str
    epoch: Natural = 0
    error: str | None = None
    folder: str | None = None
    nbytes: Natural = 0
    upload_s: float = 0.0
    requests: Natural = 0


def encode_writer(writer: WriterRecord) -> bytes:
    """Encode a claim."""
    return _encode("writer", writer)


def decode_writer(data: Buffer, *, what: str) -> WriterRecord:
    """Decode a claim; raises `FormatError` if `data` is not valid."""
    writer = _decode("writer", data, WriterRecord, what=what)
    check_reference(writer.resumed_from, what=what)
    return writer


def encode_closed(closed: Closed) -> bytes:
    """Encode a close."""
    return _encode("closed", closed)


def decode_closed(data: Buffer, *, what: str) -> Closed:
    """Decode a close; raises `FormatError` if `data` is not valid."""
    return _decode("closed", data, Closed, what=what)


def encode_alive(alive: Alive) -> bytes:
    """Encode a heartbeat."""
    return _encode("alive", alive)


def decode_alive(data: Buffer, *, what: str) -> Alive:
    """Decode a heartbeat; raises `FormatError` if `data` is not valid."""
    return _decode("alive", data, Alive, what=what)


def encode_ended(ended: Ended) -> bytes:
    """Encode a record of ended attempts; raises `UsageError` if it is too long."""
    return checked.encode_checked("ended", msgspec.to_builtins(ended), max_nbytes=MAX_ENDED_NBYTES)


def decode_ended(data: Buffer, *, what: str) -> Ended:
    """Decode a record of ended attempts; raises `FormatError` if `data` is not valid."""
    ended = _decode("ended", data, Ended, what=what, max_nbytes=MAX_ENDED_NBYTES)
    odd = next((n for n in (*ended.aborted, *ended.deleted) if parse_attempt(n) is None), None)
    if odd is not None:
        raise FormatError(f"{what}: {odd[:80]!r} is not the folder of an attempt")
    return ended


def encode_lease(lease: Lease) -> bytes:
    """Encode a lease."""
    return _encode("lease", lease)


def decode_lease(data: Buffer, *, what: str) -> Lease:
    """Decode a lease; raises `FormatError` if `data` is not valid."""
    return _decode("lease", data, Lease, what=what)


def encode_notes(notes: Notes) -> bytes:
    """Encode notes; raises `UsageError` if they are too long."""
    return _encode("notes", notes)


def decode_notes(data: Buffer, *, what: str) -> Notes:
    """Decode notes; raises `FormatError` if `data` is not valid."""
    return _decode("notes", data, Notes, what=what)


def encode_retired(retired: Retired) -> bytes:
    """Encode a mark."""
    return _encode("retired", retired)


def decode_retired(data: Buffer, *, what: str) -> Retired:
    """Decode a mark; raises `FormatError` if `data` is not valid."""
    return _decode("retired", data, Retired, what=what)


def encode_thinned(thinned: Thinned) -> bytes:
    """Encode a mark."""
    return _encode("thinned", thinned)


def decode_thinned(data: Buffer, *, what: str) -> Thinned:
    """Decode a mark; raises `FormatError` if `data` is not valid."""
    return _decode("thinned", data, Thinned, what=what)


def encode_rejected(rejected: Rejected) -> bytes:
    """Encode a mark."""
    return _encode("rejected", rejected)


def decode_rejected(data: Buffer, *, what: str) -> Rejected:
    """Decode a mark; raises `FormatError` if `data` is not valid."""
    return _decode("rejected", data, Rejected, what=what)


def encode_request(request: RequestRecord) -> bytes:
    """Encode a request; raises `UsageError` if it is too long."""
    return _encode("request", request)


def decode_request(data: Buffer, *, what: str) -> RequestRecord:
    """Decode a request; raises `FormatError` if `data` is not valid."""
    return _decode("request", data, RequestRecord, what=what)


def encode_answer(answer: AnswerRecord) -> bytes:
    """Encode an answer; raises `UsageError` if it is too long."""
    return _encode("answer", answer)


def decode_answer(data: Buffer, *, what: str) -> AnswerRecord:
    """Decode an answer; raises `FormatError` if `data` is not valid."""
    answer = _decode("answer", data, AnswerRecord, what=what)
    if (answer.folder is None) is (answer.error is None):
        raise FormatError(f"{what}: an answer has either a folder or an error")
    if answer.folder is not None and parse_attempt(answer.folder) is None:
        raise FormatError(f"{what}: {answer.folder[:80]!r} is not the folder of a checkpoint")
    return answer


def encode_upload(upload: UploadRecord) -> bytes:
    """Encode a note."""
    return _encode("upload", upload)


def decode_upload(data: Buffer, *, what: str) -> UploadRecord:
    """Decode a note; raises `FormatError` if `data` is not valid."""
    return _decode("upload", data, UploadRecord, what=what)


def encode_tiers(tiers: TiersRecord) -> bytes:
    """Encode a note."""
    return _encode("tiers", tiers)


def decode_tiers(data: Buffer, *, what: str) -> TiersRecord:
    """Decode a note; raises `FormatError` if `data` is not valid."""
    return _decode("tiers", data, TiersRecord, what=what)


def _encode(kind: str, record: msgspec.Struct) -> bytes:
    members: dict[str, Any] = msgspec.to_builtins(record)
    return checked.encode_checked(kind, members)


def _decode(
    kind: str,
    data: Buffer,
    type_: type[T],
    *,
    what: str,
    max_nbytes: int = checked.MAX_CHECKED_NBYTES,
) -> T:
    members = checked.decode_checked(data, what=what, kinds=(kind,), max_nbytes=max_nbytes)
    return strictjson.convert(members, type_, what=what)
