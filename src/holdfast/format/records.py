"""Records: claims, releases, heartbeats, sidecars, requests (docs/format.md, section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import (
    Hex64,
    Hex128,
    Natural,
    Positive,
    Reference,
    check_reference,
    decode_metrics,
    encode_metrics,
)
from holdfast.format.strictjson import Record

MAX_ENDED_NBYTES = 16 * 1024 * 1024


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a process; start time `start` and boot `boot_id` are opaque texts."""

    host: str
    pid: Natural
    start: str
    boot_id: str
    pid_namespace: str


class WriterRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Record of a writer's claim to the run; `epoch` numbers the claims.

    The run continues from `resumed_from`: with `rollback` a checkpoint that a person chose by name,
    or a fresh start if there is none; else the latest one, and then the claim counts only once it
    has committed.
    """

    kind: ClassVar[str] = "writer"
    epoch: Positive
    nonce: Hex128
    resumed_from: Reference | None
    rollback: bool
    takeover: bool
    created: str
    process: Process
    tiered: bool = False
    """Whether the run has two roots, one of which may lack the `resumed_from` checkpoint."""
    purpose: str = ""
    """What a person claimed it for, such as a deletion and its reason; empty for a training."""

    @override
    def _check(self, what: str) -> None:
        check_reference(self.resumed_from, what=what)


class Closed(Record, frozen=True, kw_only=True):
    """Record that the writer of an epoch released the run cleanly."""

    kind: ClassVar[str] = "closed"
    epoch: Positive
    nonce: Hex128


class Alive(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Heartbeat of a writer; each one increments `beat`."""

    kind: ClassVar[str] = "alive"
    epoch: Positive
    nonce: Hex128
    beat: Natural
    process: Process | None = None
    """The process that finishes the last save of the writer, whose own has ended."""


class Ended(Record, frozen=True, kw_only=True):
    """Aborted and deleted attempts, whose manifests need not be read again. Only saves time."""

    kind: ClassVar[str] = "ended"
    max_nbytes: ClassVar[int] = MAX_ENDED_NBYTES
    epoch: Positive
    aborted: tuple[str, ...]
    deleted: tuple[str, ...]

    @override
    def _check(self, what: str) -> None:
        odd = next((n for n in (*self.aborted, *self.deleted) if parse_attempt(n) is None), None)
        if odd is not None:
            raise FormatError(f"{what}: {odd[:80]!r} is not the folder of an attempt")


class Lease(Record, frozen=True, kw_only=True):
    """Lease of a process that reads the checkpoint in the record's name; `beat` counts renewals."""

    kind: ClassVar[str] = "lease"
    nonce: Hex128
    beat: Natural
    created: str
    process: Process


class Notes(Record, frozen=True, kw_only=True, omit_defaults=True):
    """All that was added to a checkpoint after its save: tags, pin, metrics, evaluations."""

    kind: ClassVar[str] = "notes"
    tags: tuple[str, ...]
    pinned: bool
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Metrics measured later; they take precedence over those of the manifest."""
    evaluating: Mapping[str, Hex64] = msgspec.field(default_factory=dict)
    """Metric → the lease of the process that measures it."""

    @override
    def _members(self) -> dict[str, Any]:
        members = super()._members()
        return {**members, "metrics": encode_metrics(self.metrics)} if self.metrics else members

    @override
    @classmethod
    def _prepare_members(cls, members: dict[str, Any]) -> None:
        decode_metrics(members)


class Retired(Record, frozen=True, kw_only=True):
    """Mark that retention is about to delete a checkpoint."""

    kind: ClassVar[str] = "retired"
    by: str
    reason: str


class Thinned(Record, frozen=True, kw_only=True):
    """Mark that retention is about to drop a component of a checkpoint that stays."""

    kind: ClassVar[str] = "thinned"
    by: str
    component: str
    reason: str


class Rejected(Record, frozen=True, kw_only=True):
    """Mark that a resume found a checkpoint damaged."""

    kind: ClassVar[str] = "rejected"
    by: str
    reasons: tuple[str, ...]


class RequestRecord(Record, frozen=True, kw_only=True):
    """Request for a save: `who` for people, `process` to see if it still waits."""

    kind: ClassVar[str] = "request"
    id: Hex128
    who: str
    process: Process
    created: str
    reason: str = ""
    tags: tuple[str, ...] = ()


class AnswerRecord(Record, frozen=True, kw_only=True):
    """Answer to a request: the folder of the checkpoint, or the error."""

    kind: ClassVar[str] = "answer"
    folder: str | None
    error: str | None
    created: str
    asker: Process | None = None
    """The process that made the request, if that could be read."""

    @override
    def _check(self, what: str) -> None:
        if (self.folder is None) is (self.error is None):
            raise FormatError(f"{what}: an answer has either a folder or an error")
        if self.folder is not None and parse_attempt(self.folder) is None:
            raise FormatError(f"{what}: {self.folder[:80]!r} is not the folder of a checkpoint")


UploadState = Literal["waiting", "sending", "failed", "refused", "uploaded"]


class UploadRecord(Record, frozen=True, kw_only=True):
    """State of an upload: `waiting`, `sending`, `failed` (to retry), `refused` or `uploaded`."""

    kind: ClassVar[str] = "upload"
    remote: str
    state: UploadState
    nbytes: Natural
    changed: str
    sent_nbytes: Natural = 0
    tries: Natural = 0
    error: str | None = None


class TiersRecord(Record, frozen=True, kw_only=True):
    """Remote root, newest epoch that was seen there (or 0), and last upload of a local root.

    `host` is the host that this root is a disk of; empty: the local root has all files.
    """

    kind: ClassVar[str] = "tiers"
    remote: str
    changed: str
    epoch: Natural = 0
    error: str | None = None
    folder: str | None = None
    nbytes: Natural = 0
    upload_s: float = 0.0
    requests: Natural = 0
    host: str = ""

    @override
    def _members(self) -> dict[str, Any]:
        members = super()._members()
        if not self.host:
            del members["host"]
        return members
