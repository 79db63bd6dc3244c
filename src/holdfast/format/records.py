"""Claims, closes, heartbeats, sidecars and requests (docs/format.md, section 7)."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from holdfast.errors import FormatError
from holdfast.format import sealed, strictjson
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import Hex128, Natural, Positive, Reference, check_reference
from holdfast.store.base import Buffer

MAX_ENDED_NBYTES = 16 * 1024 * 1024

T = TypeVar("T")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Which process: `start` is its start time and `boot_id` the boot, both opaque texts."""

    host: str
    pid: Natural
    start: str
    boot_id: str
    pid_namespace: str


class Writer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The claim of an epoch. `resumed_from` is the checkpoint that it goes on from.

    `rollback` says that a person chose that one by name; a claim of the latest only counts once
    it has committed.
    """

    epoch: Positive
    nonce: Hex128
    resumed_from: Reference | None
    rollback: bool
    takeover: bool
    created: str
    process: Process
    tiered: bool = False
    """Whether the run has two roots, of which one may lack what the claim goes on from."""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """That an epoch ended cleanly."""

    epoch: Positive
    nonce: Hex128


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat; `beat` counts up."""

    epoch: Positive
    nonce: Hex128
    beat: Natural


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Folders of attempts whose registers have their last value, so that these need not be read.

    Nothing but time depends on it.
    """

    epoch: Positive
    aborted: tuple[str, ...]
    deleted: tuple[str, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """That a process reads the checkpoint that the lease's name names; `beat` counts up."""

    nonce: Hex128
    beat: Natural
    created: str
    process: Process


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """The whole set of tags and the pin of a checkpoint."""

    tags: tuple[str, ...]
    pinned: bool


class Retired(msgspec.Struct, frozen=True, kw_only=True):
    """That retention is about to delete a checkpoint."""

    by: str
    reason: str


class Thinned(msgspec.Struct, frozen=True, kw_only=True):
    """That retention is about to drop a component of a checkpoint that stays."""

    by: str
    component: str
    reason: str


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """That a resume found a checkpoint damaged."""

    by: str
    reasons: tuple[str, ...]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """That somebody asks for a save: `who` for people, `process` so that it can be told when
    nobody waits for the answer any more."""

    id: Hex128
    who: str
    process: Process
    created: str
    reason: str = ""
    tags: tuple[str, ...] = ()


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request: the folder of the checkpoint, or the error."""

    folder: str | None
    error: str | None
    created: str
    asker: Process | None = None
    """The process that asked, where its request could be read."""


UploadState = Literal["waiting", "sending", "failed", "refused", "uploaded"]


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far a checkpoint of the local root is on its way to the remote one.

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
    """Where the local root is mirrored to, and what became of the last upload.

    `epoch` is a claim that the remote root had; 0: none was ever seen there.
    """

    remote: str
    changed: str
    epoch: Natural = 0
    error: str | None = None
    folder: str | None = None
    nbytes: Natural = 0
    upload_s: float = 0.0
    requests: Natural = 0


def encode_writer(writer: Writer) -> bytes:
    """The claim as a sealed document."""
    return _encode("writer", writer)


def decode_writer(data: Buffer, *, what: str) -> Writer:
    """The claim in `data`; a `FormatError` otherwise."""
    writer = _decode("writer", data, Writer, what=what)
    check_reference(writer.resumed_from, what=what)
    return writer


def encode_closed(closed: Closed) -> bytes:
    """The close as a sealed document."""
    return _encode("closed", closed)


def decode_closed(data: Buffer, *, what: str) -> Closed:
    """The close in `data`; a `FormatError` otherwise."""
    return _decode("closed", data, Closed, what=what)


def encode_alive(alive: Alive) -> bytes:
    """The heartbeat as a sealed document."""
    return _encode("alive", alive)


def decode_alive(data: Buffer, *, what: str) -> Alive:
    """The heartbeat in `data`; a `FormatError` otherwise."""
    return _decode("alive", data, Alive, what=what)


def encode_ended(ended: Ended) -> bytes:
    """The record as a sealed document; a `UsageError` when it is too long."""
    return sealed.seal("ended", msgspec.to_builtins(ended), max_nbytes=MAX_ENDED_NBYTES)


def decode_ended(data: Buffer, *, what: str) -> Ended:
    """The record in `data`; a `FormatError` otherwise."""
    ended = _decode("ended", data, Ended, what=what, max_nbytes=MAX_ENDED_NBYTES)
    odd = next((n for n in (*ended.aborted, *ended.deleted) if parse_attempt(n) is None), None)
    if odd is not None:
        raise FormatError(f"{what}: {odd[:80]!r} is not the folder of an attempt")
    return ended


def encode_lease(lease: Lease) -> bytes:
    """The lease as a sealed document."""
    return _encode("lease", lease)


def decode_lease(data: Buffer, *, what: str) -> Lease:
    """The lease in `data`; a `FormatError` otherwise."""
    return _decode("lease", data, Lease, what=what)


def encode_notes(notes: Notes) -> bytes:
    """The notes as a sealed document; a `UsageError` when they are too long."""
    return _encode("notes", notes)


def decode_notes(data: Buffer, *, what: str) -> Notes:
    """The notes in `data`; a `FormatError` otherwise."""
    return _decode("notes", data, Notes, what=what)


def encode_retired(retired: Retired) -> bytes:
    """The mark as a sealed document."""
    return _encode("retired", retired)


def decode_retired(data: Buffer, *, what: str) -> Retired:
    """The mark in `data`; a `FormatError` otherwise."""
    return _decode("retired", data, Retired, what=what)


def encode_thinned(thinned: Thinned) -> bytes:
    """The mark as a sealed document."""
    return _encode("thinned", thinned)


def decode_thinned(data: Buffer, *, what: str) -> Thinned:
    """The mark in `data`; a `FormatError` otherwise."""
    return _decode("thinned", data, Thinned, what=what)


def encode_rejected(rejected: Rejected) -> bytes:
    """The mark as a sealed document."""
    return _encode("rejected", rejected)


def decode_rejected(data: Buffer, *, what: str) -> Rejected:
    """The mark in `data`; a `FormatError` otherwise."""
    return _decode("rejected", data, Rejected, what=what)


def encode_request(request: RequestRecord) -> bytes:
    """The request as a sealed document; a `UsageError` when it is too long."""
    return _encode("request", request)


def decode_request(data: Buffer, *, what: str) -> RequestRecord:
    """The request in `data`; a `FormatError` otherwise."""
    return _decode("request", data, RequestRecord, what=what)


def encode_answer(answer: AnswerRecord) -> bytes:
    """The answer as a sealed document; a `UsageError` when it is too long."""
    return _encode("answer", answer)


def decode_answer(data: Buffer, *, what: str) -> AnswerRecord:
    """The answer in `data`; a `FormatError` otherwise."""
    answer = _decode("answer", data, AnswerRecord, what=what)
    if (answer.folder is None) is (answer.error is None):
        raise FormatError(f"{what}: an answer has either a folder or an error")
    if answer.folder is not None and parse_attempt(answer.folder) is None:
        raise FormatError(f"{what}: {answer.folder[:80]!r} is not the folder of a checkpoint")
    return answer


def encode_upload(upload: UploadRecord) -> bytes:
    """The note as a sealed document."""
    return _encode("upload", upload)


def decode_upload(data: Buffer, *, what: str) -> UploadRecord:
    """The note in `data`; a `FormatError` otherwise."""
    return _decode("upload", data, UploadRecord, what=what)


def encode_tiers(tiers: TiersRecord) -> bytes:
    """The note as a sealed document."""
    return _encode("tiers", tiers)


def decode_tiers(data: Buffer, *, what: str) -> TiersRecord:
    """The note in `data`; a `FormatError` otherwise."""
    return _decode("tiers", data, TiersRecord, what=what)


def _encode(kind: str, record: msgspec.Struct) -> bytes:
    members: dict[str, Any] = msgspec.to_builtins(record)
    return sealed.seal(kind, members)


def _decode(
    kind: str,
    data: Buffer,
    type_: type[T],
    *,
    what: str,
    max_nbytes: int = sealed.MAX_SEALED_NBYTES,
) -> T:
    members = sealed.unseal(data, what=what, kinds=(kind,), max_nbytes=max_nbytes)
    return strictjson.convert(members, type_, what=what)
