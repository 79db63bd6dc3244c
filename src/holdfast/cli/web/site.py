"""State of the server that all pages use: the runs and the background work; renders pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from holdfast.cli.ls import Listed, Ls
from holdfast.cli.output import Answer
from holdfast.cli.web.jobs import Job, Jobs, told
from holdfast.cli.web.rendering import Rendering
from holdfast.cli.web.runs import LastAnswer, PageRun

WHOLE_S = 30.0
"""How long a page waits for what it cannot do without, such as the list that names are looked up
in."""
PAGE_ROWS = 100
"""Rows of a table that are shown at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Runs, background work and templates."""

    runs: Mapping[str, PageRun]
    jobs: Jobs
    rendering: Rendering

    def find_run(self, request: Request) -> PageRun:
        """Look up the run that a URL names."""
        run = self.runs.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "There is no such run.")
        return run

    async def wait_for_list(self, run: PageRun) -> Ls:
        """Return the list of a run's checkpoints, waiting for it."""
        seen = await run.list_checkpoints(patience_s=WHOLE_S)
        if seen.answer is None:
            raise HTTPException(503, str(seen.error or "The root is still being read."))
        found: Ls = seen.answer.document
        return found

    async def checkpoint(self, request: Request, run: PageRun) -> Listed:
        """Look up the checkpoint that a URL names, in what was listed."""
        return find_checkpoint(await self.wait_for_list(run), request.path_params["folder"])

    def page(
        self, request: Request, template: str, values: Mapping[str, Any], *, status: int = 200
    ) -> Response:
        """Render a page; to a request of a script on the page, only the part that it replaces."""
        is_part = request.headers.get("hx-request") == "true"
        common = {
            "runs": self.runs,
            "is_part": is_part,
            "num_working": sum(not job.is_over for job in self.jobs),
            "run": None,
            "version": 0,
            "tab": "",
        }
        name = f"parts/{template}" if is_part else template
        return self.rendering.page(name, {**common, **values}, status=status)

    def start_work(
        self, run: PageRun, work: Callable[[], Answer], *, kind: str, title: str
    ) -> Response:
        """Begin work in the background, and go to its page."""
        context: Context = run.in_context()
        job: Job = self.jobs.start(
            work,
            run.workers,
            kind=kind,
            title=title,
            run=run.name,
            context=context,
        )
        return RedirectResponse(self.rendering.url("jobs", str(job.number)), status_code=303)


def find_checkpoint(listed: Ls, folder: str) -> Listed:
    """Find a checkpoint by its folder."""
    found = next((one for one in listed.checkpoints if one.folder == folder), None)
    if found is None:
        raise HTTPException(404, "There is no such checkpoint.")
    return found


def given(seen: LastAnswer, *others: LastAnswer) -> dict[str, Any]:
    """Return what templates need of an answer: its struct, its error, and whether more comes.

    More may come of the `others`, too.
    """
    return {
        "answer": None if seen.answer is None else seen.answer.document,
        "error": told(seen.error),
        **coming(seen, *others),
    }


def coming(*seen: LastAnswer) -> dict[str, Any]:
    """Return whether answers are being read again, and in how many milliseconds to ask again."""
    retries_s = [one.retry_s for one in seen if one.retry_s is not None]
    return {
        "is_pending": any(one.is_pending for one in seen),
        "retry_ms": int(1000 * min(retries_s)) + 1 if retries_s else None,
    }


def page_number(request: Request) -> int:
    """Return the number of the page of a table, from 1."""
    text = request.query_params.get("page", "1")
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 7 else 1


def select_page(rows: Sequence[Any], number: int) -> dict[str, Any]:
    """Return the rows of one page of a table, and how many there are."""
    last = max(1, -(-len(rows) // PAGE_ROWS))
    number = min(number, last)
    return {
        "rows": rows[(number - 1) * PAGE_ROWS : number * PAGE_ROWS],
        "num_rows": len(rows),
        "page": number,
        "last_page": last,
    }
