"""`OpenTelemetry`: sink that gives metrics of saves to OpenTelemetry.

It makes no spans: the SDK draws their ids from Python's global generator, which is training's, and
a resume would not be exact.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.control.reporter import Reporter
from holdfast.events import Event
from holdfast.sinks.extras import expect_methods, import_extra
from holdfast.sinks.measures import INSTRUMENTS, SECONDS, Instrument, Measures

_UNITS = {"": "1", "bytes": "By", "seconds": "s"}


class OpenTelemetry(Reporter):
    """Sink of metrics such as `holdfast.saves`, which the program's OpenTelemetry SDK sends on.

    Without an SDK they go nowhere.
    """

    @check_arguments()
    def __init__(
        self,
        run: str = "",
        *,
        meter_provider: Any = None,
        timeout_s: float = 10.0,
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
