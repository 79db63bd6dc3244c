"""The routes of the page, and the application that serves them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdfast.cli.web import checkpoints, pages
from holdfast.cli.web.guard import Access, Guard
from holdfast.cli.web.jobs import Jobs
from holdfast.cli.web.rendering import Rendering, Static
from holdfast.cli.web.runs import make_runs
from holdfast.cli.web.site import Site
from holdfast.errors import HoldfastError


def make_app(roots: Sequence[str], access: Access) -> ASGIApp:
    """Make the application of some roots, with the guard in front of it."""
    static = Static()
    site = Site(runs=make_runs(roots), jobs=Jobs(), rendering=Rendering(access, static))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for run in site.runs.values():
            await run.list_checkpoints(patience_s=0)  # so that the first page finds it
        yield
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
        exception_handlers={HTTPException: _refused, HoldfastError: _failed},
    )
    app.router.redirect_slashes = False  # that would name a host and a scheme
    app.state.site = site
    return Guard(app, access=access)


def _routes() -> list[Route]:
    run, one = "/r/{run}", "/r/{run}/c/{folder}"
    return [
        Route("/", pages.roots),
        Route("/jobs", checkpoints.jobs),
        Route("/jobs/{number}", checkpoints.job),
        Route("/jobs/{number}/stop", checkpoints.stop_job, methods=["POST"]),
        Route(run, pages.overview),
        Route(f"{run}/live", pages.live),
        Route(f"{run}/newest", pages.newest),
        Route(f"{run}/plot.json", pages.plot_data),
        Route(f"{run}/numbers", pages.plot_table),
        Route(f"{run}/checkpoints", pages.checkpoints),
        Route(f"{run}/lineage", pages.lineage),
        Route(f"{run}/costs", pages.costs),
        Route(f"{run}/costs.json", pages.costs_data),
        Route(f"{run}/retention", pages.retention),
        Route(f"{run}/resume", pages.resume),
        Route(f"{run}/compare", checkpoints.comparison),
        Route(f"{run}/compare", checkpoints.begin_diff, methods=["POST"]),
        Route(f"{run}/verify", checkpoints.begin_verify_all, methods=["POST"]),
        Route(one, checkpoints.checkpoint),
        Route(f"{one}/tensors", checkpoints.tensors),
        Route(f"{one}/stats", checkpoints.begin_stats, methods=["POST"]),
        Route(f"{one}/verify", checkpoints.begin_verify, methods=["POST"]),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    """Show why a request is not answered."""
    assert isinstance(error, HTTPException)
    values = {"status": error.status_code, "why": error.detail}
    return pages.site_of(request).page(request, "refused.html", values, status=error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    """Show an error of a command."""
    values = {"status": 409, "why": str(error)}
    return pages.site_of(request).page(request, "refused.html", values, status=409)
