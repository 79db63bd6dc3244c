"""Segments of the history of a run: metrics of steps, saves and deletions (docs/format.md, 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format.manifest import Hex128, Natural, Positive, Reference, check_reference
from holdfast.format.strictjson import Record, encode_checked

MAX_SEGMENT_NBYTES = 1024 * 1024
MAX_TIME_S = 5e10
"""Longest time before or after 1970, in seconds; dates have years up to 9999."""

Seconds = Annotated[float, msgspec.Meta(ge=-MAX_TIME_S, le=MAX_TIME_S)]
"""Seconds since 1970 (UTC), in the range of dates."""

Number = float | Literal["nan", "inf", "-inf"]
"""A value of a metric; those that JSON cannot hold are text."""


class MetricRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that have values for the same metrics, in the order in which they were recorded."""

    names: tuple[str, ...]
    steps: Sequence[Natural]
    times: Sequence[Seconds]
    """Time of each row."""
    values: Sequence[Sequence[Number]]
    """One column for each name."""


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A save that committed or failed, or the deletion of a checkpoint."""

    what: Literal["saved", "failed", "deleted"]
    time: Seconds
    step: Natural | None = None
    folder: str = ""
    """Folder of the checkpoint; empty if a save failed before it had one."""
    why: str = ""
    """Reason of the save or of the deletion, or the error."""
    save_class: str = msgspec.field(default="", name="class")
    nbytes: Natural = 0
    tier: Literal["", "remote"] = ""
    """Root of a deletion: this one, or the remote tier of it."""
    metrics: Mapping[str, Number] = msgspec.field(default_factory=dict)
    """Metrics that a deleted checkpoint got after its save."""


class HistorySession(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of what one claim of the run recorded."""

    epoch: Positive
    nonce: Hex128
    """That of the claim."""
    resumed_from: Reference | None
    from_step: Natural
    """Step of that checkpoint; 0 in a new run."""
    every: Positive = 1
    """At least one row of so many is left; more than 1 in the oldest part of a long history."""
    rows: Sequence[MetricRows] = ()
    events: Sequence[HistoryEvent] = ()


class HistorySegment(Record, frozen=True, kw_only=True, omit_defaults=True):
    """File of the history: a part of a session, or merged parts of several."""

    kind: ClassVar[str] = "history"
    max_nbytes: ClassVar[int] = MAX_SEGMENT_NBYTES
    sessions: Sequence[HistorySession]

    @override
    def encode(self) -> bytes:
        members: Mapping[str, Any] = msgspec.to_builtins(self)
        return encode_checked(self.kind, members, max_nbytes=self.max_nbytes, is_compact=True)

    @override
    def _check(self, what: str) -> None:
        for session in self.sessions:
            check_reference(session.resumed_from, what=what)
            for rows in session.rows:
                lengths = {len(rows.steps), len(rows.times), *map(len, rows.values)}
                if len(lengths) > 1 or len(rows.names) != len(rows.values):
                    raise FormatError(f"{what}: columns of rows differ in length")


def to_number(value: float) -> Number:
    """Return a float as a segment holds it."""
    return value if math.isfinite(value) else _NAMES[str(value)]


_NAMES: Mapping[str, Literal["nan", "inf", "-inf"]] = {"nan": "nan", "inf": "inf", "-inf": "-inf"}
