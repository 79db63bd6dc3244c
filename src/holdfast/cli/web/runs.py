"""Runs on the page: their answers, read in threads, kept, and read again after a change.

A run is looked at (`watch`) only when a page asks, and once for all pages that ask in the same
seconds. Its other answers are read again when that look saw a change, or when they are old.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast.cli.ls import list_root
from holdfast.cli.output import PROGRESS, Answer
from holdfast.cli.target import open_root
from holdfast.cli.watch import WatchedRun, Watcher
from holdfast.cli.web.curves import CurveReader
from holdfast.cli.web.jobs import LOOKING
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
