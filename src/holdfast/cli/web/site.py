"""State of the server that all pages use: runs, background work and templates.

Text from a root was written by others. Templates escape all of it; control characters are shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast.cli.ls import Listed, Ls
from holdfast.cli.output import Answer, format_nbytes, format_time, number, printable
from holdfast.cli.watch import age
from holdfast.cli.web.guard import Access
from holdfast.cli.web.jobs import Job, Jobs, told
from holdfast.cli.web.runs import LastAnswer, PageRun

MAX_TEXT = 10_000
"""Characters of one text that are shown: names in a checkpoint may be as long as it is."""
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
WHOLE_S = 30.0
"""How long a page waits for what it cannot do without, such as the list that names are looked up
in."""
PAGE_ROWS = 100
"""Rows of a table that are shown at once."""


class Static:
    """Scripts, styles and pictures of the package, read once: no path of a request is opened."""

    def __init__(self) -> None:
        folder = files("holdfast.cli.web").joinpath("static")
        self._files = {
            one.name: (one.read_bytes(), kind)
            for one in folder.iterdir()
            for ending, kind in _KINDS.items()
            if one.name.endswith(ending)
        }
        digest = hashlib.sha256()
        for name in sorted(self._files):
            digest.update(self._files[name][0])
        self.version = digest.hexdigest()[:8]

    def response(self, name: str) -> Response | None:
        """Return a file; None if there is none of that name."""
        found = self._files.get(name)
        if found is None:
            return None
        data, kind = found
        # The URL has the version.
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=headers)


class Rendering:
    """Makes pages of templates."""

    def __init__(self, access: Access, static: Static, **shared: Any) -> None:
        self._access = access
        self._environment = Environment(
            loader=PackageLoader("holdfast.cli.web"),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_escape_text,
        )
        self._environment.filters |= {
            "size": format_nbytes,
            "number": lambda value: "–" if value is None else number(value),
            "when": format_time,
            "age": lambda seconds: "?" if seconds is None else age(seconds),
            "seconds": lambda value: "–" if value is None else _format_seconds(value),
        }
        self._environment.globals |= {
            **shared,
            "url": self.url,
            "static": lambda name: f"{self.url('static', name)}?v={static.version}",
            "form_token": access.form_token,
        }

    def url(self, *parts: str, **query: object) -> str:
        """Return the path of a page, with the prefix; empty values are left out of the query."""
        path = "/".join(quote(part, safe="") for part in parts)
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return f"{self._access.prefix}/{path}" + (f"?{urlencode(given)}" if given else "")

    def page(self, template: str, values: Mapping[str, Any], *, status: int = 200) -> HTMLResponse:
        """Render a template."""
        text = self._environment.get_template(template).render(values)
        return HTMLResponse(text, status_code=status)


def _escape_text(value: Any) -> Any:
    """Escape control characters of text, and cut what is huge; leave markup of templates."""
    if type(value) is not str:
        return value
    rest = len(value) - MAX_TEXT
    return printable(value) if rest <= 0 else f"{printable(value[:MAX_TEXT])}… ({rest:,} more)"


def _format_seconds(value: float) -> str:
    """Format a duration, of short ones the milliseconds."""
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


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
        "answer": seen.document,
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
