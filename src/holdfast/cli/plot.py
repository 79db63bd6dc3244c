"""`holdfast plot`: draw loss, rates, throughput and sizes of a run, with its saves and starts."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import options
from holdfast.cli.documents import Document, Ending, is_timing
from holdfast.cli.options import PATH, command, option, several
from holdfast.cli.output import Answer, TextTable, number, one_line
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.recorded_costs import RecordedStart, read_recorded_costs
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.history import RunHistory, read_history

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf")
_TABLE = ".csv"
_MAX_PACES = 500
"""Most points of the throughput between steps of the history."""
_STEP = re.compile(r"step-(\d{1,18})\b", re.ASCII)
_LOSSES = ("loss", "val/loss")
_ANY = re.ASCII | re.DOTALL | re.IGNORECASE
_LOSS = re.compile(r"(.*[^a-z])?loss(_step|_epoch)?", _ANY)
"""Names of losses under any trainer, as `eval_loss`, and `train_loss_epoch` of Lightning."""
_PART = re.compile(r"(?!.*scale)(.*[^a-z])?loss(es)?([^a-z].*)?", _ANY)
"""Names of parts of a loss, as `loss/train` and `loss_bbox`."""
_VALIDATION = re.compile(r"(.*[^a-z])?(val|valid|validation|eval|test)([^a-z].*)?", _ANY)
_RATE = re.compile(r"(.*[^a-z])?(lr|learning_rate)([^a-z].*)?", _ANY)
"""Names of learning rates, as `lr-AdamW` of Lightning."""
_COUNTER = re.compile(
    r"(.*/)?((num|global|total|input|train|trained)_)*"
    r"(epochs?|steps?|iterations?|iters?|batch(es)?|samples?|examples?|tokens?|flos)(_(seen|idx))?",
    _ANY,
)
"""Names of counters, as `epoch`, and `num_input_tokens_seen` of transformers."""
_MAX_LOSSES = 4
_MAX_NAMES, _MAX_NAME = 20, 60
"""Most names in a line, and most characters of each."""
_LEARNING_RATE = "lr/"
_LIMIT = 1e300
"""Largest absolute value that is drawn: matplotlib overflows near the largest float."""


class MetricSeries(Document, frozen=True):
    """Curve of a metric."""

    panel: str
    """Title of its panel."""
    name: str
    """The metric."""
    points: Sequence[Sequence[float]]
    """Pairs of step and value."""


class LeftBehind(Document, frozen=True):
    """Values of steps that a rollback, or the resume after a crash, has left behind."""

    session: int
    """Number of the claim that recorded them."""
    name: str
    """The metric."""
    points: Sequence[Sequence[float]]
    """Pairs of step and value."""


class PlotStart(Document, frozen=True):
    """Start of a session, but the first."""

    step: int | None
    """Step from which it went on; null where not known."""
    created: str
    """UTC time of the claim."""
    host: str
    """Host of its process."""
    before: Ending
    """How the session before ended."""


class Plot(Document, frozen=True):
    """Answer of `plot`."""

    root: str
    """Path or URL of the root."""
    output: str | None
    """File that was written."""
    series: Sequence[MetricSeries]
    """Curves."""
    branches: Sequence[LeftBehind]
    """Of the metrics among the curves, what is no longer part of the run."""
    saves: Sequence[int]
    """Steps of the saves."""
    starts: Sequence[PlotStart]
    """Starts of all sessions but the first."""
    metrics: Sequence[str]
    """Names of all recorded metrics, learning rates among them; `--metric` draws any."""
    notes: Sequence[str]
    """What to know about it."""


@dataclass(slots=True)
class _Record:
    """Metrics, saves and times of a run, read from its history, log and manifests."""

    metrics: dict[str, dict[float, float]] = field(default_factory=dict)
    """Values by metric and step, learning rates among them as `lr/<group>`."""
    pace: list[tuple[datetime, Timestamp] | None] = field(default_factory=list)
    """When steps were logged; None where training went on from a checkpoint."""
    saved: set[int] = field(default_factory=set)
    sizes: dict[float, float] = field(default_factory=dict)
    """Bytes of the checkpoint by step, as logged or as its manifest says."""
    num_broken: int = 0
    """Lines that are none of a log."""


@command(
    "plot",
    options.root,
    click.Option(
        ["-o", "--output"],
        metavar="FILE",
        help="Draw a .png, .svg or .pdf file, or write all metrics to a .csv file. Without it, "
        "list the curves.",
        type=PATH,
    ),
    several("--metric", "metrics", "NAME", "Draw this metric instead of the usual ones."),
    option("--log", "PATH", "Log of the Trainer. [default: ROOT/log/train.jsonl]", type=PATH),
    answer=Plot,
)
def plot(root: str, *, output: Path | None, metrics: Sequence[str], log: Path | None) -> Answer:
    """Draw loss, learning rate and throughput over steps.

    Values come from the run's history, which has all steps, also of deleted checkpoints. Ticks mark
    saves, dashed lines resumes: green after a clean end, red after a crash. Steps that a rollback
    or a crash has left behind are gray. Drawing needs pip install 'holdfast-torch[plot]'.
    """
    if output is not None and output.suffix != _TABLE:
        expect_drawable(output, "--output")
    store = open_root(root)
    catalog = Catalog(store)
    entries, unread = catalog.survey()
    notes = [f"{folder}: not read: {reason}" for folder, reason in unread]
    history = read_history(store)
    lineage = None if history.is_empty else {*map(str, catalog.lineage())}
    present = [entry for entry in entries if lineage is None or entry.folder in lineage]
    record = _recorded(root, log, present, history, notes)
    watched = next((entry.manifest.best for entry in entries if entry.manifest.best), ())
    first = [one.metric for one in watched]
    series = _choose_series(record, metrics) if metrics else _usual(record, first, notes)
    if empty := [one.name for one in series if not _is_drawable(one)]:
        notes.append(f"{_join_names(empty)}: no finite value at any step")
    series = [one for one in series if metrics or _is_drawable(one)]
    if not series:
        if record.metrics:
            counted = _join_names(sorted(record.metrics))
            raise NoCheckpoint(
                f"{store.url}: no metric was logged that is drawn by default, only {counted}; "
                "draw them by --metric NAME"
            )
        raise NoCheckpoint(f"{store.url}: nothing was logged or saved")
    clipped = [one.name for one in series if any(map(_is_beyond, one.points))]
    if output is not None and clipped:
        notes.append(f"{_join_names(clipped)}: values beyond ±{_LIMIT:g} are drawn as ±{_LIMIT:g}")
    starts = _starts(read_recorded_costs(store).starts, entries)
    resumed = {start.step for start in starts if start.step is not None}
    saved = sorted(record.saved | resumed | {entry.step for entry in entries})
    document = Plot(
        root=store.url,
        output=None if output is None else str(output),
        series=series,
        branches=[*_left_behind(history, series)],
        saves=saved,
        starts=starts,
        metrics=sorted(record.metrics),
        notes=notes,
    )
    if output is None:
        others = [*_others(record, series), "-o FILE draws them"]
        return Answer(document=document, parts=[_make_series_table(series), *others, *notes])
    if output.suffix == _TABLE:
        names = metrics or sorted(record.metrics)
        num_rows = _write_table(record, names, history, output)
        return Answer(document=document, parts=[f"{output}: {num_rows} steps", *notes])
    _draw(document, output)
    num_panels = len({one.panel for one in series})
    return Answer(document=document, parts=[f"{output}: {num_panels} panels", *notes])


def _make_series_table(series: Sequence[MetricSeries]) -> TextTable:
    columns = ("panel", "curve", "from step", "to step", "first", "last")
    rows = []
    for one in series:
        first, last = one.points[0], one.points[-1]
        steps = f"{first[0]:.10g}", f"{last[0]:.10g}"
        rows.append((one.panel, one.name, *steps, number(first[1]), number(last[1])))
    return TextTable(columns=columns, rows=rows, right=frozenset({2, 3, 4, 5}))


def _draw(document: Plot, path: Path) -> None:
    """Draw the panels one above the other, each with all saves and starts."""
    from matplotlib.figure import Figure

    panels: dict[str, list[MetricSeries]] = {}
    for one in document.series:
        panels.setdefault(one.panel, []).append(one)
    starts = [start for start in document.starts if start.step is not None]
    killed = [start.step for start in starts if start.before == "failed"]
    resumed = [start.step for start in starts if start.before != "failed"]
    figure = Figure(figsize=(10, 3 * len(panels)), layout="constrained")
    figure.suptitle(document.root, parse_math=False)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, curves in zip(axes, panels.values(), strict=True):
        shown = {}
        for one in curves:
            points = [
                (at[0], math.copysign(_LIMIT, at[1]) if _is_beyond(at) else at[1])
                for at in one.points
            ]
            (line,) = axis.plot(*zip(*points, strict=True), marker=".", markersize=3)
            shown[one_line(one.name, _MAX_NAME)] = line
        names = {one.name for one in curves}
        for left in (one for one in document.branches if one.name in names):
            drawn = [(at[0], at[1]) for at in left.points if not _is_beyond(at)]
            for line in axis.plot(*zip(*drawn, strict=True), color="#aaaaaa", zorder=1):
                shown["left behind"] = line
        across, foot = {"linestyle": "--"}, {"ymax": 0.04, "color": "#555555"}
        for name, steps, style in (
            ("saves", document.saves, foot),
            ("resumes", resumed, {"color": "#2ca02c", **across}),
            ("kills", killed, {"color": "#d62728", **across}),
        ):
            if steps:
                style = {"ymin": 0, "ymax": 1, "transform": axis.get_xaxis_transform(), **style}
                shown[name] = axis.vlines(steps, linewidth=1, **style)
        for text in axis.legend(shown.values(), shown.keys()).get_texts():
            text.set_parse_math(False)
        axis.ticklabel_format(useOffset=False)
    axes[-1].set_xlabel("step")
    save_figure(figure, path, "--output")


def _recorded(
    root: str, log: Path | None, entries: Sequence[Entry], history: RunHistory, notes: list[str]
) -> _Record:
    """Read the log of a Trainer, if there is one, and add the history and the manifests; add what
    is amiss to the notes."""
    logged = _read_log(log if log is not None else _log_of(root), is_given=log is not None)
    record = logged or _Record()
    for name, curve in history.curves.items():
        of_log = record.metrics.get(name, {})
        record.metrics[name] = {**of_log, **dict(zip(curve.steps, curve.values, strict=True))}
    record.saved |= {save.step for save in history.saves if save.step is not None}
    if logged is None:
        record.pace = _paces(history)
        _add_manifests(record, entries)
        if history.is_empty:
            notes.append("no history: only the steps of checkpoints are known")
    if history.every > 1:
        notes.append(f"the oldest part of the history has one step of {history.every}")
    notes += [f"{key}: not read: {why}" for key, why in history.unread]
    # Oldest first: of two at one step the newer counts, as the run went back before the other.
    kept = sorted(entries, key=lambda entry: entry.order)
    record.sizes |= {entry.step: float(entry.manifest.plain_nbytes) for entry in kept}
    if record.num_broken:
        notes.append(f"{record.num_broken} lines of the log are damaged and left out")
    return record


def _log_of(root: str) -> Path | None:
    return None if "://" in root else Path(root, "log", "train.jsonl")


def _read_log(path: Path | None, *, is_given: bool) -> _Record | None:
    """Read a log of a Trainer; None if there is none, unless it was named."""
    if path is None:
        return None
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        if is_given:
            raise UsageError(f"--log={str(path)!r}: there is no such file") from None
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    record = _Record()
    for line in lines:
        try:
            _add_line(record, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            record.num_broken += 1
    return record


def _add_line(record: _Record, line: Mapping[str, Any]) -> None:
    step, values, rates = line["step"], line["metrics"], line.get("lr", {})
    numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
    found = {name: float(value) for name, value in numbers.items()}
    found |= {_LEARNING_RATE + name: float(rate) for name, rate in rates.items()}
    when = datetime.fromisoformat(line["time"])
    if "save/nbytes" in found:
        record.saved.add(step)
        record.sizes[step] = found["save/nbytes"]
    if "load/nbytes" in found:
        record.pace.append(None)
    if "loss" in found:
        now = Timestamp(step=step, samples=line.get("samples"), tokens=line.get("tokens"))
        record.pace.append((when, now))
    for name, value in found.items():
        record.metrics.setdefault(name, {})[step] = value


def _add_manifests(record: _Record, entries: Sequence[Entry]) -> None:
    for entry in sorted(entries, key=lambda entry: (entry.step, entry.order)):
        for name, value in entry.metrics.items():
            record.metrics.setdefault(name, {})[entry.step] = value


def _paces(history: RunHistory) -> list[tuple[datetime, Timestamp] | None]:
    """Return when some of the steps were recorded; None between sessions."""
    longest = max(history.curves.values(), key=lambda curve: len(curve.steps), default=None)
    if longest is None:
        return []
    starts = {start.step for start in history.starts if start.is_in_lineage}
    size = math.ceil(len(longest.steps) / _MAX_PACES)
    found: list[tuple[datetime, Timestamp] | None] = []
    for index, (step, time) in enumerate(zip(longest.steps, longest.times, strict=True)):
        if index and not starts.isdisjoint(range(longest.steps[index - 1], step)):
            found.append(None)
        if index % size == 0:
            found.append((datetime.fromtimestamp(time, timezone.utc), Timestamp(step=step)))
    return found


def _left_behind(history: RunHistory, series: Sequence[MetricSeries]) -> Iterator[LeftBehind]:
    for branch in history.branches:
        for name in dict.fromkeys(one.name for one in series if one.name in branch.curves):
            curve = branch.curves[name]
            points = [[*point] for point in zip(curve.steps, curve.values, strict=True)]
            yield LeftBehind(session=branch.epoch, name=name, points=points)


def _write_table(record: _Record, names: Sequence[str], history: RunHistory, path: Path) -> int:
    """Write the values of metrics by step, with the time of each step; return the number of rows.

    Raises:
        UsageError: the file cannot be written.
    """
    times: dict[float, float] = {
        step: time
        for name in names
        if name in history.curves
        for step, time in zip(history.curves[name].steps, history.curves[name].times, strict=True)
    }
    steps = sorted({step for name in names for step in record.metrics[name]})
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "time", *names])
            for step in steps:
                when = datetime.fromtimestamp(times[step], timezone.utc) if step in times else None
                values = [record.metrics[name].get(step, "") for name in names]
                rows.writerow([step, "" if when is None else when.isoformat(), *values])
    except OSError as error:
        raise UsageError(f"--output={str(path)!r}: {error.strerror or error}") from error
    return len(steps)


def _usual(record: _Record, watched: Sequence[str], notes: list[str]) -> list[MetricSeries]:
    """List the curves that are drawn if no metric is named; a note says what replaces a loss.

    `watched`: metrics of the run's rules `Best`.
    """
    known = record.metrics
    rates = [name for name in known if name.startswith(_LEARNING_RATE)]
    losses = [name for name in _LOSSES if name in known]
    for pattern in (_LOSS, _PART):
        losses += [name for name in known if name not in losses and pattern.fullmatch(name)]
    series = [_curve("loss", name, record) for name in losses[:_MAX_LOSSES]]
    if not any(map(_is_drawable, series)):
        others = [name for name in _telling(known, watched) if name not in rates]
        curves = (_curve(name, name, record) for name in others)
        drawn = next(filter(_is_drawable, curves), None)
        if drawn is not None:
            series.insert(0, drawn)
            notes.append(
                f"no loss to draw: {one_line(drawn.name, _MAX_NAME)} is drawn instead; "
                "--metric NAME draws another"
            )
    series += [_curve("learning rate", name, record) for name in rates]
    if (pace := _throughput(record)) is not None:
        series.append(pace)
    if record.sizes:
        points = [[step, nbytes / 1e6] for step, nbytes in sorted(record.sizes.items())]
        series.append(MetricSeries(panel="size", name="checkpoint, MB", points=points))
    return series


def _telling(known: Collection[str], watched: Sequence[str]) -> list[str]:
    """List the metrics that may be drawn in place of a loss, best first.

    First those of rules `Best`, whatever they are; no other counters.
    """

    def rank(name: str) -> tuple[int, str]:
        if _RATE.fullmatch(name):
            return 3, name
        return 2 if is_timing(name) else int(not _VALIDATION.fullmatch(name)), name

    first = [name for name in watched if name in known]
    rest = [name for name in known if name not in first and not _COUNTER.fullmatch(name)]
    return first + sorted(rest, key=rank)


def _others(record: _Record, series: Sequence[MetricSeries]) -> list[str]:
    """Name the recorded metrics that are not drawn, as one line; no line if there are none."""
    drawn = {one.name for one in series}
    others = [name for name in sorted(record.metrics) if name not in drawn]
    return [f"--metric NAME draws another metric: {_join_names(others)}"] if others else []


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(one_line(name, _MAX_NAME) for name in names[:_MAX_NAMES]) + more


def _choose_series(record: _Record, names: Sequence[str]) -> list[MetricSeries]:
    unknown = [name for name in names if name not in record.metrics]
    if unknown:
        there = _join_names(sorted(record.metrics)) or "none"
        raise UsageError(f"--metric={unknown[0]!r}: there is no such metric; recorded: {there}")
    return [_curve(name, name, record) for name in dict.fromkeys(names)]


def _curve(panel: str, name: str, record: _Record) -> MetricSeries:
    points = [[step, value] for step, value in sorted(record.metrics[name].items())]
    return MetricSeries(panel=panel, name=name, points=points)


def _is_beyond(point: Sequence[float]) -> bool:
    """Whether a value is finite, and too large to be drawn."""
    return _LIMIT < abs(point[1]) < math.inf


def _is_drawable(series: MetricSeries) -> bool:
    """Whether any value is finite."""
    return any(math.isfinite(value) for _, value in series.points)


def _throughput(record: _Record) -> MetricSeries | None:
    """Compute tokens, samples or steps per second between logged steps of one process."""
    known = [mark for mark in record.pace if mark is not None]
    names = [
        name
        for name in ("tokens", "samples", "step")
        if known and all(getattr(now, name) is not None for _, now in known)
    ]
    if not names:
        return None
    name = names[0]
    points = []
    for before, after in pairwise(record.pace):
        if before is None or after is None:
            continue
        passed_s = (after[0] - before[0]).total_seconds()
        done = getattr(after[1], name) - getattr(before[1], name)
        if passed_s > 0 and done > 0:
            points.append([float(after[1].step), done / passed_s])
    unit = "steps" if name == "step" else name
    return MetricSeries(panel="throughput", name=f"{unit}/s", points=points)


def _starts(starts: Sequence[RecordedStart], entries: Sequence[Entry]) -> list[PlotStart]:
    """List from which step each start but the first went on, and how the one before ended."""
    steps = {entry.order: entry.step for entry in entries}
    found = []
    for before, start in pairwise(starts):
        point = start.resumed_from
        if point is None:
            continue
        named = _STEP.match(point.folder)
        step = steps.get(point.order, None if named is None else int(named[1]))
        found.append(
            PlotStart(step=step, created=start.created, host=start.host, before=before.ending)
        )
    return found


def expect_drawable(path: Path, option: str) -> None:
    """Raise `UsageError` unless the file can be drawn, before anything is read."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{option}={str(path)!r}: must end in {', '.join(_ENDINGS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{option}={str(path)!r}: needs matplotlib: pip install 'holdfast-torch[plot]'"
        ) from None


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write an image in the format that the name's ending says."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{option}={str(path)!r}: {error.strerror or error}") from error
