"""Data of the pictures on the page: curves, the costs of saves, and the lineage."""

from __future__ import annotations

import csv
import io
import math
from asyncio import gather, to_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.cli.log import Log, LoggedSave, LoggedSession, log_root
from holdfast.cli.output import format_time, printable
from holdfast.cli.web.curves import (
    Axis,
    MetricCurve,
    RunCurves,
    draw_on,
    make_grid,
    metric_names,
    panel_of,
    rank_metric,
)
from holdfast.cli.web.jobs import READING, told
from holdfast.cli.web.site import PATIENCE_S, WHOLE_S, LastAnswer, PageRun, Site, coming
from holdfast.policy.rules import recorded_time

MAX_CELLS = 600
"""Places of a curve that are drawn; a picture has about two columns of the screen for each."""
MAX_PANELS = 12
"""Panels of a run that are drawn at once; a filter finds the others."""
MAX_DELETED = 300
"""Places of deleted checkpoints that are marked."""


async def read_log(run: PageRun) -> LastAnswer:
    """Return the answer of `log` with all saves."""
    return await run.get_answer("log", lambda: log_root(run.root, saves=True))


async def read_run(run: PageRun, *, patience_s: float = PATIENCE_S) -> LastAnswer:
    """Return the curves of a run."""
    return await run.get_answer("curves", run.curves.read_curves, patience_s=patience_s)


def costly(seen: LastAnswer) -> list[LoggedSave]:
    """Return the saves of `log` of which the costs are known, oldest first."""
    log: Log | None = seen.document
    sessions = [] if log is None else log.sessions
    return [save for session in sessions for save in session.saves if save.cost is not None]


_COSTS = (("stall", "stall_s"), ("write", "write_s"), ("upload", "upload_s"))


async def costs_data(site: Site, run: PageRun, request: Request) -> Response:
    """Return what saves took by step, for the picture."""
    seen = await read_log(run)
    saves = sorted(costly(seen), key=lambda save: save.step or 0)
    curves = [
        {"name": name, "branch": 0, "per": 1, "mean": [getattr(save.cost, at) for save in saves]}
        for name, at in _COSTS
        if any(getattr(save.cost, at) is not None for save in saves)
    ]
    panels = [{"title": "seconds by phase", "curves": curves}] if curves else []
    found = {"axis": "step", "x": [save.step for save in saves], "panels": panels}
    return data({**found, "marks": [], "starts": [], "error": told(seen.error), **coming(seen)})


async def run_curves(site: Site, run: PageRun, request: Request) -> Response:
    """Return the curves of one run, a panel for each kind of metric, with saves and starts."""
    seen, logged = await gather(read_run(run), read_log(run))
    found: RunCurves | None = seen.document
    curves = [] if found is None else sorted(found.curves, key=_rank_curve)
    start = 0.0 if found is None else found.start
    words = request.query_params.get("q", "")[:200].lower().split()
    panels: dict[str, list[tuple[str, MetricCurve, float]]] = {}
    for curve in curves:
        if all(word in curve.name.lower() for word in words):
            panels.setdefault(panel_of(curve.name), []).append((curve.name, curve, start))
    members = {
        **_draw_panels(request, dict([*panels.items()][:MAX_PANELS])),
        "num_panels": len(panels),
        **_find_marks(site, run, logged.document, start),
        **coming(seen, logged),
        "error": told(seen.error),
    }
    return data(members)


def _rank_curve(curve: MetricCurve) -> tuple[Any, ...]:
    return *rank_metric(panel_of(curve.name)), *rank_metric(curve.name), curve.branch


async def site_curves(site: Site, request: Request) -> Response:
    """Return the curves of one metric, one for each run that was asked for."""
    chosen = [run.name for run in choose_runs(site, request)]
    with READING.hold_turns():
        seen = await gather(*(read_run(run, patience_s=0) for run in site.runs.values()))
    known = {name: one.document for name, one in zip(site.runs, seen, strict=True) if one.document}
    standing = {name: found.standing_curves() for name, found in known.items()}
    metrics = metric_names([*standing.values()])
    asked = request.query_params.get("metric", "")
    metric = asked if asked in metrics else next(iter(metrics), "")
    curves = [
        (name, standing[name][metric], known[name].start)
        for name in chosen
        if metric in standing.get(name, ())
    ]
    found = {
        **_draw_panels(request, {metric: curves} if curves else {}),
        "metrics": metrics,
        "metric": metric,
        "marks": [],
        "starts": [],
        **coming(*seen),
        "error": next((told(one.error) for one in seen if one.error is not None), None),
    }
    return data(found)


def choose_runs(site: Site, request: Request) -> list[PageRun]:
    """Return the runs that a URL names by `runs=`, with commas between; without it, all."""
    given = request.query_params.get("runs")
    names = [*site.runs] if given is None else given.split(",") if given else []
    if not {*names} <= {*site.runs}:
        raise HTTPException(404, "There is no such run.")
    return [site.runs[name] for name in dict.fromkeys(names)]


def _draw_panels(
    request: Request, panels: Mapping[str, Sequence[tuple[str, MetricCurve, float]]]
) -> dict[str, Any]:
    """Draw curves, each with its label and the start of its run, on one grid of places."""
    query = request.query_params
    axis: Axis = next((one for one in get_args(Axis) if one == query.get("x")), "step")
    low, high = _number(query.get("from"), -math.inf), _number(query.get("to"), math.inf)
    placed = {
        title: [(label, curve, curve.find_places(axis, start)) for label, curve, start in curves]
        for title, curves in panels.items()
    }
    places = [at[(at >= low) & (at <= high)] for each in placed.values() for *_, at in each]
    grid = make_grid(places, MAX_CELLS, is_whole=axis == "step")
    drawn = [
        {
            "title": title,
            "curves": [
                {"name": label, "branch": curve.branch, **draw_on(grid, at, curve.values)}
                for label, curve, at in each
            ],
        }
        for title, each in placed.items()
        if len(grid)
    ]
    return {"axis": axis, "x": grid.tolist(), "panels": drawn}


def _number(text: str | None, default: float) -> float:
    try:
        return float(text or "")
    except ValueError:
        return default


def _find_marks(site: Site, run: PageRun, log: Log | None, start: float) -> dict[str, Any]:
    """Return the saves with a known step, of many deleted ones some, and where sessions began."""
    sessions = [] if log is None else log.sessions
    saves = [save for session in sessions for save in session.saves if save.step is not None]
    gone = [save for save in saves if save.state == "deleted"]
    some = {id(save) for save in gone[:: math.ceil(len(gone) / MAX_DELETED) or 1]}
    marks = [
        {
            **_places_of(save.step, save.created, start),
            "href": site.rendering.url("r", run.name, "c", save.folder)
            if save.state in ("kept", "left behind")
            else None,
            "text": printable(_describe_save(save)),
            "state": save.state.replace(" ", "-"),
        }
        for save in saves
        if save.state in ("kept", "left behind") or id(save) in some
    ]
    starts = [
        {**_places_of(now.from_step, now.began, start), "failed": before.ending == "failed"}
        for before, now in pairwise(sessions)
        if now.from_step is not None
    ]
    return {"marks": marks, "starts": starts}


def _places_of(step: int | None, created: str | None, start: float) -> dict[str, float | None]:
    moment = recorded_time(created or "")
    time = None if moment is None else moment.timestamp()
    return {"step": step, "time": time, "since": None if time is None else time - start}


def _describe_save(save: LoggedSave) -> str:
    """Say when and why a checkpoint was saved, and what has become of it."""
    deleted = "" if save.deleted is None else f" {format_time(save.deleted)}"
    parts = (
        f"step {save.step}",
        save.reason,
        save.created and format_time(save.created),
        None if save.state == "kept" else f"{save.state}{deleted}",
    )
    text = ", ".join(filter(None, parts))
    return f"{text}: {save.why}" if save.why else text


def data(members: Mapping[str, Any]) -> Response:
    """Return JSON for the scripts of a page; floats that JSON cannot hold become null."""
    return Response(msgspec.json.encode(members), media_type="application/json")


async def run_csv(site: Site, run: PageRun, request: Request) -> Response:
    """Return all metrics of a run as a file."""
    return await _make_csv([run], None)


async def site_csv(site: Site, request: Request) -> Response:
    """Return one metric of some runs as a file."""
    return await _make_csv(choose_runs(site, request), request.query_params.get("metric", ""))


async def _make_csv(runs: Sequence[PageRun], metric: str | None) -> Response:
    seen = await gather(*(read_run(run, patience_s=WHOLE_S) for run in runs))
    found = {
        run.name: one.document.standing_curves()
        for run, one in zip(runs, seen, strict=True)
        if one.document is not None
    }
    if not found:
        raise HTTPException(503, str(next((one.error for one in seen if one.error), "No answer.")))
    names = [*dict.fromkeys(name for curves in found.values() for name in curves)]
    names = names if metric is None else [name for name in names if name == metric]
    if metric is not None and not names:
        raise HTTPException(404, "No run has such a metric.")
    headers = {"Content-Disposition": 'attachment; filename="metrics.csv"'}
    text = await to_thread(make_csv, found, names)
    return Response(text, media_type="text/csv", headers=headers)


def make_csv(runs: Mapping[str, Mapping[str, MetricCurve]], names: Sequence[str]) -> str:
    """Format metrics of runs as CSV, with a row for each step that has a value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["run", "step", "time", *map(_to_cell, names)])
    for run, curves in runs.items():
        for step, (moment, values) in rows_of({n: curves[n] for n in names if n in curves}).items():
            when = "" if math.isnan(moment) else _format_moment(moment)
            writer.writerow([_to_cell(run), step, when, *(values.get(name, "") for name in names)])
    return text.getvalue()


def _to_cell(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name


def _format_moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def rows_of(curves: Mapping[str, MetricCurve]) -> dict[int, tuple[float, dict[str, float]]]:
    """Return time and values at each step, in the order of steps."""
    found: dict[int, tuple[float, dict[str, float]]] = {}
    for name, curve in curves.items():
        columns = (curve.steps.astype(np.int64), curve.times, curve.values)
        for step, time, value in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(step, (time, {}))[1][name] = value
    return dict(sorted(found.items()))


# Lineage

LANE, LEFT, RIGHT = 26, 4.0, 97.0
"""Height of a line in pixels, and where steps begin and end, in percent of the width."""
MOST_SESSIONS = 40
"""Newest sessions that are drawn; the table has all."""
NUM_TICKS = 5


class Tick(NamedTuple):
    """A save on a line."""

    x: float
    state: str
    title: str


class Lane(NamedTuple):
    """The line of one session; places along it are in percent of the width."""

    y: float
    session: LoggedSession
    start: float
    end: float
    left: float
    """From where on a rollback left it behind; `end` if nothing was."""
    ticks: list[Tick]
    origin: tuple[float, float] | None
    """Place of the checkpoint from which it resumed."""


class Picture(NamedTuple):
    """All lines, the labels of the axis of steps, and the height of the picture."""

    height: int
    lanes: list[Lane]
    first: int
    last: int
    steps: list[tuple[float, int]]
    left_out: int


def picture(sessions: Sequence[LoggedSession]) -> Picture:
    """Lay out the newest sessions, oldest on top, with steps from left to right."""
    shown = sessions[-MOST_SESSIONS:]
    steps = [step for session in shown for step in _steps(session)] or [0]
    first, last = min(steps), max(steps)

    def place(step: int) -> float:
        return round(LEFT + (step - first) / max(last - first, 1) * (RIGHT - LEFT), 2)

    known = {
        save.folder: (number, save.step)
        for number, session in enumerate(shown)
        for save in session.saves
        if save.step is not None
    }
    points = [known.get(session.resumed_from or "") for session in shown]
    lanes = []
    for number, (session, point) in enumerate(zip(shown, points, strict=True)):
        own = [*_steps(session)] or [first]
        backs = [
            at[1]
            for later, at in zip(shown, points, strict=True)
            if at is not None and at[0] == number and later.rollback
        ]
        lane = Lane(
            y=_y(number),
            session=session,
            start=place(min(own)),
            end=place(max(own)),
            left=place(min([*backs, max(own)])),
            ticks=_ticks(session.saves, place),
            origin=None if point is None else (place(point[1]), _y(point[0])),
        )
        lanes.append(lane)
    labels = [(place(step), step) for step in _round_steps(first, last)]
    height = int(_y(len(shown))) + 22
    return Picture(height, lanes, first, last, labels, len(sessions) - len(shown))


def _steps(session: LoggedSession) -> Iterator[int]:
    known = (session.from_step, session.to_step, *(save.step for save in session.saves))
    yield from (step for step in known if step is not None)


def _round_steps(first: int, last: int) -> range:
    """Return round steps for the axis, at most `NUM_TICKS` and one."""
    rough = max((last - first) / NUM_TICKS, 1)
    power = 10 ** math.floor(math.log10(rough))
    size = next(math.ceil(power * n) for n in (1, 2, 5, 10) if power * n >= rough)
    return range(-(-first // size) * size, last + 1, size)


def _ticks(saves: Sequence[LoggedSave], place: Callable[[int], float]) -> list[Tick]:
    """Place saves; of those at one place in one state, which could not be told apart, one."""
    found: dict[tuple[int, str], Tick] = {}
    for save in saves:
        if save.step is not None:
            x, state = place(save.step), save.state.replace(" ", "-")
            found[round(3 * x), state] = Tick(x, state, _describe_save(save))
    return [*found.values()]


def _y(number: int) -> float:
    return number * LANE + 34.0
