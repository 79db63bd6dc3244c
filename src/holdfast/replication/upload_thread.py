"""The thread that uploads in the background, its failures, and how training threads wait for it.

Owns the turns of that thread, which alone makes requests to the remote tier. `Mirror` uploads
checkpoints with it, and `HostUploads` the files of one host.
"""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from threading import Condition

from typing_extensions import override

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    OwnershipError,
    UploadFailed,
    time_limit,
)
from holdfast.events import Emitter
from holdfast.format.records import UploadState
from holdfast.maintenance.housekeeping import UploadQueries
from holdfast.ownership.tiered_catalog import remote_emitter
from holdfast.ownership.tiered_options import TieredOptions
from holdfast.replication.upload import Sender, UploadInterrupted
from holdfast.root.catalog import Entry
from holdfast.store.base import Store
from holdfast.threads.workers import Background

BACKOFF_S = 1.0
"""Pause after a first failure; it doubles with each further failure."""
BACKOFF_MAX_S = 60.0
LOOK_S = 1.0
"""Pause between two looks whether a wait is to be given up, in seconds."""
_RANDOM = random.Random()  # not the module's generator, which is part of the run's state
_BLOCK_TIMEOUT_S = 600.0
_END_S = 5.0
"""How long `close` waits, beyond its deadline, for blocks in flight, in seconds."""


class _Turn(Enum):
    """State of the upload thread."""

    RESTS = auto()
    WORKS = auto()
    AGAIN = auto()
    """Another round is due: something has changed since the present one began."""


@dataclass(slots=True, kw_only=True)
class Failures:
    """Upload failures since the run was claimed; guarded by the lock of the queue."""

    count: int = 0
    last: UploadFailed | None = None
    """Failure that callers must see; None: none, or a later upload has succeeded."""
    is_refusal: bool = False
    """Whether `last` stays, also after later uploads succeed."""
    lost: OwnershipError | None = None
    """Why uploads have stopped: another process owns the run."""
    is_lost_told: bool = False


class UploadThread(UploadQueries):
    """Runs rounds of uploads in one thread, paused until `resume_uploads`."""

    def __init__(
        self,
        local: Store,
        remote: Store,
        options: TieredOptions,
        emit: Emitter,
        *,
        changed: Condition,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the longest that callers wait; `changed` guards the queue of uploads."""
        self._local, self._remote = local, remote
        self._options = options
        self._emit = emit
        self._emit_remote = remote_emitter(emit, remote.url)
        self._timeout_s = timeout_s
        self._changed = changed
        self._sender = Sender(
            local,
            remote,
            num_threads=options.threads,
            timeout_s=_BLOCK_TIMEOUT_S,
            reads_back=options.reads_back,
        )
        self._background = Background("holdfast-mirror")
        self._background.ask_to_stop()  # ends the present round, and lets no other begin
        self._turn = _Turn.RESTS
        self._job: Future[None] | None = None
        self._failures = Failures()

    @abstractmethod
    def _clear_cached_facts(self) -> None:
        """Discard cached facts about both tiers, since other processes may change them."""

    @abstractmethod
    def _describe_queue(self) -> str:
        """Describe what waits for its upload; empty if nothing does."""

    @abstractmethod
    def _run_uploads(self) -> None:
        """Do what is due, in the thread; errors are logged, and another round is requested."""

    @abstractmethod
    def _record_failure(self, entry: Entry | None, text: str, state: UploadState) -> None:
        """Record the failure of an upload in the local root."""

    # Called by the threads that train and save

    @override
    def raise_failure(self) -> None:
        failures = self._failures
        if failures.lost is not None:
            failures.is_lost_told = True
            raise failures.lost
        failure = failures.last
        if failure is not None and self._options.on_upload_failure == "raise":
            failures.last, failures.is_refusal = None, False
            raise failure

    @override
    def wait_for_uploads(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with self._locked(timeout_s):
            if not self._changed.wait_for(self._is_settled, max(end - time.monotonic(), 0)):
                raise DeadlineExceeded(
                    f"{self._remote.url}: not everything was sent after {time_limit(timeout_s)}: "
                    f"{self._describe_queue()}"
                ) from self._failures.last
            job = self._job
        if job is not None and job.done():
            job.result()

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the queue's lock, or raise `DeadlineExceeded` if it is held during slow I/O."""
        if not self._changed.acquire(timeout=timeout_s):
            raise DeadlineExceeded(
                f"{self._local.url}: the queue of uploads is still being read after "
                f"{time_limit(timeout_s)}; its storage or key service hangs"
            )
        try:
            yield
        finally:
            self._changed.release()

    def _is_resting(self) -> bool:
        return self._turn is _Turn.RESTS

    def _is_settled(self) -> bool:
        failure = self._failures.last
        must_raise = failure is not None and self._options.on_upload_failure == "raise"
        return self._is_resting() or must_raise

    @override
    def finish_uploads(self, timeout_s: float) -> None:
        limit_s = min(timeout_s, self._options.close_timeout_s)
        end = time.monotonic() + limit_s
        try:
            try:
                with self._locked(limit_s + _END_S):
                    self._changed.wait_for(self._is_resting, max(end - time.monotonic(), 0))
            finally:
                self.pause(_END_S)
        except DeadlineExceeded as error:
            self._emit("housekeeping_failed", str(error), tier="remote")
        self._sender.background.stop_jobs()
        self._background.stop_jobs()
        failures = self._failures
        if failures.lost is not None and not failures.is_lost_told:
            raise failures.lost
        text = self.unsent()
        if text:
            self._emit("upload_failed", text, tier="remote")
            if self._options.on_upload_failure == "raise":
                raise UploadFailed(text) from failures.last

    # The thread

    def resume_uploads(self) -> None:
        """Drop cached state of both tiers and start uploading; called after each claim."""
        self._clear_cached_facts()
        self._failures = Failures()
        self._sender.background.start()  # an exiting interpreter cannot start threads
        self._sender.background.proceed()
        self._background.proceed()
        self._wake()

    def pause(self, timeout_s: float | None = None) -> None:
        """Stop uploading; `DeadlineExceeded` if a request hangs, so that the round does not end."""
        self._background.ask_to_stop()
        self._sender.background.ask_to_stop()
        jobs = [] if self._job is None else [self._job]
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._background.stop(jobs, timeout_s=limit_s):
            raise DeadlineExceeded(
                f"{self._remote.url}: an upload has not ended after {time_limit(limit_s)}"
            )

    @property
    def _may_work(self) -> bool:
        return not self._background.is_stopping and self._failures.lost is None

    def _wake(self) -> None:
        with self._changed:
            if self._turn is _Turn.RESTS and self._may_work:
                self._job = self._background.submit(self._work)
                self._turn = _Turn.AGAIN
            elif self._turn is _Turn.WORKS:
                self._turn = _Turn.AGAIN

    @property
    def _is_woken(self) -> bool:
        """Whether another round was requested since the present one began."""
        return self._turn is _Turn.AGAIN

    def _work(self) -> None:
        try:
            while self._has_work():
                self._run_round()
        except BaseException:
            self._rest()
            raise

    def _has_work(self) -> bool:
        with self._changed:
            if self._turn is not _Turn.AGAIN or not self._may_work:
                self._rest()
                return False
            self._turn = _Turn.WORKS
            return True

    def _rest(self) -> None:
        with self._changed:
            self._turn = _Turn.RESTS
            self._changed.notify_all()

    def _run_round(self) -> None:
        """Run a round of uploads and upkeep; log its errors, and request another to retry."""
        try:
            self._run_uploads()
        except UploadInterrupted:
            # The run is being claimed, or the process closes. The interrupted upload is recorded as
            # waiting, and its uploaded parts stay: the next claim continues it, in any process.
            pass
        except OwnershipError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001 - it is logged and retried
            self._handle_upload_failure(error, None)

    # Failures

    def _count_success(self) -> None:
        """Forget the failures before an upload that is over: committed, or given up."""
        with self._changed:
            self._failures.count = 0
            if not self._failures.is_refusal:
                self._failures.last = None
            self._changed.notify_all()

    def _handle_upload_failure(self, error: BaseException, entry: Entry | None) -> None:
        """Log an upload failure, pause, and request a retry."""
        self._failures.count += 1
        pause_s = min(BACKOFF_S * 2 ** min(self._failures.count - 1, 10), BACKOFF_MAX_S)
        pause_s *= _RANDOM.uniform(0.5, 1.0)  # many machines must not retry at once
        what = "the remote tier" if entry is None else entry.folder
        text = f"{what}: {error}" if isinstance(error, HoldfastError) else f"{what}: {error!r}"
        if self._failures.count >= self._options.tries:
            self._remember(text, error)
        self._emit_remote(
            "upload_failed",
            f"{text}; tried again in {pause_s:.0f} s",
            step=None if entry is None else entry.step,
            tries=self._failures.count,
            retry_in_s=pause_s,
        )
        self._record_failure(entry, text, "failed")
        self._wake()
        self._background.sleep(pause_s)

    def _refuse_upload(self, entry: Entry, error: HoldfastError) -> None:
        """Report an upload that can never succeed; the local copy stays for the user."""
        text = f"{entry.folder} cannot be sent: {error}"
        self._remember(text, error)
        self._failures.is_refusal = True
        self._emit_remote("upload_failed", text, step=entry.step, folder=entry.folder)
        self._record_failure(entry, str(error), "refused")

    def _remember(self, text: str, error: BaseException) -> None:
        failure = UploadFailed(f"{self._remote.url}: {text}. The checkpoint is in the local tier")
        failure.__cause__ = error
        with self._changed:
            self._failures.last = failure
            self._changed.notify_all()

    def _lose(self, error: OwnershipError) -> None:
        """Log that another process owns the run, and stop uploading."""
        with self._changed:
            self._failures.lost = error
            self._changed.notify_all()
        self._emit_remote("upload_failed", f"no more files are sent: {error}")
