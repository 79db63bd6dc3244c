"""Metrics of saves, made of events: the same for Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.events import Event

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the buckets of all histograms, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """Description of a metric: its kind, its unit and its labels."""

    kind: Literal["counter", "gauge", "histogram"]
    about: str
    unit: Literal["", "bytes", "seconds"] = ""
    labels: tuple[str, ...] = ()


INSTRUMENTS: Mapping[str, Instrument] = {
    "saves": Instrument(
        kind="counter",
        about="Saves that ended: committed, unchanged, failed or skipped",
        labels=("outcome",),
    ),
    "save_stall": Instrument(
        kind="histogram", about="Time that a save stopped training", unit="seconds"
    ),
    "save_write": Instrument(
        kind="histogram",
        about="Time from the end of the stall until the checkpoint was durable",
        unit="seconds",
    ),
    "committed": Instrument(kind="counter", about="Bytes of committed checkpoints", unit="bytes"),
    "last_committed_step": Instrument(kind="gauge", about="Step of the newest commit"),
    "last_committed_timestamp": Instrument(
        kind="gauge", about="Unix time of the newest commit", unit="seconds"
    ),
    "uploads": Instrument(
        kind="counter",
        about="Uploads to the remote tier: done, or tries that failed",
        labels=("outcome",),
    ),
    "uploaded": Instrument(kind="counter", about="Bytes sent to the remote tier", unit="bytes"),
    "upload_lag": Instrument(
        kind="histogram",
        about="Time from a commit until it was committed in the remote tier",
        unit="seconds",
    ),
    "deletions": Instrument(
        kind="counter", about="Checkpoints that retention deleted", labels=("tier",)
    ),
    "failures": Instrument(
        kind="counter",
        about="Events that report a problem: rejected checkpoints, failed housekeeping, …",
        labels=("kind",),
    ),
}
"""Name of each metric, without prefix and unit, and what it is."""

_PROBLEMS = ("save_failed", "upload_failed", "rejected", "housekeeping_failed", "mended")
_MAX_COMMITS = 1_000
"""Most commits that wait for their upload, of which the time is known."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A number for one metric."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Measures:
    """Makes numbers of events. Keeps the times of commits, of which the upload is to come."""

    def __init__(self) -> None:
        self._committed_s: dict[str, float] = {}

    def yield_numbers(self, event: Event, at_s: float) -> Iterator[MetricSample]:
        """Yield the numbers of an event that was emitted at `at_s`, a Unix time."""
        fields = event.fields
        if event.kind in _PROBLEMS:
            yield MetricSample("failures", 1, {"kind": event.kind})
        match event.kind:
            case "stalled":
                yield MetricSample("save_stall", fields["stall_s"])
            case "save_failed" | "save_skipped":
                yield MetricSample("saves", 1, {"outcome": event.kind.removeprefix("save_")})
            case "committed":
                yield from self._of_commit(event, at_s)
            case "uploaded":
                yield MetricSample("uploads", 1, {"outcome": "done"})
                yield MetricSample("uploaded", fields["sent_nbytes"])
                since_s = self._committed_s.pop(fields["folder"], None)
                if since_s is not None:
                    yield MetricSample("upload_lag", max(at_s - since_s, 0.0))
            case "upload_failed":
                yield MetricSample("uploads", 1, {"outcome": "failed"})
            case "retracted":
                yield MetricSample("deletions", 1, {"tier": fields.get("tier", "local")})

    def _of_commit(self, event: Event, at_s: float) -> Iterator[MetricSample]:
        fields = event.fields
        yield MetricSample(
            "saves", 1, {"outcome": "committed" if fields["is_new"] else "unchanged"}
        )
        if not fields["is_new"]:
            return
        yield MetricSample("save_write", fields["save_s"])
        yield MetricSample("committed", fields["nbytes"])
        yield MetricSample("last_committed_step", event.step or 0)
        yield MetricSample("last_committed_timestamp", at_s)
        self._committed_s[fields["folder"]] = at_s
        if len(self._committed_s) > _MAX_COMMITS:
            del self._committed_s[next(iter(self._committed_s))]
