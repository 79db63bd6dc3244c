"""Uploads checkpoints of a local root to a remote one in the background (design.md, rule 9).

Owns the upload thread, the only one that makes requests to the remote tier, and the interface of
the training threads to it; the work of that thread is in `replication.upload_rounds`.
A failed upload is logged and retried; it delays only the deletion of what is not uploaded yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum, auto

from typing_extensions import override

from holdfast.errors import DeadlineExceeded, UploadFailed, time_limit
from holdfast.events import Emitter
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.housekeeping import Housekeeper, UploadQueries
from holdfast.ownership.claim import Choice
from holdfast.ownership.owner import Following, Ownership
from holdfast.ownership.tiered import TieredOwnership
from holdfast.ownership.tiered_catalog import TieredCatalog
from holdfast.ownership.tiered_options import Tiered, TieredOptions, TierRules
from holdfast.replication.upload_rounds import UploadWorker
from holdfast.root.catalog import Catalog, Entry

_LOOK_S = 1.0
"""Pause between two looks whether a wait is to be given up, in seconds."""
_END_S = 5.0
"""How long `close` waits, beyond its deadline, for blocks in flight, in seconds."""


class UploadState(Enum):
    """State of the upload thread."""

    RESTS = auto()
    WORKS = auto()
    AGAIN = auto()
    """Another round is due: something has changed since the present one began."""


class Mirror(UploadQueries):
    """Uploads checkpoints to the remote tier in its own thread, and runs retention there.
    Paused until the run is claimed, and while it is being claimed again.
    """

    def __init__(
        self,
        owner: TieredOwnership,
        sending: UploadWorker,
        options: TieredOptions,
        emit: Emitter,
        *,
        timeout_s: float,
    ) -> None:
        """Create a mirror, paused until `go_on`. `timeout_s` is the longest that callers wait."""
        self._owner = owner
        self._local_url, self._remote_url = owner.catalog.store.url, owner.catalog.remote.store.url
        self._sending = sending
        self._backlog, self._background = sending.backlog, sending.background
        self._changed = self._backlog.changed
        self._background.ask_to_stop()
        self._options = options
        self._emit = emit
        self._timeout_s = timeout_s
        self._turn = UploadState.RESTS
        self._job: Future[None] | None = None

    # Called by the threads that train and save

    @override
    def queue_new_uploads(self) -> None:
        try:
            self._backlog.refresh()
        except Exception as error:  # noqa: BLE001 - the save stands; nothing is deleted meanwhile
            self._backlog.doubt()
            self._emit("housekeeping_failed", f"queue of uploads: {error!r}")
        self._sending.may_release = True
        self._wake()

    @override
    def mend_now(self) -> None:
        self._sending.may_mend = self._sending.may_release = True
        self._wake()

    @override
    def expect_room(
        self, now: Timestamp, waits: Callable[[], None], gives_up: Callable[[], bool]
    ) -> None:
        lag, sending = self._options.max_lag, self._sending
        if lag is None:
            return
        end = time.monotonic() + self._timeout_s
        has_told = False
        with self._locked(self._timeout_s):
            while sending.failures.lost is None and self._backlog.is_too_far_behind(now, lag):
                if gives_up():
                    return
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        f"{self._remote_url} is further behind than max_lag allows, and did not "
                        f"catch up in {time_limit(self._timeout_s)}: {self._backlog}"
                    ) from sending.failures.last
                if not has_told:
                    has_told = True
                    waits()
                self._changed.wait(min(left_s, _LOOK_S))

    @override
    def raise_failure(self) -> None:
        failures = self._sending.failures
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
                    f"{self._remote_url}: not all was sent after {time_limit(timeout_s)}: "
                    f"{self._backlog}"
                ) from self._sending.failures.last
            job = self._job
        if job is not None and job.done():
            job.result()

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the queue's lock in the `with` block; a thread that has it may wait for slow I/O.

        Raises:
            DeadlineExceeded: the lock was not free within `timeout_s` seconds.
        """
        if not self._changed.acquire(timeout=timeout_s):
            raise DeadlineExceeded(
                f"{self._local_url}: the queue of uploads is still being read after "
                f"{time_limit(timeout_s)}; its storage or key service hangs"
            )
        try:
            yield
        finally:
            self._changed.release()

    def _is_resting(self) -> bool:
        return self._turn is UploadState.RESTS

    def _is_settled(self) -> bool:
        failure = self._sending.failures.last
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
        self._sending.stop_uploads()
        self._background.stop_jobs()
        failures = self._sending.failures
        if failures.lost is not None and not failures.is_lost_told:
            raise failures.lost
        if self._backlog.folders:
            self._report_unsent()

    @override
    def unsent(self) -> str:
        if not self._backlog.folders:
            return ""
        return (
            f"{self._remote_url}: not uploaded: {self._backlog}. They are in {self._local_url}; "
            "run the program again to upload them, also after training has ended. "
            f"`holdfast uploads {self._local_url}` lists what is missing"
        )

    def _report_unsent(self) -> None:
        text = self.unsent()
        self._emit("upload_failed", text, tier="remote", waiting=len(self._backlog.folders))
        if self._options.on_upload_failure == "raise":
            raise UploadFailed(text) from self._sending.failures.last

    # The thread

    def go_on(self) -> None:
        """Drop cached state of both tiers and start uploading; called after each claim."""
        self._sending.clear_cached_facts()
        self._sending.proceed()
        self._background.proceed()
        self._wake()

    def pause(self, timeout_s: float | None = None) -> None:
        """Stop uploading, and wait until the upload thread has ended its round.

        Raises:
            DeadlineExceeded: a request to the remote tier hangs.
        """
        self._background.ask_to_stop()
        self._sending.interrupt()
        jobs = [] if self._job is None else [self._job]
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._background.stop(jobs, timeout_s=limit_s):
            self._owner.remote_is_clean = False
            raise DeadlineExceeded(
                f"{self._remote_url}: an upload does not end after {time_limit(limit_s)}"
            )
        if not self._backlog.is_sure or any(map(self._is_ours, self._backlog.waiting)):
            # A later upload commits in this epoch, so the epoch must not be recorded as ended.
            self._owner.remote_is_clean = False

    def _is_ours(self, entry: Entry) -> bool:
        claim = self._owner.claim
        return claim is not None and entry.name.epoch == claim.epoch

    @property
    def _may_work(self) -> bool:
        return not self._background.is_stopping and self._sending.failures.lost is None

    def _wake(self) -> None:
        with self._changed:
            if self._turn is UploadState.RESTS and self._may_work:
                self._job = self._background.submit(self._work)
                self._turn = UploadState.AGAIN
            elif self._turn is UploadState.WORKS:
                self._turn = UploadState.AGAIN

    def _work(self) -> None:
        try:
            while self._has_work():
                if self._sending.round():
                    self._wake()
        except BaseException:
            self._rest()
            raise

    def _has_work(self) -> bool:
        with self._changed:
            if self._turn is not UploadState.AGAIN or not self._may_work:
                self._rest()
                return False
            self._turn = UploadState.WORKS
            return True

    def _rest(self) -> None:
        with self._changed:
            self._turn = UploadState.RESTS
            self._changed.notify_all()


class MirroredOwnership(TieredOwnership):
    """Ownership of a run in two tiers that pauses uploads while the run is being claimed."""

    def __init__(
        self,
        catalog: TieredCatalog,
        rules: TierRules,
        options: TieredOptions,
        emit: Emitter,
        *,
        takeover: bool,
        replaces: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(catalog, takeover=takeover, emit=emit)
        self.sending = UploadWorker(self, rules, options, emit, replaces=replaces)
        self.mirror = Mirror(self, self.sending, options, emit, timeout_s=timeout_s)

    @override
    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        self.mirror.pause()
        super().claim_ownership(choices)
        self.mirror.go_on()


def ownership(
    root: object,
    catalog: Catalog,
    rules: TierRules,
    emit: Emitter,
    *,
    takeover: bool,
    replaces: bool,
    timeout_s: float,
    leads: bool = True,
) -> tuple[Ownership, UploadQueries, Housekeeper]:
    """Create the ownership, uploads and local housekeeping of a root with one or two tiers.

    With one tier, uploads are a no-op, and in a rank that does not lead all three are. `rules` are
    the tiers' retention rules; `timeout_s` is the longest that callers wait.
    """
    if not leads:
        follower = Following(catalog.store, takeover=takeover, emit=emit)
        idle = Housekeeper(catalog.store, follower, rules.local, emit)
        return follower, UploadQueries(), idle
    if not (isinstance(root, Tiered) and isinstance(catalog, TieredCatalog)):
        owner = Ownership(catalog.store, takeover=takeover, emit=emit)
        chores = Housekeeper(
            catalog.store, owner, rules.local, emit, replaces=replaces, is_sent_to=False
        )
        return owner, UploadQueries(), chores
    both = MirroredOwnership(
        catalog,
        rules,
        root.options,
        emit,
        takeover=takeover,
        replaces=replaces,
        timeout_s=timeout_s,
    )
    return both, both.mirror, both.sending.chores
