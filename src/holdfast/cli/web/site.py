"""State of the server that all pages use: runs, background work and templates.

Answers about runs are read in threads and kept. A run is looked at (`watch`) only when a page asks,
and once for all pages that ask in the same seconds. Its other answers are read again when that look
saw a change, or when they are old.

Text from a root was written by others. Templates escape all of it; control characters are shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast.cli.ls import Listed, Ls, list_root
from holdfast.cli.output import PROGRESS, Answer, format_nbytes, format_time, number, printable
from holdfast.cli.target import open_root
from holdfast.cli.watch import WatchedRun, Watcher, age
from holdfast.cli.web.curves import CurveReader
from holdfast.cli.web.guard import Access
from holdfast.cli.web.jobs import LOOKING, Job, Jobs, told
from holdfast.threads.workers import Workers

LOCAL_LOOK_S, REMOTE_LOOK_S = 2.0, 10.0
"""Shortest time between two looks at a root, as `watch` has by default."""
OLD_S = 60.0
"""Age at which an answer is read again: pins, tags and deletions elsewhere are no change that
`watch` sees."""
SHARE = 0.01
"""Most of the time that reading one answer again and again may take: a page of a large root that is
left open must not slow the training."""
PATIENCE_S = 0.3
"""How long a page waits for an answer before it is shown without; it follows when it is read."""
RETRY_S, RETRY_SHARE = 0.6, 0.2
"""How soon a page asks again for an answer that is being read: in seconds, and at least in this
share of the time that it has waited, as it asks for all that it shows."""
NUM_READERS = 4
"""Answers of a run that are read at one time. Each run has its own threads, so that one in a bucket
that does not answer holds up no other. They are daemons: the end of the server waits for none."""
MAX_READERS = 128
"""Threads that read, of all runs together; but each run has one."""
NUM_WORKERS = 2
"""Pieces of long work of a run at one time, in threads of their own for the same reason."""
_MAX_KEPT = 24
_MAX_LARGE = 3
"""Answers with all tensors of a checkpoint that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAnswer:
    """Last answer of a command about a run, or the error that came instead, and its time."""

    answer: Any = None
    error: Exception | None = None
    version: int = 0
    """Number of the change of the run that had been seen by then."""
    at_s: float = 0.0
    """Monotonic seconds at which its reading began."""
    took_s: float = 0.0
    """How long that took."""
    is_pending: bool = False
    """Whether it is being read again."""
    retry_s: float | None = None
    """When to ask again, where something newer is known to come."""

    @property
    def document(self) -> Any:
        """Struct of the answer; None without one."""
        return None if self.answer is None else self.answer.document

    @property
    def rest_s(self) -> float:
        """How long it is not read again, as that took long."""
        rest_s = self.took_s / SHARE
        return rest_s if self.error is None else min(rest_s, OLD_S)


class PageRun:
    """Root on the page, with the answers of its commands."""

    def __init__(self, name: str, root: str, *, num_readers: int = NUM_READERS) -> None:
        self.name = name
        self.root = root
        self.version = 0
        """Grows with each change that a look has seen."""
        self.workers = Workers(NUM_WORKERS, "holdfast-work")
        """Threads of its long work."""
        self.curves = CurveReader(root)
        self._readers = Workers(num_readers, "holdfast-page")
        self._context = copy_context()
        self._watcher: Watcher | None = None
        self._watched: WatchedRun | None = None
        self._kept: OrderedDict[str, LastAnswer] = OrderedDict()
        self._large: OrderedDict[str, LastAnswer] = OrderedDict()
        self._tasks: dict[str, tuple[float, asyncio.Task[LastAnswer]]] = {}
        """What is being read, with the time when that was asked for."""

    @property
    def look_s(self) -> float:
        """Shortest time between two looks, but for roots that take long to look at."""
        return REMOTE_LOOK_S if "://" in self.root else LOCAL_LOOK_S

    async def watch_run(self, *, patience_s: float = PATIENCE_S) -> LastAnswer:
        """Look at the run now, or return what was seen a moment ago."""
        last = self._kept.get("watch", LastAnswer(at_s=-1e9))
        if time.monotonic() - last.at_s < max(self.look_s, last.rest_s):
            return last
        return await self._read_in_thread(
            "watch", self._observe_in_thread, self._kept, _MAX_KEPT, patience_s
        )

    async def get_answer(
        self,
        key: str,
        read: Callable[[], Answer],
        *,
        is_large: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> LastAnswer:
        """Return an answer: the newest that is known after `patience_s`, which may be none yet."""
        kept, most = (self._large, _MAX_LARGE) if is_large else (self._kept, _MAX_KEPT)
        last = kept.get(key)
        if last is not None:
            kept.move_to_end(key)
            age_s = time.monotonic() - last.at_s
            old_s = OLD_S if last.error is None else self.look_s
            if last.version == self.version and age_s < old_s:
                return last
            held_s = last.rest_s - age_s
            if held_s > 0:
                return replace(last, retry_s=held_s)
        return await self._read_in_thread(key, read, kept, most, patience_s)

    async def list_checkpoints(self, *, patience_s: float = PATIENCE_S) -> LastAnswer:
        """Return the answer of `ls`."""
        return await self.get_answer("ls", self._list_in_thread, patience_s=patience_s)

    def stop_new_reads(self) -> None:
        """Begin nothing more; what is being read ends by itself."""
        self._readers.close_pool()
        self.workers.close_pool()

    def in_context(self) -> Context:
        """Return a context with the keys and times of the command line, without progress bars."""
        context = self._context.copy()
        context.run(PROGRESS.set, _no_progress)
        return context

    async def _read_in_thread(
        self,
        key: str,
        read: Callable[[], Any],
        kept: OrderedDict[str, LastAnswer],
        most: int,
        patience_s: float,
    ) -> LastAnswer:
        """Read in a thread, once for all who ask; return the last one if it takes long."""
        if key not in self._tasks:
            reading = asyncio.ensure_future(self._read_and_cache(key, read, kept, most))
            self._tasks[key] = time.monotonic(), reading
            reading.add_done_callback(lambda _: self._tasks.pop(key, None))
        began_s, task = self._tasks[key]
        done, _ = await asyncio.wait({task}, timeout=patience_s)
        if done:
            return task.result()
        retry_s = max(RETRY_S, RETRY_SHARE * (time.monotonic() - began_s))
        return replace(kept.get(key, LastAnswer()), is_pending=True, retry_s=retry_s)

    async def _read_and_cache(
        self, key: str, read: Callable[[], Any], kept: OrderedDict[str, LastAnswer], most: int
    ) -> LastAnswer:
        reading = partial(self.in_context().run, _seen, read, self.version)
        seen = await asyncio.wrap_future(self._readers.submit(reading))
        before = kept.get(key)
        if key == "watch" and before is not None and before.error and not seen.error:
            self.version += 1  # what could not be read can be read again
        kept[key] = seen
        while len(kept) > most:
            kept.popitem(last=False)
        return seen

    def _list_in_thread(self) -> Answer:
        with LOOKING.take_turn(self.root):
            return list_root(self.root)

    def _observe_in_thread(self) -> WatchedRun:
        """Look at the root, in a thread; one at a time, as `_read_in_thread` sees to."""
        if self._watcher is None:
            self._watcher = Watcher(open_root(self.root))
        with LOOKING.take_turn(self.root):
            found = self._watcher.observe_root()
        if self._watched is not None and _has_changed(self._watched, found):
            self.version += 1
        self._watched = found
        return found


def _seen(read: Callable[[], Any], version: int) -> LastAnswer:
    """Read an answer, in a thread."""
    at_s, answer, error = time.monotonic(), None, None
    try:
        answer = read()
    except Exception as raised:  # noqa: BLE001 - its page shows it, and other runs go on
        error = raised
    took_s = time.monotonic() - at_s
    return LastAnswer(answer=answer, error=error, version=version, at_s=at_s, took_s=took_s)


def _has_changed(one: WatchedRun, other: WatchedRun) -> bool:
    """Whether checkpoints, their uploads or the owner differ; bytes of a save under way do not."""
    return any(
        getattr(one, name) != getattr(other, name)
        for name in ("owner", "checkpoints", "uploads", "left_behind")
    )


def _no_progress(what: str, done_nbytes: int, total_nbytes: int) -> None:
    """Do nothing: the page shows the progress of background work only."""


def make_runs(roots: Sequence[str]) -> Mapping[str, PageRun]:
    """Make the runs of some roots, by the names of their pages."""
    names = names_of(roots)
    num_readers = max(1, min(NUM_READERS, MAX_READERS // max(len(names), 1)))
    return {name: PageRun(name, root, num_readers=num_readers) for name, root in names.items()}


def names_of(roots: Sequence[str]) -> dict[str, str]:
    """Give each root a short name: the last part of its path, with a number where that is taken."""
    found: dict[str, str] = {}
    for root in dict.fromkeys(roots):
        last = root.rstrip("/").rpartition("/")[2]
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-") or "run"
        name, number = base, 1
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found[name] = root
    return found


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
