"""Data of the pictures on the page: the time line, the costs of saves, and the lineage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.cli.log import Log, LoggedSave, LoggedSession, log_root
from holdfast.cli.ls import Listed, Ls
from holdfast.cli.output import printable
from holdfast.cli.plot import Plot
from holdfast.cli.plot import plot as plot_root
from holdfast.cli.web.jobs import told
from holdfast.cli.web.runs import LastAnswer, PageRun
from holdfast.cli.web.site import Site, coming

MAX_POINTS = 4000
"""Points of a curve that are sent to be drawn; a screen has fewer columns."""
WIDTH, LANE, LEFT, RIGHT = 960, 26, 44, 16
MOST_SESSIONS = 40
"""Newest sessions that are drawn; the table has all."""


async def read_log(run: PageRun) -> LastAnswer:
    """Return the answer of `log` with all saves."""
    return await run.get_answer("log", lambda: log_root(run.root, saves=True))


def metric_names(listed: Ls) -> list[str]:
    """List the metrics that checkpoints have, in alphabetical order."""
    return sorted({name for one in listed.checkpoints for name in one.metrics})


def costly(seen: LastAnswer) -> list[LoggedSave]:
    """Return the saves of `log` of which the costs are known, oldest first."""
    log: Log | None = seen.document
    sessions = [] if log is None else log.sessions
    return [save for session in sessions for save in session.saves if save.cost is not None]


_COSTS = (("stall", "stall_s"), ("write", "write_s"), ("upload", "upload_s"))


async def costs_data(site: Site, run: PageRun, request: Request) -> Response:
    """Return what saves took by step, for the picture."""
    seen = await read_log(run)
    saves = costly(seen)
    series = [
        {"name": name, "points": [[save.step, getattr(save.cost, field)] for save in saves]}
        for name, field in _COSTS
        if any(getattr(save.cost, field) is not None for save in saves)
    ]
    return data({"series": series, "error": told(seen.error), **coming(seen)})


async def plot_data(site: Site, run: PageRun, request: Request) -> Response:
    """Return the answer of `plot` for the picture, with the checkpoints at their steps."""
    listed = await run.list_checkpoints()
    document: Ls | None = listed.document
    metric = request.query_params.get("metric", "")
    if metric and (document is None or metric not in metric_names(document)):
        raise HTTPException(404, "No checkpoint has such a metric.")
    seen = await run.get_answer(
        f"plot {metric}",
        lambda: plot_root(run.root, output=None, metrics=[metric] if metric else (), log=None),
    )
    plot: Plot | None = seen.document
    marks = (
        [] if document is None else [_encode_mark(site, run, one) for one in document.checkpoints]
    )
    found = {
        "plot": None if plot is None else _drawable(plot),
        "checkpoints": marks,
        **coming(seen, listed),
        "error": told(seen.error),
    }
    return data(found)


def _drawable(plot: Plot) -> dict[str, Any]:
    """Return the members of an answer of `plot`, of long curves only the extremes of stretches."""
    members: dict[str, Any] = msgspec.to_builtins(plot)
    for series in members["series"]:
        series["points"] = thinned(series["points"], MAX_POINTS)
    return members


def thinned(points: Sequence[list[float]], most: int) -> list[list[float]]:
    """Return the points, or of many the lowest and the highest of each stretch, in order."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found: list[list[float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        found += [lowest] if lowest is highest else sorted([lowest, highest])
    return found


def _encode_mark(site: Site, run: PageRun, listed: Listed) -> dict[str, Any]:
    return {
        "step": listed.step,
        "href": site.rendering.url("r", run.name, "c", listed.folder),
        "text": printable(f"step {listed.step}, {listed.reason}, {listed.created[:16]}"),
        "left": not listed.in_lineage,
    }


def data(members: Mapping[str, Any]) -> Response:
    """Return JSON for the scripts of a page; floats that JSON cannot hold become null."""
    text = json.dumps(_finite(members), allow_nan=False)
    return Response(text, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# Lineage


class Tick(NamedTuple):
    """A save on a line."""

    x: float
    state: str
    title: str


class Lane(NamedTuple):
    """The line of one session."""

    y: float
    session: LoggedSession
    start: float
    end: float
    ticks: list[Tick]
    origin: tuple[float, float] | None
    """Where it went on from: the place of that checkpoint."""


class Picture(NamedTuple):
    """All lines, and the size of the picture."""

    width: int
    height: int
    lanes: list[Lane]
    first: int
    last: int
    left_out: int


def picture(sessions: Sequence[LoggedSession]) -> Picture:
    """Lay out the newest sessions, oldest on top, with steps from left to right."""
    shown = sessions[-MOST_SESSIONS:]
    steps = [step for session in shown for step in _steps(session)] or [0]
    first, last = min(steps), max(steps)
    places = {
        save.folder: (_x(save.step, first, last), _y(number))
        for number, session in enumerate(shown)
        for save in session.saves
        if save.step is not None
    }
    lanes = [
        Lane(
            y=_y(number),
            session=session,
            start=_x(min([*_steps(session)], default=first), first, last),
            end=_x(max([*_steps(session)], default=first), first, last),
            ticks=_ticks(session.saves, first, last),
            origin=places.get(session.resumed_from or ""),
        )
        for number, session in enumerate(shown)
    ]
    height = int(_y(len(shown))) + 8
    return Picture(WIDTH, height, lanes, first, last, len(sessions) - len(shown))


def _steps(session: LoggedSession) -> Iterator[int]:
    known = (session.from_step, session.to_step, *(save.step for save in session.saves))
    yield from (step for step in known if step is not None)


def _ticks(saves: Sequence[LoggedSave], first: int, last: int) -> list[Tick]:
    """Place saves; of those at one place in one state, which could not be told apart, one."""
    found: dict[tuple[int, str], Tick] = {}
    for save in saves:
        if save.step is None:
            continue
        x = _x(save.step, first, last)
        why = f", {save.reason}" if save.reason else ""
        title = f"step {save.step}{why}: {save.state}"
        found[round(x / 3), save.state] = Tick(x, save.state.replace(" ", "-"), title)
    return [*found.values()]


def _x(step: int, first: int, last: int) -> float:
    share = (step - first) / max(last - first, 1)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(number: int) -> float:
    return number * LANE + 20.0
