"""Table of all runs: what differs among them, their newest values, and a small curve each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.cli.output import format_nbytes, number, one_line
from holdfast.cli.watch import WatchedRun, age
from holdfast.cli.web.curves import MetricCurve, draw_on, make_grid, metric_names, rank_metric

MAX_METRICS, MAX_SETTINGS = 6, 8
"""Columns of metrics and of settings; the page of a run has all."""
MAX_CELL = 24
"""Characters of a setting that are shown."""
SPARK = (96.0, 24.0)
"""Width and height of a small curve."""
STATUS: Mapping[str, str] = {
    "alive": "training",
    "closed": "ended",
    "dead": "crashed",
    "silent": "silent",
    "unknown": "unknown",
}
"""State of the owner → status of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the table of runs."""

    name: str
    watched: WatchedRun | None
    curves: Mapping[str, MetricCurve]
    config: Mapping[str, str]

    @property
    def status(self) -> str:
        """Status as one word; empty where not known."""
        owner = None if self.watched is None else self.watched.owner
        return "" if owner is None else STATUS.get(owner.state, owner.state)


class Column(NamedTuple):
    """A column that sorts."""

    key: str
    title: str
    is_number: bool
    value: Callable[[Row], Any]
    text: Callable[[Any], str]


def make_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns: step, age and size, the usual metrics, and the settings that differ."""
    return [
        Column("step", "step", True, lambda row: row.watched and row.watched.last_step, str),
        *(
            Column(f"m:{name}", name, True, _last_value(name), lambda value: f"{value:.4g}")
            for name in metric_names([row.curves for row in rows])[:MAX_METRICS]
        ),
        Column("saved", "last save", True, _age_s, lambda seconds: f"{age(seconds)} ago"),
        *(
            Column(f"c:{name}", name, False, _setting(name), lambda text: one_line(text, MAX_CELL))
            for name in _differing(rows)[:MAX_SETTINGS]
        ),
        Column(
            "kept",
            "kept",
            True,
            lambda row: row.watched and len(row.watched.checkpoints),
            str,
        ),
        Column("size", "size", True, lambda row: row.watched and row.watched.nbytes, format_nbytes),
    ]


def _last_value(name: str) -> Callable[[Row], float | None]:
    def find(row: Row) -> float | None:
        curve = row.curves.get(name)
        return None if curve is None else float(curve.values[-1])

    return find


def _setting(name: str) -> Callable[[Row], str | None]:
    return lambda row: row.config.get(name)


def _age_s(row: Row) -> float | None:
    return None if row.watched is None else row.watched.last_age_s


def _differing(rows: Sequence[Row]) -> list[str]:
    """List the settings that differ among the runs that record any; nested ones come last."""
    known = [row.config for row in rows if row.config]
    names = sorted({name for config in known for name in config}, key=lambda n: ("." in n, n))
    return [name for name in names if len({config.get(name) for config in known}) > 1]


def sort_rows(rows: Sequence[Row], columns: Sequence[Column], order: str) -> list[Row]:
    """Sort by the column that `order` names, with `-` from the largest; newest save first else."""
    keys: dict[str, Callable[[Row], Any]] = {column.key: column.value for column in columns}
    keys |= {"run": lambda row: row.name, "status": lambda row: row.status or None}
    find = keys.get(order.removeprefix("-"))
    if find is None:
        find, order = _age_s, "saved"
    known = [row for row in rows if not _is_missing(find(row))]
    known.sort(key=lambda row: _to_sortable(find(row)), reverse=order.startswith("-"))
    return known + [row for row in rows if _is_missing(find(row))]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _to_sortable(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts numbers, also those in settings, before text."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return 1, 0.0, str(value)
    return (1, 0.0, str(value)) if math.isnan(found) else (0, found, "")


class Spark(NamedTuple):
    """Small curve: its metric, the points of a line, and how it reads aloud."""

    name: str
    points: str
    text: str


def make_spark(row: Row, preferred: str) -> Spark | None:
    """Draw the preferred metric of a run, or the most usual one that it has."""
    name = preferred if preferred in row.curves else min(row.curves, key=rank_metric, default=None)
    if name is None:
        return None
    curve = row.curves[name]
    grid = make_grid([curve.steps], 48, is_whole=True)
    drawn = draw_on(grid, curve.steps, curve.values)["mean"]
    known = [(x, y) for x, y in zip(grid.tolist(), drawn, strict=True) if y is not None]
    if not known:
        return None
    (x0, x1), ys = (known[0][0], known[-1][0]), [y for _, y in known]
    low, high = min(ys), max(ys)
    width, height = SPARK
    placed = [
        (
            2 + (x - x0) / ((x1 - x0) or 1) * (width - 4),
            height - 3 - (0.5 if low == high else (y - low) / (high - low)) * (height - 6),
        )
        for x, y in known
    ]
    if len(placed) == 1:
        placed.append((width - 2, placed[0][1]))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return Spark(name, points, f"{name} from {number(ys[0])} to {number(ys[-1])}")
