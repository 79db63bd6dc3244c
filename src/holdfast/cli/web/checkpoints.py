"""Pages of one checkpoint, and comparisons: manifest, tensors, statistics, verification."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from holdfast.cli.diff import diff as compare
from holdfast.cli.ls import Listed
from holdfast.cli.output import Answer
from holdfast.cli.show import Show, Shown, StoredTensor, show
from holdfast.cli.stats import stats as compute
from holdfast.cli.verify import verify_target
from holdfast.cli.web.jobs import Job, told
from holdfast.cli.web.pages import head_of, of_run
from holdfast.cli.web.site import (
    WHOLE_S,
    LastAnswer,
    PageRun,
    Site,
    coming,
    find_checkpoint,
    given,
    page_number,
    select_page,
)

POLL_MS, SLOW_POLL_MS = 500, 2000
"""How soon the page of a job asks again for its progress, at first and after `SOON_S` seconds."""
SOON_S = 10.0


async def checkpoint(site: Site, run: PageRun, request: Request) -> Response:
    """Show the manifest of a checkpoint."""
    listed = await site.checkpoint(request, run)
    common = await of_run(run, "checkpoints")
    seen = await _show(run, listed.folder)
    listing = await site.wait_for_list(run)
    values = {
        **given(seen),
        "listed": listed,
        "is_head": await head_of(run, listing) == listed,
        "before": _before(listed, listing.checkpoints),
        "folders": {one.folder for one in listing.checkpoints},
    }
    return site.page(request, "checkpoint.html", {**common, **values})


async def _show(run: PageRun, folder: str) -> LastAnswer:
    return await run.get_answer(
        f"show {folder}", lambda: show(_name_checkpoint(run, folder), tensors=False)
    )


def _before(listed: Listed, checkpoints: Sequence[Listed]) -> str | None:
    """Find the checkpoint before one: of the same process, or what that went on from."""
    own = [one for one in checkpoints if one.epoch == listed.epoch]
    older = [one for one in own if one.sequence < listed.sequence]
    if older:
        return max(older, key=lambda one: one.sequence).folder
    return next((one.folder for one in checkpoints if one.folder == listed.parent), None)


def _name_checkpoint(run: PageRun, folder: str) -> str:
    """Name a checkpoint that was listed, as on the command line."""
    return f"{run.root}@{folder}"


async def tensors(site: Site, run: PageRun, request: Request) -> Response:
    """List the tensors of a checkpoint, those whose name has all the given words."""
    listed = await site.checkpoint(request, run)
    common = await of_run(run, "checkpoints")
    seen = await _tensors_of(run, listed.folder)
    words = request.query_params.get("q", "")[:200].lower().split()
    found = [] if seen.answer is None else _get_tensors(seen.answer.document)
    rows = [one for one in found if all(word in _words_of(one) for word in words)]
    values = {
        **given(seen),
        **select_page(rows, page_number(request)),
        "listed": listed,
        "num_all": len(found),
        "q": " ".join(words),
    }
    return site.page(request, "tensors.html", {**common, **values})


async def _tensors_of(run: PageRun, folder: str, **patience: float) -> Any:
    return await run.get_answer(
        f"tensors {folder}",
        lambda: show(_name_checkpoint(run, folder), tensors=True),
        is_large=True,
        **patience,
    )


def _get_tensors(document: Show) -> list[StoredTensor]:
    return document.tensors if isinstance(document.tensors, list) else []


def _words_of(tensor: StoredTensor) -> str:
    return f"{tensor.component}:{tensor.key} {tensor.dtype}".lower()


async def begin_verify(site: Site, run: PageRun, request: Request) -> Response:
    """Begin to verify a checkpoint."""
    listed = await site.checkpoint(request, run)
    return site.start_work(
        run,
        lambda: verify_target(_name_checkpoint(run, listed.folder)),
        kind="verify",
        title=listed.folder,
    )


async def begin_verify_all(site: Site, run: PageRun, request: Request) -> Response:
    """Begin to verify a whole root."""
    return site.start_work(
        run, lambda: verify_target(run.root), kind="verify", title="all checkpoints"
    )


async def begin_stats(site: Site, run: PageRun, request: Request) -> Response:
    """Begin to compute the statistics of a tensor, or of a component."""
    listed = await site.checkpoint(request, run)
    form = request.state.form
    seen = await _tensors_of(run, listed.folder, patience_s=WHOLE_S)
    if seen.answer is None:
        raise HTTPException(503, str(seen.error or "The checkpoint is still being read."))
    target, found = _name_checkpoint(run, listed.folder), _get_tensors(seen.answer.document)
    if "tensor" in form:
        known = {f"{one.component}:{one.key}": one.component for one in found}
        name = next((name for name in known if name == form["tensor"]), None)
        if name is None:
            raise HTTPException(404, "There is no such tensor.")
        names, components = [name], [known[name]]
        title = f"{name} of {listed.folder}"
    else:
        names, components = [], [one for one in listed.components if one == form.get("component")]
        if not components:
            raise HTTPException(404, "There is no such component.")
        title = f"{components[0]} of {listed.folder}"
    return site.start_work(
        run,
        lambda: compute(target, components=components, tensors=names),
        kind="stats",
        title=title,
    )


async def comparison(site: Site, run: PageRun, request: Request) -> Response:
    """Show in what the manifests of two checkpoints differ, the newest two if none are named."""
    common, listed = await of_run(run, "compare"), await site.wait_for_list(run)
    folders = [one.folder for one in listed.checkpoints]
    a, b = (request.query_params.get(name, "") for name in ("a", "b"))
    a = a if a in folders else (folders[1] if len(folders) > 1 else "")
    b = b if b in folders else (folders[0] if folders else "")
    seen = [await _show(run, folder) for folder in (a, b) if folder]
    shown = [one.document.checkpoint for one in seen if one.document is not None]
    values = {
        **(given(*seen) if seen else {"answer": None, "error": None, **coming()}),
        "checkpoints": listed.checkpoints,
        "a": a,
        "b": b,
        "parts": _find_differences(*shown) if len(shown) == 2 else None,
    }
    return site.page(request, "compare.html", {**common, **values})


def _find_differences(a: Shown, b: Shown) -> list[tuple[str, str, Any, Any]]:
    """Return what differs in two manifests: the part, the name, and both values."""
    parts: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("counter", a.timestamp, b.timestamp),
        ("metric", a.metrics, b.metrics),
        ("config", a.config, b.config),
        ("environment", a.environment, b.environment),
        ("numerics", a.numerics, b.numerics),
        ("bytes of", _sizes_of(a), _sizes_of(b)),
    ]
    return [
        (part, name, one.get(name), other.get(name))
        for part, one, other in parts
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _sizes_of(shown: Shown) -> dict[str, int]:
    return {name: part["nbytes"] for name, part in shown.components.items()}


async def begin_diff(site: Site, run: PageRun, request: Request) -> Response:
    """Begin to compare two checkpoints."""
    listed = await site.wait_for_list(run)
    form = request.state.form
    a, b = (find_checkpoint(listed, form.get(name, "")).folder for name in ("a", "b"))
    return site.start_work(
        run,
        lambda: compare(_name_checkpoint(run, a), _name_checkpoint(run, b)),
        kind="diff",
        title=f"{a} and {b}",
    )


async def jobs(site: Site, request: Request) -> Response:
    """List the work that was begun."""
    return site.page(request, "jobs.html", {"jobs": [*site.jobs][::-1], "tab": "jobs"})


async def job(site: Site, request: Request) -> Response:
    """Show a piece of work: its progress, and then its answer."""
    found = _job(site, request)
    is_over = found.is_over  # once: it may end while this is written
    answer = found.answer if is_over else None
    values = {
        "job": found,
        "is_over": is_over,
        "document": None if answer is None else answer.document,
        "failure": told(found.error),
        "poll_ms": POLL_MS if time.time() - found.started_s < SOON_S else SLOW_POLL_MS,
        **select_page(_rows_of(answer), page_number(request)),
    }
    return site.page(request, "job.html", {**values, "tab": "jobs"})


def _rows_of(answer: Answer | None) -> list[Any]:
    """Return the tensors of an answer of `stats` or `diff`."""
    if answer is None:
        return []
    return [*getattr(answer.document, "tensors", ())]


async def stop_job(site: Site, request: Request) -> Response:
    """Stop a piece of work."""
    found = _job(site, request)
    site.jobs.request_job_stop(found)
    return RedirectResponse(site.rendering.url("jobs", str(found.number)), status_code=303)


def _job(site: Site, request: Request) -> Job:
    found = site.jobs.get(request.path_params["number"])
    if found is None:
        raise HTTPException(404, "There is no such job, or its result is gone.")
    return found
