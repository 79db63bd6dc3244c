"""Pages of a run, such as its overview and list, and the verdict on it for a first look."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from holdfast.cli.documents import Owner
from holdfast.cli.log import ENDINGS, Log
from holdfast.cli.ls import Listed, Ls
from holdfast.cli.output import Answer, TextTable
from holdfast.cli.prune import Forecast, forecast_deletions
from holdfast.cli.resume_plan import plan_of
from holdfast.cli.uploads import show_uploads
from holdfast.cli.watch import WatchedRun
from holdfast.cli.web.curves import (
    Row,
    RunCurves,
    make_columns,
    make_spark,
    metric_names,
    sort_rows,
)
from holdfast.cli.web.figures import costly, picture, read_log, read_run, rows_of
from holdfast.cli.web.jobs import READING, told
from holdfast.cli.web.site import (
    PATIENCE_S,
    WHOLE_S,
    LastAnswer,
    PageRun,
    Site,
    coming,
    given,
    page_number,
    select_page,
)

_MAX_FINDINGS = 3
"""Findings of one kind that are shown."""
Level = Literal["bad", "warn", "good", "plain"]
_NEWEST = 8
"""Checkpoints on the first page of a run."""


async def roots(site: Site, request: Request) -> Response:
    """Show all runs as a table that sorts, and curves of several in one picture."""
    with READING.hold_turns():
        cards = await gather(*map(_card, site.runs.values()))
    by_name = {card["row"].name: card for card in cards}
    rows = [card["row"] for card in cards]
    columns, metrics = make_columns(rows), metric_names([row.curves for row in rows])
    order = request.query_params.get("sort", "")
    retries_ms = [card["retry_ms"] for card in cards if card["retry_ms"] is not None]
    values = {
        "cards": [by_name[row.name] for row in sort_rows(rows, columns, order)],
        "sparks": {row.name: make_spark(row, metrics[0]) for row in rows if metrics},
        "columns": columns,
        "metrics": metrics,
        "sort": order,
        "retry_ms": min(retries_ms, default=None),
        "seen": sum(run.version for run in site.runs.values()),
    }
    return site.page(request, "roots.html", values)


async def _card(run: PageRun) -> dict[str, Any]:
    looked, listed, curves = await gather(
        run.watch_run(), run.list_checkpoints(), read_run(run, patience_s=0)
    )
    found = findings(listed.document, looked.answer)
    known: RunCurves | None = curves.document
    return {
        "run": run,
        "row": Row(
            name=run.name,
            watched=looked.answer,
            curves={} if known is None else known.standing_curves(),
            config={} if known is None else known.config,
        ),
        "error": told(looked.error or listed.error),
        "wrong": [finding for finding in found if finding.level == "bad"],
        **coming(looked, listed, curves),
    }


async def live(site: Site, run: PageRun, request: Request) -> Response:
    """Show what `watch` sees now; one look for all who ask at a time."""
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


async def overview(site: Site, run: PageRun, request: Request) -> Response:
    """Show a run for ten seconds: its health, its head, its newest checkpoints."""
    common, seen, coming = await gather(
        of_run(run, "overview"), run.list_checkpoints(), _forecast(run)
    )
    listed: Ls | None = seen.document
    found = findings(listed, common["watched"])
    head = None if listed is None else await head_of(run, listed)
    values = {
        **given(seen, coming),
        "findings": found,
        "is_wrong": is_wrong(found),
        "head": head,
        "rows": _pair_rows(seen.answer)[:_NEWEST] if seen.answer is not None else [],
        "forecast": coming.document,
        "forecast_error": told(coming.error),
    }
    return site.page(request, "overview.html", {**common, **values})


async def newest(site: Site, run: PageRun, request: Request) -> Response:
    """Show the newest checkpoints, and whatever is odd in the root."""
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


def _pair_rows(answer: Answer) -> list[tuple[Listed, tuple[str, ...]]]:
    """Pair each checkpoint of `ls` with the row of texts that the command prints."""
    document = answer.document
    assert isinstance(document, Ls)
    tables = [part for part in answer.parts if isinstance(part, TextTable)]
    rows = tables[0].rows if tables else ()
    return [*zip(document.checkpoints, rows, strict=True)]


async def checkpoints(site: Site, run: PageRun, request: Request) -> Response:
    """List the checkpoints, those whose row has all the given words."""
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


async def lineage(site: Site, run: PageRun, request: Request) -> Response:
    """Show the sessions of the run, what was left behind, and what became of each save."""
    common, seen = await gather(of_run(run, "lineage"), read_log(run))
    log: Log | None = seen.document
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


async def _forecast(run: PageRun, keep: str = "") -> LastAnswer:
    return await run.get_answer(
        f"forecast {keep}", lambda: forecast_deletions(run.root, keep=keep or None)
    )


async def retention(site: Site, run: PageRun, request: Request) -> Response:
    """Show what retention deletes at the coming saves, and why."""
    keep = request.query_params.get("keep", "")[:500]
    common, seen = await gather(of_run(run, "retention"), _forecast(run, keep))
    document: Forecast | None = seen.document
    rows = [] if document is None else document.kept
    values = {**given(seen), **select_page(rows, page_number(request)), "keep": keep}
    return site.page(request, "retention.html", {**common, **values})


async def resume(site: Site, run: PageRun, request: Request) -> Response:
    """Show what a resume would take, and what it would pass over and why."""
    common, seen = await gather(
        of_run(run, "resume"),
        _plan(run),
    )
    rows = [] if seen.answer is None else seen.answer.document.candidates
    values = {**given(seen), **select_page(rows, page_number(request))}
    return site.page(request, "resume.html", {**common, **values})


async def costs(site: Site, run: PageRun, request: Request) -> Response:
    """Show what saves took: stall, write, and how far uploads are."""
    common, seen, uploads = await gather(
        of_run(run, "costs"),
        read_log(run),
        run.get_answer("uploads", lambda: show_uploads(run.root)),
    )
    watched = common["watched"]
    values = {
        **given(seen, uploads),
        **select_page(costly(seen)[::-1], page_number(request)),
        "uploads": uploads.document,
        "uploads_error": told(uploads.error) if watched and watched.uploads else None,
    }
    return site.page(request, "costs.html", {**common, **values})


async def numbers_table(site: Site, run: PageRun, request: Request) -> Response:
    """Show the numbers behind the curves."""
    common, seen = await gather(of_run(run, "overview"), read_run(run))
    found: RunCurves | None = seen.document
    curves = {} if found is None else found.standing_curves()
    rows = [
        (step, [values.get(name) for name in curves])
        for step, (_, values) in reversed(rows_of(curves).items())
    ]
    values = {**given(seen), **select_page(rows, page_number(request)), "names": [*curves]}
    return site.page(request, "numbers.html", {**common, **values})


# Verdict on a run


class HealthLine(NamedTuple):
    """Line of the verdict on a run: good, bad or worth a look."""

    level: Level
    text: str


_OWNER: dict[str, tuple[Level, str]] = {
    "alive": ("good", "training now: process {pid} on {host}"),
    "closed": ("plain", "not running; the last process ended cleanly"),
    "dead": ("warn", "not running; process {pid} on {host} is gone without closing the run"),
    "silent": ("warn", "no sign of life from process {pid} on {host} for 30 s"),
    "unknown": ("plain", "cannot tell from here whether process {pid} on {host} lives"),
}


def findings(listed: Ls | None, watched: WatchedRun | None) -> list[HealthLine]:
    """Judge a run by the answers of `ls` and `watch`; the worst first."""
    order = ("bad", "warn", "good", "plain")
    found = [*_of_watch(watched), *_of_list(listed)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def is_wrong(found: list[HealthLine]) -> bool:
    """Whether something needs a person."""
    return any(finding.level in ("bad", "warn") for finding in found)


def _of_watch(watched: WatchedRun | None) -> Iterator[HealthLine]:
    if watched is None:
        return
    if watched.owner is not None:
        yield _of_owner(watched.owner)
    stuck = [one for one in watched.uploads if one.state in ("failed", "refused")]
    if stuck:
        yield HealthLine("warn", f"{_format_count(len(stuck), 'upload')} failed: {stuck[0].folder}")


def _of_owner(owner: Owner) -> HealthLine:
    level, text = _OWNER.get(owner.state, _OWNER["unknown"])
    return HealthLine(level, text.format(pid=owner.pid, host=owner.host))


def _of_list(listed: Ls | None) -> Iterator[HealthLine]:
    if listed is None:
        return
    if listed.head is None:
        yield HealthLine("bad", "nothing to resume from")
    yield from _first(f"{one.folder} is damaged: {one.reason}" for one in listed.damaged)
    yield from _first(
        f"{one.folder}: {_format_count(len(one.missing), 'file')} missing or cut"
        for one in listed.checkpoints
        if one.missing
    )
    if listed.unopened:
        yield HealthLine(
            "warn",
            f"{_format_count(len(listed.unopened), 'checkpoint')} not opened by the given keys",
        )
    yield from _of_newest(listed.checkpoints)


def _first(texts: Iterable[str]) -> Iterator[HealthLine]:
    """Yield the first findings of a kind, and how many more there are."""
    found = [*texts]
    yield from (HealthLine("bad", text) for text in found[:_MAX_FINDINGS])
    if len(found) > _MAX_FINDINGS:
        yield HealthLine("bad", f"and {len(found) - _MAX_FINDINGS} more like this")


def _of_newest(checkpoints: Sequence[Listed]) -> Iterator[HealthLine]:
    rejected = [one for one in checkpoints if one.rejected]
    if rejected:
        yield HealthLine("warn", f"a resume could not use {rejected[0].folder}")
    if checkpoints and checkpoints[0].unhealthy:
        yield HealthLine("warn", f"the newest state is unhealthy: {checkpoints[0].unhealthy[0]}")


def _format_count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
