"""Display of a run in notebooks: a card of its state, and one that follows a running fit."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from holdfast.errors import UsageError
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.training import Metrics, Training

_REFRESH_S = 0.5
"""Shortest time between two refreshes."""


def card(training: Training, metrics: Metrics | None = None, note: str = "") -> str:
    """Return the state of a run as HTML."""
    now = training.counters
    rows: dict[str, Any] = {"step": f"{now.step:,}", "epoch": now.epoch}
    try:
        rows["goal"] = training.goal
        done = training.goal.unit.of(now.timestamp) or 0
        share = min(1.0, done / float(training.goal.value))
    except UsageError:
        share = 0.0
    for name in ("samples", "tokens"):
        if getattr(now, name) is not None:
            rows[name] = f"{getattr(now, name):,}"
    parameters = sum(item.numel() for item in training.model.parameters())
    rows["model"] = f"{type(training.model).__name__}, {parameters:,} parameters"
    rows |= {name: f"{value:.5g}" for name, value in (metrics or {}).items()}
    if note:
        rows["state"] = note
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<div><progress value='{share:.4f}' max='1'></progress><table>{cells}</table></div>"


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookCard(Logger):
    """Logger that shows a running fit as a card in a notebook; no-op elsewhere."""

    records_log = False

    def __init__(self) -> None:
        self._handle: Any = None
        self._metrics: dict[str, float] = {}
        self._shown_s = 0.0

    def fit_start(self, training: Training) -> None:
        """Show the card."""
        if is_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML(card(training)), display_id=True)

    def log(self, training: Training, metrics: Metrics) -> None:
        """Show the metrics of the step."""
        self._metrics.update(metrics)
        if time.monotonic() >= self._shown_s + _REFRESH_S:
            self._show(training, "training")

    def fit_end(self, training: Training) -> None:
        """Show the last metrics."""
        self._show(training, "ended")

    def close(self, training: Training) -> None:
        """Leave the card as it is."""
        self._handle = None

    def _show(self, training: Training, note: str) -> None:
        if self._handle is None:
            return
        from IPython.display import HTML

        self._shown_s = time.monotonic()
        self._handle.update(HTML(card(training, self._metrics, note)))
