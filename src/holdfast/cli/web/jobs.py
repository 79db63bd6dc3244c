"""Long work of the page, such as verification: in the background, with progress, can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast.cli.output import PROGRESS, Answer
from holdfast.errors import UsageError

MAX_JOBS = 8
"""Jobs that are kept, with their results; the oldest that have ended are dropped."""
_MAX_WAITING = 8
_END_S = 10.0
State = Literal["waiting", "running", "done", "failed", "stopped"]


class Stopped(Exception):
    """A person has stopped the work."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Background work, such as a verification, and its progress."""

    number: int
    kind: str
    """Name of the command."""
    title: str
    run: str
    """Name of the run that it belongs to."""
    started_s: float = field(default_factory=time.time)
    progress: tuple[str, int, int] | None = None
    """What is read, bytes that are done, and bytes in all."""
    can_stop: bool = True
    is_stopping: bool = False
    future: Future[Answer] | None = None

    @property
    def state(self) -> State:
        """Where the work stands."""
        if self.future is None or not (self.future.running() or self.future.done()):
            return "waiting"
        if self.future.running():
            return "running"
        if self.future.cancelled() or isinstance(self.future.exception(), Stopped):
            return "stopped"
        return "done" if self.future.exception() is None else "failed"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return self.future is not None and self.future.done()

    @property
    def answer(self) -> Answer | None:
        """The answer of work that is done."""
        return self.future.result() if self.future is not None and self.state == "done" else None

    @property
    def error(self) -> BaseException | None:
        """The error of work that failed."""
        return self.future.exception() if self.future and self.state == "failed" else None

    def report(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Take the progress; called by the work itself, which ends here when it is stopped."""
        if self.is_stopping:
            raise Stopped
        self.progress = (what, done_nbytes, total_nbytes)


class Jobs:
    """The work that was begun, oldest first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._jobs: dict[int, Job] = {}
        self._last = 0

    def __iter__(self) -> Iterator[Job]:
        return iter([*self._jobs.values()])

    def get(self, number: str) -> Job | None:
        """Return a job, as a URL names it; None if there is none of that number any more."""
        return next((job for job in self if str(job.number) == number), None)

    def start(
        self,
        work: Callable[[], Answer],
        *,
        kind: str,
        title: str,
        run: str,
        context: Context,
        can_stop: bool = True,
    ) -> Job:
        """Begin a piece of work, unless the same is under way already.

        Raises:
            UsageError: too much work waits already.
        """
        for job in self:
            if not job.is_over and (job.kind, job.title, job.run) == (kind, title, run):
                return job
        if sum(not job.is_over for job in self) >= _MAX_WAITING:
            raise UsageError("too much work waits already; stop some of it first")
        self._last += 1
        job = Job(number=self._last, kind=kind, title=title, run=run, can_stop=can_stop)
        context.run(PROGRESS.set, job.report)
        # The texts for terminals are as large as the answer, and nobody reads them here.
        job.future = self._pool.submit(context.run, lambda: replace(work(), parts=()))
        self._jobs[job.number] = job
        self._forget()
        return job

    def stop(self, job: Job) -> None:
        """Ask a piece of work to end; it does when it next reports its progress."""
        if job.can_stop and job.future is not None:
            job.is_stopping = True
            job.future.cancel()

    def end(self) -> None:
        """Stop all work, and wait for its end."""
        for job in self:
            self.stop(job)
        wait([job.future for job in self if job.future is not None], timeout=_END_S)

    def _forget(self) -> None:
        ended = [job for job in self if job.is_over]
        for job in ended[: max(0, len(self._jobs) - MAX_JOBS)]:
            del self._jobs[job.number]


def told(error: BaseException | None) -> Any:
    """Return what a page shows of an error: its class and its text."""
    if error is None:
        return None
    return {"kind": type(error).__name__, "text": str(error)}
