"""`Prometheus`: sink that keeps metrics of saves in a registry of prometheus_client."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.control.reporter import Reporter
from holdfast.errors import UsageError
from holdfast.events import Event
from holdfast.sinks.extras import expect_methods, import_extra
from holdfast.sinks.measures import INSTRUMENTS, SECONDS, Instrument, Measures

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
