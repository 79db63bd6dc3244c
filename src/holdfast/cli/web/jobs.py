"""Long work of the page, such as verification: in the background, with progress, can be stopped.

Work ends where it reports progress. Work that hangs in a request cannot be ended: it is given up,
and counts as failed or stopped while its thread waits for the answer.

Threads that read local roots take turns, so that requests are answered in the meantime: reading
takes the interpreter's lock, and the threads of 50 runs would keep it from the one that answers
requests, and from each other. In roots that are remote, they wait for the network instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast.cli.output import PROGRESS, Answer
from holdfast.errors import DeadlineExceeded, UsageError
from holdfast.threads.workers import Workers

TURN_S = 2.0
"""How long a thread waits for its turn at most, as the one before it may hang."""


class Turns:
    """Turns of threads, one at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._num_pages = 0

    @contextmanager
    def take_turn(self, root: str) -> Iterator[None]:
        """Wait until no other thread reads, and no page is being made."""
        has_turn = "://" not in root and self._turn.acquire(timeout=TURN_S)
        try:
            if has_turn:
                self._is_idle.wait(TURN_S)
            yield
        finally:
            if has_turn:
                self._turn.release()

    @contextmanager
    def hold_turns(self) -> Iterator[None]:
        """Begin no turn during the block, which is in the thread of the event loop."""
        self._num_pages += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_pages -= 1
            if not self._num_pages:
                self._is_idle.set()


LOOKING, READING = Turns(), Turns()
"""Turns of what a page of all runs waits for, and of the curves, which come later."""

MAX_JOBS = 8
"""Jobs that are kept, with their results; the oldest that have ended are dropped."""
SILENT_S = 600.0
"""Longest time in which running work reports no progress, in seconds; it is given up then. A
request to a bucket is retried for less."""
STOPPING_S = 5.0
"""How long work that was stopped may take to end, in seconds; it is given up then."""
_MAX_UNFINISHED = 8
"""Jobs of one run that wait, run or hang; there are no more threads than that."""
_END_S = 10.0
State = Literal["waiting", "running", "done", "failed", "stopped"]


class JobStopped(Exception):
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
    heard_s: float | None = None
    """Monotonic seconds of its begin, or of its last progress; None while it waits."""
    stopped_s: float | None = None
    """Monotonic seconds at which it was told to stop."""
    future: Future[Answer] | None = None

    @property
    def state(self) -> State:
        """Progress of the work."""
        future = self.future
        if future is None or not (future.running() or future.done()):
            return "waiting"
        if not future.done():
            return self._given_up or "running"
        if future.cancelled() or isinstance(future.exception(), JobStopped):
            return "stopped"
        return "done" if future.exception() is None else "failed"

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self.stopped_s is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        return self.state in ("done", "failed", "stopped")

    @property
    def hangs(self) -> bool:
        """Whether it was given up, and its thread still waits for an answer."""
        return self.is_over and not self._has_ended

    @property
    def answer(self) -> Answer | None:
        """The answer of work that is done."""
        return self.future.result() if self.future is not None and self.state == "done" else None

    @property
    def error(self) -> BaseException | None:
        """The error of work that failed."""
        if self.state != "failed" or self.future is None:
            return None
        return self.future.exception() if self.future.done() else _silence()

    def begun(self) -> None:
        """Note that a thread has begun with it."""
        self.heard_s = time.monotonic()

    def report_progress(self, what: str, done_nbytes: int, total_nbytes: int) -> None:
        """Take the progress; called by the work itself, which ends here when it is given up."""
        if self.is_stopping:
            raise JobStopped
        if self._given_up:
            raise _silence()
        self.heard_s = time.monotonic()
        self.progress = (what, done_nbytes, total_nbytes)

    @property
    def _has_ended(self) -> bool:
        return self.future is not None and self.future.done()

    @property
    def _given_up(self) -> Literal["stopped", "failed"] | None:
        now_s = time.monotonic()
        if self.stopped_s is not None and now_s - self.stopped_s > STOPPING_S:
            return "stopped"
        is_silent = self.heard_s is not None and now_s - self.heard_s > SILENT_S
        return "failed" if is_silent else None


def _silence() -> DeadlineExceeded:
    return DeadlineExceeded(
        f"no progress for {SILENT_S / 60:.0f} minutes, so the work was abandoned. Check that the "
        "root can be read, and try again"
    )


class Jobs:
    """The work that was begun, oldest first."""

    def __init__(self) -> None:
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
        workers: Workers,
        *,
        kind: str,
        title: str,
        run: str,
        context: Context,
    ) -> Job:
        """Begin a piece of work in a thread of its run, unless the same is under way already."""
        for job in self:
            if not job.is_over and (job.kind, job.title, job.run) == (kind, title, run):
                return job
        if sum(job.run == run and not job._has_ended for job in self) >= _MAX_UNFINISHED:
            raise UsageError(f"too many jobs of {run} are waiting; stop a waiting job first")
        self._last += 1
        job = Job(number=self._last, kind=kind, title=title, run=run)
        context.run(PROGRESS.set, job.report_progress)

        def working() -> Answer:
            job.begun()
            # The texts for terminals are as large as the answer, and nobody reads them here.
            return replace(context.run(work), parts=())

        job.future = workers.submit(working)
        self._jobs[job.number] = job
        self._drop_ended()
        return job

    def request_job_stop(self, job: Job) -> None:
        """Ask a piece of work to end, which it does when it next reports its progress."""
        if not job.is_stopping and job.future is not None:
            job.stopped_s = time.monotonic()
            job.future.cancel()

    def stop_all(self) -> None:
        """Stop all work, and wait for its end."""
        for job in self:
            self.request_job_stop(job)
        wait([job.future for job in self if job.future is not None], timeout=_END_S)

    def _drop_ended(self) -> None:
        ended = [job for job in self if job._has_ended]
        for job in ended[: max(0, len(self._jobs) - MAX_JOBS)]:
            del self._jobs[job.number]


def told(error: BaseException | None) -> Any:
    """Return what a page shows of an error: its class and its text."""
    if error is None:
        return None
    return {"kind": type(error).__name__, "text": str(error)}
