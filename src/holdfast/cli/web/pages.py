"""Pages of a run: overview, time line, list, lineage, costs."""

from __future__ import annotations

import json
import math
from asyncio import gather
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast.cli.log import ENDINGS, Log, LoggedSave, log_root
from holdfast.cli.ls import Listed, Ls
from holdfast.cli.output import Answer, TextTable, printable
from holdfast.cli.plot import Plot
from holdfast.cli.plot import plot as plot_root
from holdfast.cli.prune import Forecast, forecast_deletions
from holdfast.cli.resume_plan import plan_of
from holdfast.cli.uploads import show_uploads
from holdfast.cli.web.health import findings, is_wrong
from holdfast.cli.web.jobs import told
from holdfast.cli.web.lineage import picture
from holdfast.cli.web.runs import PATIENCE_S, LastAnswer, PageRun
from holdfast.cli.web.site import WHOLE_S, Site, coming, given, page_number, select_page

MAX_POINTS = 4000
"""Points of a curve that are sent to be drawn; a screen has fewer columns."""
_NEWEST = 8
"""Checkpoints on the first page of a run."""


def site_of(request: Request) -> Site:
    """Return the site of a request."""
    found: Site = request.app.state.site
    return found


async def roots(request: Request) -> Response:
    """Show all runs, each with its verdict."""
    site = site_of(request)
    cards = await gather(*(_card(run) for run in site.runs.values()))
    retries_ms = [card["retry_ms"] for card in cards if card["retry_ms"] is not None]
    values = {"cards": cards, "retry_ms": min(retries_ms, default=None)}
    return site.page(request, "roots.html", values)


async def _card(run: PageRun) -> dict[str, Any]:
    looked, listed = await gather(run.watch_run(), run.list_checkpoints())
    document = listed.answer.document if listed.answer is not None else None
    found = findings(document, looked.answer)
    return {
        "run": run,
        "watched": looked.answer,
        "listed": document,
        "error": told(looked.error or listed.error),
        "findings": found,
        "is_wrong": is_wrong(found),
        **coming(looked, listed),
    }


async def live(request: Request) -> Response:
    """Show what `watch` sees now; one look for all who ask at a time."""
    site = site_of(request)
    run = site.find_run(request)
    seen = await run.watch_run()
    return site.rendering.page("parts/live.html", _build_live_values(run, seen))


def _build_live_values(run: PageRun, seen: LastAnswer) -> dict[str, Any]:
    return {
        "run": run,
        "version": run.version,
        "watched": seen.answer,
        "look_error": told(seen.error),
    }


async def of_run(run: PageRun, tab: str) -> dict[str, Any]:
    """Return what each page of a run needs: its name, its tab, and what `watch` sees."""
    return {**_build_live_values(run, await run.watch_run()), "tab": tab}


async def overview(request: Request) -> Response:
    """Show a run for ten seconds: its health, its head, its newest checkpoints."""
    site = site_of(request)
    run = site.find_run(request)
    common, seen, coming = await gather(
        of_run(run, "overview"), run.list_checkpoints(), _forecast(run)
    )
    listed: Ls | None = seen.answer.document if seen.answer is not None else None
    found = findings(listed, common["watched"])
    head = None if listed is None else await head_of(run, listed)
    values = {
        **given(seen, coming),
        "findings": found,
        "is_wrong": is_wrong(found),
        "head": head,
        "rows": _pair_rows(seen.answer)[:_NEWEST] if seen.answer is not None else [],
        "metrics": [] if listed is None else metric_names(listed),
        "forecast": None if coming.answer is None else coming.answer.document,
        "forecast_error": told(coming.error),
    }
    return site.page(request, "overview.html", {**common, **values})


async def newest(request: Request) -> Response:
    """Show the newest checkpoints, and whatever is odd in the root."""
    site = site_of(request)
    run = site.find_run(request)
    seen = await run.list_checkpoints()
    rows = _pair_rows(seen.answer)[:_NEWEST] if seen.answer is not None else []
    return site.rendering.page("parts/newest.html", {**given(seen), "rows": rows, "run": run})


async def head_of(run: PageRun, listed: Ls) -> Listed | None:
    """Find the checkpoint that a resume takes: not the newest one, if that lost something."""
    by_folder = {one.folder: one for one in listed.checkpoints}
    head = by_folder.get(listed.head or "")
    if head is None or not (head.missing or head.thinned or head.retired):
        return head
    plan = await _plan(run, patience_s=WHOLE_S)
    folder = listed.head if plan.answer is None else plan.answer.document.head
    return by_folder.get(folder or "")


async def _plan(run: PageRun, *, patience_s: float = PATIENCE_S) -> LastAnswer:
    return await run.get_answer(
        "resume-plan", lambda: plan_of(run.root, verify=False), patience_s=patience_s
    )


def metric_names(listed: Ls) -> list[str]:
    """List the metrics that checkpoints have, in alphabetical order."""
    return sorted({name for one in listed.checkpoints for name in one.metrics})


def _pair_rows(answer: Answer) -> list[tuple[Listed, tuple[str, ...]]]:
    """Pair each checkpoint of `ls` with the row of texts that the command prints."""
    document = answer.document
    assert isinstance(document, Ls)
    tables = [part for part in answer.parts if isinstance(part, TextTable)]
    rows = tables[0].rows if tables else ()
    return [*zip(document.checkpoints, rows, strict=True)]


async def checkpoints(request: Request) -> Response:
    """List the checkpoints, those whose row has all the given words."""
    site = site_of(request)
    run = site.find_run(request)
    common, seen = await gather(of_run(run, "checkpoints"), run.list_checkpoints())
    words = request.query_params.get("q", "")[:200].lower().split()
    rows = _pair_rows(seen.answer) if seen.answer is not None else []
    found = [row for row in rows if all(word in _words_of(row) for word in words)]
    values = {
        **given(seen),
        **select_page(found, page_number(request)),
        "num_all": len(rows),
        "q": " ".join(words),
    }
    return site.page(request, "checkpoints.html", {**common, **values})


def _words_of(row: tuple[Listed, tuple[str, ...]]) -> str:
    listed, texts = row
    return "\n".join((*texts, listed.reason, listed.save_class, *listed.components)).lower()


async def lineage(request: Request) -> Response:
    """Show the sessions of the run, what was left behind, and what became of each save."""
    site = site_of(request)
    run = site.find_run(request)
    common, seen = await gather(of_run(run, "lineage"), run.get_answer("log", _log(run)))
    log: Log | None = seen.answer.document if seen.answer is not None else None
    sessions = [] if log is None else log.sessions
    saves = [(session, save) for session in reversed(sessions) for save in reversed(session.saves)]
    state = request.query_params.get("state", "")
    states = sorted({save.state for _, save in saves})
    chosen = [pair for pair in saves if state not in states or pair[1].state == state]
    values = {
        **given(seen),
        **select_page(chosen, page_number(request)),
        "picture": picture(sessions),
        "endings": ENDINGS,
        "states": states,
        "state": state if state in states else "",
    }
    return site.page(request, "lineage.html", {**common, **values})


def _log(run: PageRun) -> Any:
    return lambda: log_root(run.root, saves=True)


async def _forecast(run: PageRun, keep: str = "") -> LastAnswer:
    return await run.get_answer(
        f"forecast {keep}", lambda: forecast_deletions(run.root, keep=keep or None)
    )


async def retention(request: Request) -> Response:
    """Show what retention deletes at the coming saves, and why."""
    site = site_of(request)
    run = site.find_run(request)
    keep = request.query_params.get("keep", "")[:500]
    common, seen = await gather(of_run(run, "retention"), _forecast(run, keep))
    document: Forecast | None = seen.answer.document if seen.answer is not None else None
    rows = [] if document is None else document.kept
    values = {**given(seen), **select_page(rows, page_number(request)), "keep": keep}
    return site.page(request, "retention.html", {**common, **values})


async def resume(request: Request) -> Response:
    """Show what a resume would take, and what it would pass over and why."""
    site = site_of(request)
    run = site.find_run(request)
    common, seen = await gather(
        of_run(run, "resume"),
        _plan(run),
    )
    rows = [] if seen.answer is None else seen.answer.document.candidates
    values = {**given(seen), **select_page(rows, page_number(request))}
    return site.page(request, "resume.html", {**common, **values})


async def costs(request: Request) -> Response:
    """Show what saves took: stall, write, and how far uploads are."""
    site = site_of(request)
    run = site.find_run(request)
    common, seen, uploads = await gather(
        of_run(run, "costs"),
        run.get_answer("log", _log(run)),
        run.get_answer("uploads", lambda: show_uploads(run.root)),
    )
    watched = common["watched"]
    values = {
        **given(seen, uploads),
        **select_page(_costly(seen)[::-1], page_number(request)),
        "uploads": None if uploads.answer is None else uploads.answer.document,
        "uploads_error": told(uploads.error) if watched and watched.uploads else None,
    }
    return site.page(request, "costs.html", {**common, **values})


def _costly(seen: LastAnswer) -> list[LoggedSave]:
    """Return the saves of `log` of which the costs are known, oldest first."""
    log: Log | None = seen.answer.document if seen.answer is not None else None
    sessions = [] if log is None else log.sessions
    return [save for session in sessions for save in session.saves if save.cost is not None]


_COSTS = (("stall", "stall_s"), ("write", "write_s"), ("upload", "upload_s"))


async def costs_data(request: Request) -> Response:
    """Return what saves took by step, for the picture."""
    run = site_of(request).find_run(request)
    seen = await run.get_answer("log", _log(run))
    saves = _costly(seen)
    series = [
        {"name": name, "points": [[save.step, getattr(save.cost, field)] for save in saves]}
        for name, field in _COSTS
        if any(getattr(save.cost, field) is not None for save in saves)
    ]
    return data({"series": series, "error": told(seen.error), **coming(seen)})


async def plot_data(request: Request) -> Response:
    """Return the answer of `plot` for the picture, with the checkpoints at their steps."""
    site = site_of(request)
    run = site.find_run(request)
    listed = await run.list_checkpoints()
    document: Ls | None = listed.answer.document if listed.answer is not None else None
    metric = request.query_params.get("metric", "")
    if metric and (document is None or metric not in metric_names(document)):
        raise HTTPException(404, "No checkpoint has such a metric.")
    seen = await run.get_answer(
        f"plot {metric}",
        lambda: plot_root(run.root, output=None, metrics=[metric] if metric else (), log=None),
    )
    plot: Plot | None = seen.answer.document if seen.answer is not None else None
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


async def plot_table(request: Request) -> Response:
    """Show the numbers behind the time line."""
    site = site_of(request)
    run = site.find_run(request)
    common = await of_run(run, "overview")
    seen = await run.get_answer(
        "plot ", lambda: plot_root(run.root, output=None, metrics=(), log=None)
    )
    plot: Plot | None = seen.answer.document if seen.answer is not None else None
    names = [] if plot is None else [series.name for series in plot.series]
    by_step: dict[float, dict[str, float]] = {}
    for series in [] if plot is None else plot.series:
        for step, value in series.points:
            by_step.setdefault(step, {})[series.name] = value
    saved = set() if plot is None else {*plot.saves}
    rows = [
        (int(step), step in saved, [by_step[step].get(name) for name in names])
        for step in sorted(by_step, reverse=True)
    ]
    values = {**given(seen), **select_page(rows, page_number(request)), "names": names}
    return site.page(request, "numbers.html", {**common, **values})


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
