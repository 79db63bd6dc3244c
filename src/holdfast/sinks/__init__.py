"""Sinks of events: references to checkpoints for trackers, and metrics of saves.

    Checkpoints("runs/gpt", sinks=[log_event, MLflowReferences()])

Each works in a thread of its own: what hangs, is offline or raises there harms no save.
"""

from __future__ import annotations

from holdfast.control.reporter import OnCommit, Reporter
from holdfast.sinks.metrics import OpenTelemetry, Prometheus
from holdfast.sinks.trackers import (
    MLflowReferences,
    TensorBoardReferences,
    TrackioReferences,
    WandbReferences,
)

__all__ = [
    "MLflowReferences",
    "OnCommit",
    "OpenTelemetry",
    "Prometheus",
    "Reporter",
    "TensorBoardReferences",
    "TrackioReferences",
    "WandbReferences",
]
