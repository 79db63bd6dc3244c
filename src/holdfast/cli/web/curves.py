"""Curves of runs, as read once per change and as drawn, and the table of all runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.cli.documents import is_timing
from holdfast.cli.output import Answer, format_nbytes, number, one_line
from holdfast.cli.target import open_root
from holdfast.cli.watch import WatchedRun, age
from holdfast.cli.web.jobs import READING
from holdfast.policy.rules import recorded_time
from holdfast.root import history
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.history import HistoryReader

Floats = NDArray[np.float64]
Axis = Literal["step", "time", "since"]
"""`time`: seconds since 1970; `since`: seconds since the first value of the run."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "eval", "dev", "test"})
_RATE = re.compile(r"(.*[^a-z])?(lr|learning_rate)([^a-z].*)?", re.ASCII | re.IGNORECASE)
_COUNTER = re.compile(
    r"(.*[/_])?(epochs?|steps?|iters?|iterations?|samples?|tokens?|flos)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """Values of a metric, with the step and the time (seconds since 1970) of each."""

    name: str
    steps: Floats
    times: Floats
    values: Floats
    branch: int = 0
    """Session whose values a rollback left behind; 0: the run stands on them."""

    def find_places(self, axis: Axis, start: float) -> Floats:
        """Return the places of the values on an axis; `start` is the first time of the run."""
        if axis == "step":
            return self.steps
        return self.times if axis == "time" else np.subtract(self.times, start)


class RunCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a run, and the settings of its newest checkpoint."""

    curves: tuple[Any, ...]
    """Each a `MetricCurve`; what the run stands on comes first."""
    config: Mapping[str, str]

    @property
    def start(self) -> float:
        """Time of the first value, in seconds since 1970."""
        times = np.concatenate([np.empty(0), *(one.times for one in self.curves)])
        return float(np.min(times[np.isfinite(times)], initial=np.inf))

    def standing_curves(self) -> dict[str, MetricCurve]:
        """Return the curves that the run stands on, by name, those that people look for first."""
        found = {one.name: one for one in self.curves if not one.branch}
        return {name: found[name] for name in sorted(found, key=rank_metric)}


class CurveReader:
    """Reader of the curves of one run, which reads again only what has changed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._history: HistoryReader | None = None

    def read_curves(self) -> Answer:
        """Read metrics from the history, and from checkpoints what it does not have."""
        with READING.take_turn(self._root):
            return self._read_curves()

    def _read_curves(self) -> Answer:
        store = open_root(self._root)
        if self._history is None:
            self._history = HistoryReader(store)
        history = self._history.read_history()
        catalog = Catalog(store)
        entries, _ = catalog.survey()
        lineage = {str(name) for name in catalog.lineage()}
        newest = max(entries, key=lambda entry: entry.order, default=None)
        standing = {name: _to_curve(name, curve) for name, curve in history.curves.items()}
        saved = _curves_of([entry for entry in entries if entry.folder in lineage])
        for name, curve in saved.items():
            standing[name] = curve if name not in standing else _join(standing[name], curve)
        branches = {branch.epoch: branch.curves for branch in history.branches}
        curves = [*standing.values()]
        for epoch, by_name in branches.items():
            curves += [_to_curve(name, curve, epoch) for name, curve in by_name.items()]
        for epoch in {entry.name.epoch for entry in entries if entry.folder not in lineage}:
            if epoch not in branches:  # saved before there was a history, or without
                own = [entry for entry in entries if entry.name.epoch == epoch]
                left = [entry for entry in own if entry.folder not in lineage]
                curves += _curves_of(left, epoch).values()
        config = {} if newest is None else newest.manifest.config
        return Answer(document=RunCurves(curves=tuple(curves), config=config), parts=[])


def _to_curve(name: str, found: history.HistoryCurve, branch: int = 0) -> MetricCurve:
    steps, times, values = (
        np.array(column, np.float64) for column in (found.steps, found.times, found.values)
    )
    return MetricCurve(name, steps, times, values, branch)


def _curves_of(entries: Iterable[Entry], branch: int = 0) -> dict[str, MetricCurve]:
    """Return the metrics of checkpoints, also those that were added later."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.step, entry.order)):
        moment = recorded_time(entry.manifest.created)
        time = float("nan") if moment is None else moment.timestamp()
        for name, value in entry.metrics.items():
            rows.setdefault(name, []).append((entry.step, time, value))
    found = {name: np.array(own, np.float64) for name, own in rows.items()}
    return {
        name: MetricCurve(name, own[:, 0], own[:, 1], own[:, 2], branch)
        for name, own in found.items()
    }


def _join(recorded: MetricCurve, saved: MetricCurve) -> MetricCurve:
    """Join what was recorded at steps with the values of checkpoints, which may be newer."""
    rest = ~np.isin(recorded.steps, saved.steps)
    steps, times, values = (
        np.concatenate([one[rest], other])
        for one, other in (
            (recorded.steps, saved.steps),
            (recorded.times, saved.times),
            (recorded.values, saved.values),
        )
    )
    order = np.argsort(steps)
    return MetricCurve(recorded.name, steps[order], times[order], values[order])


def panel_of(name: str) -> str:
    """Return the panel of a metric: its name without the part of the data, as `loss` of `val/loss`.

    >>> [panel_of(name) for name in ("val/loss", "eval_loss", "train_loss_epoch", "lr")]
    ['loss', 'loss', 'loss_epoch', 'lr']
    """
    kept = [part for part in re.split(r"(?<=[/_.-])", name) if part.rstrip("/_.-") not in _SPLITS]
    return "".join(kept).strip("/_.-") or name


def rank_metric(name: str) -> tuple[int, str]:
    """Order metrics as people look for them: losses, results, learning rates, times, counters."""
    if "loss" in name.lower() and "scale" not in name.lower():
        return 0, name
    if _RATE.fullmatch(name):
        return 2, name
    if is_timing(name):
        return 3, name
    return (4 if _COUNTER.fullmatch(name) else 1), name


def metric_names(runs: Sequence[Mapping[str, MetricCurve]]) -> list[str]:
    """List the metrics of runs, the usual ones first, and of these what most runs have."""
    counts = Counter(name for curves in runs for name in curves)
    return sorted(counts, key=lambda name: (rank_metric(name)[0], -counts[name], name))


def make_grid(places: Sequence[Floats], most: int, *, is_whole: bool) -> Floats:
    """Return the places at which curves are drawn: all, or the ends of `most` equal stretches."""
    every: Floats = np.unique(np.concatenate([np.empty(0), *places]))
    every = every[: np.searchsorted(every, np.inf)]  # without NaN
    if len(every) <= most:
        return every
    grid: Floats = np.linspace(every[0], every[-1], most)
    whole: Floats = np.unique(np.ceil(grid))
    return whole if is_whole else grid


def draw_on(grid: Floats, places: Floats, values: Floats) -> dict[str, Any]:
    """Return the mean of the values in each stretch of a grid, and the lowest and the highest.

    `per` is the number of values in a stretch that has any. With one, there are only means.
    """
    inside = np.isfinite(values) & (places >= grid[0]) & (places <= grid[-1])
    cells, values = np.searchsorted(grid, places[inside]), values[inside]
    counts = np.bincount(cells, minlength=len(grid))
    with np.errstate(all="ignore"):
        means = np.bincount(cells, values, len(grid)) / counts
    per = len(cells) / max(int(np.count_nonzero(counts)), 1)
    found: dict[str, Any] = {"mean": _short(means), "per": per}
    if counts.max(initial=0) > 1:
        for name, extreme, worst in (("low", np.minimum, np.inf), ("high", np.maximum, -np.inf)):
            bound = np.full(len(grid), worst)
            extreme.at(bound, cells, values)
            found[name] = _short(bound)
    return found


def _short(values: Floats) -> list[float | None]:
    """Return six digits of each value; None for what is not finite."""
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values.tolist()]


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
