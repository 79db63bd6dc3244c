"""Runs one save at a time: staged in the caller's thread, written and committed in the background.

An error is kept until it is raised once: by `PendingSave.wait`, by the next call, by close, or at
the interpreter's exit (tests/test_manager.py).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from holdfast.errors import (
    DeadlineExceeded,
    NotSealed,
    OutcomeUnknown,
    OwnershipError,
    SaveFailed,
    Superseded,
    time_limit,
)
from holdfast.events import Emitter
from holdfast.format import blocks, layout
from holdfast.format.manifest import Manifest
from holdfast.ownership.annotations import annotate
from holdfast.ownership.owner import Ownership
from holdfast.policy.rule import MAIN
from holdfast.policy.savers import Due
from holdfast.results import PendingSave, SavePhase, build_checkpoint
from holdfast.root.catalog import Catalog, Entry, Marks, with_tags
from holdfast.root.commit import check_ownership
from holdfast.saving.compression import Compressing
from holdfast.saving.links import Links
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.recorder import HistoryRecorder
from holdfast.saving.save import SaveRequest, Tools, digest_staged, write
from holdfast.staging.guard import Guarded, Overlapped
from holdfast.staging.interfaces import Staged
from holdfast.staging.overlap import NUM_THREADS, Overlap
from holdfast.staging.stage import Stager
from holdfast.state.capture.capture import Captured
from holdfast.store.base import Store
from holdfast.threads.workers import Threads, Workers, num_threads, run_job

if TYPE_CHECKING:
    from holdfast.saving.handover import SharedStager

MAX_COPIERS = 8
"""Most threads, the caller's included, that copy while training waits; one alone does not use the
whole memory bandwidth."""


_OWNER_CHECK_S = 30.0
"""Timeout of the ownership check after a failed save, in seconds."""
_OWNER_UNKNOWN = "Whether this process still owns the run is not known"


class Chores(Protocol):
    """Callbacks after saves and claims, called in the background thread; they never raise."""

    def after_claim(self) -> None:
        """Do the background work after the run was claimed."""
        ...

    def after_commit(self, entry: Entry) -> None:
        """Do the housekeeping that follows a committed save."""
        ...

    def after_failure(self) -> None:
        """React to a failed save, whose error the caller may never receive."""
        ...


class Saver:
    """Runs saves and callbacks; `standing` is the full checkpoint last saved or resumed from.

    Methods run in the training thread; `close_threads` and `finish_at_stop` also in others.
    """

    def __init__(
        self,
        store: Store,
        owner: Ownership,
        emit: Emitter,
        *,
        timeout_s: float,
        stager: Stager,
        overlap: Overlap,
        compressing: Compressing,
        chores: Chores,
    ) -> None:
        self.emit = emit
        self.chores = chores
        self._background = Workers(1, "holdfast-save")
        self.recorder = HistoryRecorder(store, owner, emit, self._background)
        self.stager = stager
        self._overlap = overlap
        self._guarded = Guarded(keys={})
        self._overlapped: Overlapped | None = None
        self._staged: Staged | None = None
        self._job: Future[None] | None = None
        self.threads = Threads()
        self._num_copiers = min(num_threads(), MAX_COPIERS)
        self.tools = Tools(
            store=store,
            owner=owner,
            compressing=compressing,
            links=Links(store, emit),
            workers=self.threads.workers,
            writers=self.threads.waiters,
            timeout_s=timeout_s,
        )
        self.timeout_s = timeout_s
        self.limit_s = timeout_s
        """How long to wait for the end of the save under way."""
        self.pending: PendingSave | None = None
        self.standing: Entry | None = None
        self.is_rollback = False
        """Whether the run was rolled back to `standing`."""

    def prepare_save(self, captured: Captured, *, is_awaited: bool = False) -> Staged:
        """In the training thread: allocate memory, copy small tensors, plan the other copies."""
        if self._overlapped is not None:
            self._overlapped.wait_for_copy("the next save", self.timeout_s)
        if self._staged is not None:
            self._staged.transfer.wait_for_threads(self.timeout_s)
            self._staged = None
        self._guarded = Guarded(keys={})
        if not self.stager.takes_waves(captured):
            self._guarded = self._overlap.guard(captured)
        keys = self._guarded.keys
        return self.stager.prepare_staging(captured, overlapped=keys, is_awaited=is_awaited)

    def start_save(
        self, staged: Staged, request: SaveRequest, due: Due, joint: SaveParticipant
    ) -> PendingSave:
        """Copy the rest of a prepared state, and start to write and commit it in the background.

        In the training thread. Writing starts before the copy if that ends the caller's wait
        sooner, else after it. Overlapped tensors may still be being copied when this returns;
        optimizer steps wait.
        """
        self.limit_s = self.timeout_s + joint.patience_s
        step = request.timestamp.step
        pending = PendingSave(step, due, timeout_s=self.limit_s, progress=joint.progress)
        self.pending = pending
        joint.progress.enter(SavePhase.QUEUED)
        on_success = partial(
            self.emit,
            "staged",
            f"staged step {pending.step}",
            step=pending.step,
            nbytes=staged.nbytes,
        )
        guarded, self._guarded = self._guarded, Guarded(keys={})
        overlapped = self._overlap.prepare_copy(guarded, staged, pending.step, on_success)
        self._overlapped = overlapped
        if overlapped is not None:
            pending.staged = overlapped.copied
        write = SaveTask(self, pending, staged, request, joint, overlapped).run
        self._job = None
        is_beside = overlapped is None and staged.transfer.is_early
        try:
            self.threads.start()
            self._background.start()
            if is_beside:
                self._job = self._background.submit(write)
            staged.transfer.run_copies(self.threads.workers, self._num_copiers - 1, self.timeout_s)
            if not is_beside:
                # Last, because on few cores these threads take the time of this one.
                # Known before it is queued: an interrupt may come right after that.
                self._job = Future()
                job = partial(run_job, self._job, write)
                if overlapped is None:
                    self._background.queue_task(job)
                else:
                    overlapped.start_copying(
                        self.threads.workers, NUM_THREADS, (self._background, job)
                    )
        except BaseException as error:
            if not is_beside and self._job is not None and self._job.cancel():
                self._job = None
            self._fail_start(pending, staged, error)
            raise
        if overlapped is None:
            pending.staged.set_result(None)
            on_success()
        return pending

    def _fail_start(self, pending: PendingSave, staged: Staged, error: BaseException) -> None:
        """Set the error that `start_save` raises as the result of the futures and the copy."""
        staged.transfer.cancel_copying(error)
        self._staged = staged
        if self._overlapped is None:
            pending.staged.set_exception(error)
        else:
            self._overlapped.cancel_copy(error)
        if self._job is None:
            pending.committed.set_exception(_save_failed(error, pending.step, _OWNER_UNKNOWN))
        pending.delivered = True

    def queue_claim_chores(self) -> None:
        """Queue the callback `after_claim` in the background, before the next save."""
        self._job = self._background.submit(self.chores.after_claim)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until save and callbacks have ended, or raise `DeadlineExceeded`."""
        if self._job is None:
            return
        try:
            self._job.result(timeout=timeout_s)
        except FutureTimeout as error:
            raise self._deadline_error(timeout_s) from error

    def finish_at_stop(self, timeout_s: float) -> str:
        """Finish the save under way when a stop's time is over; return a text on the outcome."""
        try:
            self.wait_until_idle(timeout_s)
        except DeadlineExceeded as error:
            return str(error)
        newest = f"the newest checkpoint is {self.standing.folder}" if self.standing else None
        return f"{self.tools.store.url}: {newest or 'nothing was saved'}"

    def wait_for_arenas(self, timeout_s: float) -> None:
        """Wait until the last save has committed or failed; later callbacks may still run."""
        if self.pending is None or self.pending.committed.done():
            return
        if wait([self.pending.committed], timeout=timeout_s).not_done:
            raise self._deadline_error(timeout_s)

    def raise_failure(self) -> None:
        """Raise the error of the last save if the caller has not received it yet."""
        pending = self.pending
        failure = pending.failure() if pending is not None and not pending.delivered else None
        if pending is not None and failure is not None:
            pending.delivered = True
            raise failure

    def _deadline_error(self, timeout_s: float) -> DeadlineExceeded:
        doing = self.pending.progress if self.pending is not None else "housekeeping"
        return DeadlineExceeded(
            f"{self.tools.store.url}: not done after {time_limit(timeout_s)}; it is {doing}"
        )

    def close_threads(self) -> None:
        """Close the threads, which end after their queued work; free memory if no save runs."""
        if self._job is not None and not self._job.done():
            self.tools.owner.is_clean = False
        else:
            # A closed manager may be referenced for long, or until the next garbage collection;
            # it should not keep a second copy of the state alive.
            self.stager.free_memory()
            self._overlapped = self._staged = None
        self._background.close_pool()
        self.threads.close_pools()


class SaveTask:
    """Staged save as a list of phases, those of `pending.progress`, run by the save thread."""

    def __init__(
        self,
        saver: Saver,
        pending: PendingSave,
        staged: Staged,
        request: SaveRequest,
        joint: SaveParticipant,
        overlapped: Overlapped | None,
    ) -> None:
        self._saver = saver
        self._tools, self._emit = saver.tools, saver.emit
        self._pending = pending
        self._staged = staged
        self._request = request
        self._joint = joint
        self._overlapped = overlapped

    def run(self) -> None:
        """In the save thread: write, commit and clean up; `pending` gets the outcome."""
        began = time.perf_counter()
        pending, saver, joint, step = self._pending, self._saver, self._joint, self._pending.step
        joint.is_under_way = True
        self._emit("save_started", f"saving step {step}", step=step)
        try:
            joint.agree_on_plan(self._tools.owner)
            saver.recorder.put_history()  # so that what an acknowledged save was given is durable
            entry = self._find_unchanged()
            is_new = entry is None
            if entry is None:
                entry = self._write_and_commit()
        except BaseException as error:  # noqa: BLE001 - the future carries it to the caller
            self._fail(error)
            return
        finally:
            self._staged.transfer.release_waiters()
        learned = self._record_changed()
        if not entry.manifest.lacks:
            saver.standing = entry
        checkpoint = build_checkpoint(self._tools.store, entry)
        self._emit(
            "committed",
            f"saved step {step}: {entry.folder}" if is_new else f"already saved: {entry.folder}",
            step=step,
            folder=entry.folder,
            nbytes=entry.manifest.nbytes,
            save_s=time.perf_counter() - began,
            is_new=is_new,
            checkpoint=checkpoint,
            manifest=entry.manifest,
        )
        pending.progress.enter(SavePhase.HOUSEKEEPING)
        pending.committed.set_result(checkpoint)
        saver.chores.after_commit(entry)
        saver.recorder.follow_commit()
        saver.tools.links.look_ahead(learned)
        saver.tools.compressing.choose_codecs()

    def _fail(self, error: BaseException) -> None:
        """Report a failure to the other ranks and to the caller."""
        self._joint.report_failure(error)
        if self._overlapped is not None:
            # The next save reuses the memory. It waits again, and raises the error.
            with suppress(DeadlineExceeded):
                self._overlapped.wait_for_copy("the save", self._tools.timeout_s)
        failure = self._describe_failure(error)
        self._saver.stager.discard_failed(self._staged)
        self._emit("save_failed", str(failure), step=self._pending.step)
        self._pending.committed.set_exception(failure)
        self._saver.chores.after_failure()

    def _describe_failure(self, error: BaseException) -> BaseException:
        """Return `Superseded` if another process now owns the run, which explains other errors."""
        if isinstance(error, OwnershipError):
            return error
        committed = None if isinstance(error, OutcomeUnknown) else False
        epoch, step = self._request.claim.epoch, self._pending.step
        check = partial(check_ownership, self._tools.store, epoch, committed=committed)
        limit_s = min(self._tools.timeout_s, _OWNER_CHECK_S)
        try:
            # In another thread: the storage has just failed, and may hang.
            self._tools.writers.submit(check).result(timeout=limit_s)
        except Superseded as superseded:
            superseded.__cause__ = error
            return superseded
        except BaseException as unread:  # noqa: BLE001 - it goes into the save's error
            return _save_failed(error, step, f"{_OWNER_UNKNOWN} ({str(unread) or 'it hangs'})")
        return _save_failed(error, step, "Training can continue")

    def _record_changed(self) -> dict[str, bytes]:
        """Record which tensors changed; return digests of files expected not to. Never raises."""
        try:
            self._saver.stager.record_changed_tensors(self._staged)
            return {
                known.file.name: known.all_digests()
                for known in self._staged.all_files
                if known.is_apart
            }
        except Exception as error:  # noqa: BLE001 - it is logged, and the commit stands
            self._saver.stager.discard_failed(self._staged)
            self._emit("warning", f"the next save writes every file again: {error!r}")
            return {}

    def _write_and_commit(self) -> Entry:
        owner, tools = self._tools.owner, self._tools
        if self._saver.stager.is_shared:
            keeper = cast("SharedStager", self._saver.stager)  # whose module is not always needed
            save = (self._staged, self._request, self._joint)
            keeper.record_when_staged(*save, self._pending.staged)
        try:
            attempt, manifest = write(
                tools, self._staged, self._request, self._joint, overlapped=self._overlapped
            )
        except (OutcomeUnknown, DeadlineExceeded):
            owner.is_clean = False
            raise
        # The checkpoint that the run resumed from is kept until a newer good one exists.
        is_good = not (manifest.lacks or manifest.unhealthy)
        owner.has_committed = owner.has_committed or is_good
        return Entry(name=attempt.name, folder=attempt.folder, manifest=manifest, marks=Marks())

    def _find_unchanged(self) -> Entry | None:
        """Return `standing`, newly tagged, if this save would write the same content; else None."""
        entry, request, joint = self._saver.standing, self._request, self._joint
        timeout_s = self._tools.timeout_s
        if entry is None or entry.step != request.timestamp.step or not joint.compares:
            return None
        joint.begin_to_compare()
        stored = entry.manifest
        is_stale = joint.leads and not _records_all(stored, request)
        if is_stale and joint.world_size == 1:
            return None
        digests = digest_staged(self._staged, self._tools.workers, timeout_s=timeout_s)
        if self._overlapped is not None:
            self._overlapped.expect_copied(timeout_s)
        sizes = self._staged.file_sizes
        roots = {name: blocks.file_digest(sizes[name], digests[name]) for name in digests}
        recorded = {
            layout.plain_file(name): file.digest
            for name, file in stored.files.items()
            if not layout.is_index_name(name)
        }
        is_unchanged = joint.matches_checkpoint(self._staged, roots, recorded)
        new_tags = tuple(tag for tag in request.tags if tag not in entry.tags)
        if joint.leads:
            # Before the other ranks hear of it: what fails here fails the save on all.
            is_unchanged = is_unchanged and not is_stale and self._may_stand(entry, new_tags)
            joint.announce_verdict(is_unchanged=is_unchanged)
        return with_tags(entry, new_tags) if is_unchanged else None

    def _may_stand(self, entry: Entry, new_tags: tuple[str, ...]) -> bool:
        """Whether a checkpoint may be the result of a save; adds the tags to it."""
        found = Catalog(self._tools.store).entry(entry.name)
        if found is None or found.marks.rejected or found.marks.retired:
            return False
        check_ownership(self._tools.store, self._request.claim.epoch, committed=False)
        if new_tags:
            try:
                annotate(self._tools.store, entry, add_tags=new_tags)
            except NotSealed:
                return False  # it is from before the run was encrypted
        return True


def _records_all(stored: Manifest, request: SaveRequest) -> bool:
    """Whether a manifest has all metadata of a requested save, and a retention no shorter."""
    if not set(request.savers or (MAIN,)) <= set(stored.savers or (MAIN,)):
        return False
    if (stored.save_class, request.save_class) == ("ephemeral", "permanent"):
        return False
    if stored.unhealthy != request.unhealthy:
        return False
    # Compared as text, in which nan equals nan.
    return set(map(str, request.metrics.items())) <= set(map(str, stored.metrics.items()))


def _save_failed(error: BaseException, step: int, outlook: str) -> SaveFailed:
    verdict = "may or may not have committed" if isinstance(error, OutcomeUnknown) else "failed"
    failure = SaveFailed(
        f"the save of step {step} {verdict}: {error}. {outlook}; earlier checkpoints are unchanged",
        step=step,
    )
    failure.__cause__ = error
    return failure
