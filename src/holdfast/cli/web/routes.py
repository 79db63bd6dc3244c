"""The routes of the page, and the application that serves them."""

from __future__ import annotations

from asyncio import ensure_future
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdfast.cli.web import checkpoints, figures, pages
from holdfast.cli.web.guard import Access, Guard
from holdfast.cli.web.jobs import Jobs
from holdfast.cli.web.site import PageRun, Rendering, Site, Static, make_runs
from holdfast.errors import HoldfastError


def make_app(roots: Sequence[str], access: Access) -> ASGIApp:
    """Make the application of some roots, with the guard in front of it."""
    static = Static()
    site = Site(runs=make_runs(roots), jobs=Jobs(), rendering=Rendering(access, static))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        warming = ensure_future(_read_first(site))
        yield
        warming.cancel()
        site.jobs.stop_all()
        for run in site.runs.values():
            run.stop_new_reads()

    async def file(request: Request) -> Response:
        found = static.response(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "There is no such file.")
        return found

    app = Starlette(
        routes=[Route("/static/{name}", file), *_routes()],
        lifespan=lifespan,
        exception_handlers={HTTPException: _refused, HoldfastError: _refused},
    )
    app.router.redirect_slashes = False  # that would name a host and a scheme
    app.state.site = site
    return Guard(app, access=access)


async def _read_first(site: Site) -> None:
    """Begin to read what the first page shows."""
    for run in site.runs.values():
        await run.list_checkpoints(patience_s=0)
        await figures.read_run(run, patience_s=0)


def _routes() -> list[Route]:
    run, one = "/r/{run}", "/r/{run}/c/{folder}"
    return [
        _of_site("/", pages.roots),
        _of_site("/curves.json", figures.site_curves),
        _of_site("/metrics.csv", figures.site_csv),
        _of_site("/jobs", checkpoints.jobs),
        _of_site("/jobs/{number}", checkpoints.job),
        _of_site("/jobs/{number}/stop", checkpoints.stop_job, method="POST"),
        _of_run(run, pages.overview),
        _of_run(f"{run}/live", pages.live),
        _of_run(f"{run}/newest", pages.newest),
        _of_run(f"{run}/curves.json", figures.run_curves),
        _of_run(f"{run}/metrics.csv", figures.run_csv),
        _of_run(f"{run}/numbers", pages.numbers_table),
        _of_run(f"{run}/checkpoints", pages.checkpoints),
        _of_run(f"{run}/lineage", pages.lineage),
        _of_run(f"{run}/costs", pages.costs),
        _of_run(f"{run}/costs.json", figures.costs_data),
        _of_run(f"{run}/retention", pages.retention),
        _of_run(f"{run}/resume", pages.resume),
        _of_run(f"{run}/compare", checkpoints.comparison),
        _of_run(f"{run}/compare", checkpoints.begin_diff, method="POST"),
        _of_run(f"{run}/verify", checkpoints.begin_verify_all, method="POST"),
        _of_run(one, checkpoints.checkpoint),
        _of_run(f"{one}/tensors", checkpoints.tensors),
        _of_run(f"{one}/stats", checkpoints.begin_stats, method="POST"),
        _of_run(f"{one}/verify", checkpoints.begin_verify, method="POST"),
    ]


def _of_site(path: str, page: Callable[[Site, Request], Any], method: str = "GET") -> Route:
    """Make the route of a page."""

    async def handle(request: Request) -> Response:
        response: Response = await page(request.app.state.site, request)
        return response

    return Route(path, handle, methods=[method])


def _of_run(path: str, page: Callable[[Site, PageRun, Request], Any], method: str = "GET") -> Route:
    """Make the route of a page of one run."""
    return _of_site(path, lambda site, request: page(site, site.find_run(request), request), method)


async def _refused(request: Request, error: Exception) -> Response:
    """Show why a request is not answered, or the error of a command."""
    status, why = 409, str(error)
    if isinstance(error, HTTPException):
        status, why = error.status_code, error.detail
    site: Site = request.app.state.site
    return site.page(request, "refused.html", {"status": status, "why": why}, status=status)
