"""Metrics of saves, made of events, for Prometheus (`Prometheus`) and OpenTelemetry.

`OpenTelemetry` makes no spans: the SDK draws their ids from Python's global generator, which is
training's, and a resume would not be exact. Dashboards use the names in `INSTRUMENTS`, which
docs/trackers.md lists; tests/sinks/test_metrics.py compares both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from typing_extensions import override

from holdfast.arguments import check_arguments, expect_methods, import_extra
from holdfast.control.reporter import Reporter
from holdfast.errors import UsageError
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


_made: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Metrics by registry, which refuses a name twice: several sinks share them."""


class Prometheus(Reporter):
    """Sink that keeps metrics of saves for Prometheus, as `holdfast_saves_total{run="…"}`.

    They are in `registry`, which your program serves, and in the file `textfile`, which the
    textfile collector of node_exporter reads. docs/trackers.md lists them.
    """

    @check_arguments()
    def __init__(
        self,
        run: str = "",
        *,
        registry: Any = None,
        textfile: str | os.PathLike[str] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Make the metrics, with `run` as the value of their label `run`.

        `registry`: None means prometheus_client's default, or one of its own for a `textfile`. The
        textfile, `*.prom`, has all metrics of the registry, and is replaced at each event.
        """
        super().__init__(timeout_s=timeout_s)
        self._library = import_extra("prometheus_client", "prometheus")
        self._textfile = None if textfile is None else os.fspath(textfile)
        if self._textfile is not None and not self._textfile.endswith(".prom"):
            raise UsageError(f"textfile={self._textfile!r}: node_exporter reads *.prom only")
        if registry is None:
            is_apart = self._textfile is not None
            registry = self._library.CollectorRegistry() if is_apart else self._library.REGISTRY
        expect_methods(
            "registry",
            registry,
            ("register", "collect"),
            "a CollectorRegistry of prometheus_client",
        )
        self._registry = registry
        self._run = run
        self._measures = Measures()
        if registry not in _made:
            _made[registry] = {
                name: self._create_instrument(name, one) for name, one in INSTRUMENTS.items()
            }
        self._metrics = _made[registry]

    @override
    def report(self, event: Event, at_s: float) -> None:
        is_changed = False
        for measured in self._measures.yield_numbers(event, at_s):
            is_changed = True
            metric = self._metrics[measured.name].labels(run=self._run, **measured.labels)
            match INSTRUMENTS[measured.name].kind:
                case "counter":
                    metric.inc(measured.value)
                case "gauge":
                    metric.set(measured.value)
                case "histogram":
                    metric.observe(measured.value)
        if self._textfile is not None and is_changed:
            self._library.write_to_textfile(self._textfile, self._registry)

    def _create_instrument(self, name: str, one: Instrument) -> Any:
        options: dict[str, Any] = {"buckets": SECONDS} if one.kind == "histogram" else {}
        return getattr(self._library, one.kind.title())(
            f"holdfast_{name}",
            one.about,
            ("run", *one.labels),
            unit=one.unit,
            registry=self._registry,
            **options,
        )


_UNITS = {"": "1", "bytes": "By", "seconds": "s"}


class OpenTelemetry(Reporter):
    """Sink of metrics such as `holdfast.saves`, which the program's OpenTelemetry SDK sends on.

    Without an SDK they go nowhere.
    """

    @check_arguments()
    def __init__(
        self, run: str = "", *, meter_provider: Any = None, timeout_s: float = 10.0
    ) -> None:
        """Make the instruments, with `run` as the value of their attribute `run`.

        `meter_provider`: None means the one that the program has set.
        """
        super().__init__(timeout_s=timeout_s)
        if meter_provider is not None:
            expect_methods("meter_provider", meter_provider, ("get_meter",), "a MeterProvider")
        metrics = import_extra("opentelemetry.metrics", "otel")
        meter = metrics.get_meter("holdfast", meter_provider=meter_provider)
        self._instruments = {
            name: _create_instrument(meter, name, one) for name, one in INSTRUMENTS.items()
        }
        self._run = run
        self._measures = Measures()

    @override
    def report(self, event: Event, at_s: float) -> None:
        for measured in self._measures.yield_numbers(event, at_s):
            attributes = {"run": self._run, **measured.labels}
            instrument = self._instruments[measured.name]
            match INSTRUMENTS[measured.name].kind:
                case "counter":
                    instrument.add(measured.value, attributes)
                case "gauge":
                    instrument.set(measured.value, attributes)
                case "histogram":
                    instrument.record(measured.value, attributes)


def _create_instrument(meter: Any, name: str, one: Instrument) -> Any:
    options: dict[str, Any] = {"unit": _UNITS[one.unit], "description": one.about}
    if one.kind == "histogram":
        options["explicit_bucket_boundaries_advisory"] = SECONDS
    return getattr(meter, f"create_{one.kind}")(f"holdfast.{name}", **options)
