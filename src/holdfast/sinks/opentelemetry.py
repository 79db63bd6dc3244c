"""`OpenTelemetry`: sink that gives metrics of saves, and a span for each, to OpenTelemetry."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from holdfast.engine.control.reporting import Reporter
from holdfast.events import Event, without_secrets
from holdfast.sinks.extras import import_extra
from holdfast.sinks.measures import INSTRUMENTS, SECONDS, Instrument, Measures

_UNITS = {"": "1", "bytes": "By", "seconds": "s"}


class OpenTelemetry(Reporter):
    """Sink of metrics such as `holdfast.saves`, and of a span `holdfast.save` for each save.

    They go where the program's OpenTelemetry SDK sends them; without an SDK, nowhere.
    """

    def __init__(
        self,
        run: str = "",
        *,
        meter_provider: Any = None,
        tracer_provider: Any = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Make the instruments, with `run` as the value of their attribute `run`.

        Providers: None means those that the program has set.

        Raises:
            UsageError: the extra is not installed.
        """
        super().__init__(timeout_s=timeout_s)
        metrics = import_extra("opentelemetry.metrics", "otel")
        self._trace = import_extra("opentelemetry.trace", "otel")
        meter = metrics.get_meter("holdfast", meter_provider=meter_provider)
        self._tracer = self._trace.get_tracer("holdfast", tracer_provider=tracer_provider)
        self._instruments = {name: _make(meter, name, one) for name, one in INSTRUMENTS.items()}
        self._run = run
        self._measures = Measures()
        self._begun_s: dict[int, float] = {}
        """Unix time at which the save of each step began to be written."""

    @override
    def report(self, event: Event, at_s: float) -> None:
        for measured in self._measures.of(event, at_s):
            attributes = {"run": self._run, **measured.labels}
            instrument = self._instruments[measured.name]
            match INSTRUMENTS[measured.name].kind:
                case "counter":
                    instrument.add(measured.value, attributes)
                case "gauge":
                    instrument.set(measured.value, attributes)
                case "histogram":
                    instrument.record(measured.value, attributes)
        if event.step is None:
            return
        if event.kind == "save_started":
            self._begun_s[event.step] = at_s
        elif event.kind in ("committed", "save_failed"):
            self._span(event, self._begun_s.pop(event.step, at_s), at_s)

    def _span(self, event: Event, begun_s: float, ended_s: float) -> None:
        named = {name: event.fields[name] for name in ("folder", "nbytes") if name in event.fields}
        span = self._tracer.start_span(
            "holdfast.save",
            start_time=int(begun_s * 1e9),
            attributes={"run": self._run, "step": event.step, **named},
        )
        if event.kind == "save_failed":
            code = self._trace.StatusCode.ERROR
            span.set_status(self._trace.Status(code, without_secrets(event.message)))
        span.end(int(ended_s * 1e9))


def _make(meter: Any, name: str, one: Instrument) -> Any:
    options: dict[str, Any] = {"unit": _UNITS[one.unit], "description": one.about}
    if one.kind == "histogram":
        options["explicit_bucket_boundaries_advisory"] = SECONDS
    return getattr(meter, f"create_{one.kind}")(f"holdfast.{name}", **options)
