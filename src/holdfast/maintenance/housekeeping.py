"""Maintenance that a manager does after its claims and saves; errors are logged (invariant 8).

`PostSaveTasks` calls it in order, in the thread that saves: retention and garbage collection by
the `Housekeeper`, `UploadQueries` to a second root, and `IntervalMeasurements` for
`every="auto"`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from typing_extensions import override

from holdfast.control import exits
from holdfast.errors import HoldfastError, Superseded
from holdfast.events import Emitter
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.recorded_costs import read_recorded_costs
from holdfast.maintenance.retention import Deleter
from holdfast.ownership.claim import Claim
from holdfast.ownership.owner import Ownership
from holdfast.policy.auto import Auto
from holdfast.policy.costs import SaveCost
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import name_latest
from holdfast.store.base import Store


class Claimant(Protocol):
    """Interface of the holder of the claim under which retention and gc run."""

    @property
    def claim(self) -> Claim | None:
        """The claim on the root; None: retention deletes nothing."""
        ...

    @property
    def has_committed(self) -> bool:
        """Whether this claim has committed a checkpoint that the run could resume from."""
        ...

    @property
    def unclear(self) -> Collection[str]:
        """Folders whose registers must stay, because a put of theirs may still be in flight."""
        ...


class Housekeeper:
    """Runs retention and garbage collection of one root; failures are logged and retried later."""

    def __init__(self, owner: Claimant, deleter: Deleter) -> None:
        """Create an idle housekeeper of the deleter's root, under the claim of `owner`."""
        self._owner = owner
        self._deleter = deleter
        self._store, self._emit = deleter.store, deleter.emit
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def apply_retention(self, entry: Entry) -> None:
        """Point `latest` to a new checkpoint if a run would resume from it, then run retention."""
        if not entry.manifest.lacks:
            with self._trying("latest"):
                latest = Catalog(self._store).latest() if entry.manifest.unhealthy else entry
                if latest is not None and latest.folder == entry.folder:
                    self._warn_once(name_latest(self._store, entry.folder))
        self.retain()

    def retain(self) -> None:
        """Delete what the retention rule does not keep. Thread-safe."""
        owner = self._owner
        with self._lock, self._trying("retention"):
            claim = owner.claim
            if claim is not None:
                self._deleter.carry_out(
                    claim, has_committed=owner.has_committed, unclear=owner.unclear
                )

    def list_judged(self) -> list[Entry]:
        """List the checkpoints that the last retention judged, newest first."""
        return [item.entry for item in self._deleter.report.planned]

    def delete_local_copy(self, folder: str) -> None:
        """Delete the copy here of a checkpoint that the other tier has. Thread-safe."""
        owner, name = self._owner, parse_attempt(folder)
        with self._lock, self._trying("retention"):
            entry = None if name is None else Catalog(self._store).entry(name)
            if entry is not None and owner.claim is not None:
                self._deleter.delete_local_copy(owner.claim, entry, unclear=owner.unclear)

    def remove_unfinished(self, *, spared: Collection[str] = ()) -> None:
        """Remove unfinished saves of earlier writers, outside of `spared`. Thread-safe."""
        claim = self._owner.claim
        with self._lock, self._trying("gc"):
            report = collect_garbage(
                self._store,
                own_epoch=claim.epoch if claim is not None else None,
                spared=spared,
                is_sent_to=self._deleter.is_sent_to,
                emit=self._emit,
            )
            for folder, why in report.removed:
                self._emit("gc", f"removed {folder}: {why}", folder=folder)
            for text in report.foreign:
                self._warn_once(text)
            for folder, why in report.failed:
                self._emit("housekeeping_failed", f"gc of {folder}: {why}", folder=folder)

    def trust(self, entry: Entry) -> None:
        """Mark a checkpoint as verified: the caller has read every byte and found it right."""
        self._deleter.trust(entry)

    def _warn_once(self, text: str) -> None:
        if text and text not in self._warned:
            self._warned.add(text)
            self._emit("warning", text)

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Log an error of the `with` block instead of raising it."""
        try:
            yield
        except Superseded as error:
            self._emit("warning", f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - also a fault in a user's rule (invariant 8)
            self._emit("housekeeping_failed", f"{what}: {error!r}")


class IdleHousekeeper(Housekeeper):
    """Housekeeper of a rank that does not lead: it deletes nothing."""

    @override
    def apply_retention(self, entry: Entry) -> None:
        """No-op: the leader deletes."""

    @override
    def retain(self) -> None:
        """No-op: the leader deletes."""

    @override
    def delete_local_copy(self, folder: str) -> None:
        """No-op: the leader deletes."""

    @override
    def remove_unfinished(self, *, spared: Collection[str] = ()) -> None:
        """No-op: the leader deletes."""


class UploadQueries:
    """Manager's interface to uploads, as of `Mirror`; this default, for one root, is a no-op."""

    def list_uploads(self) -> Sequence[str]:
        """List the folders that are to be uploaded, the newest first, for other hosts."""
        return ()

    def queue_new_uploads(self) -> None:
        """Queue the upload of a new local checkpoint; call before local retention runs."""

    def request_repairs(self) -> None:
        """Request repairs of damaged local checkpoints from the remote tier, in the background."""

    def expect_room(
        self, now: Timestamp, waits: Callable[[], None], gives_up: Callable[[], bool]
    ) -> None:
        """Block while the remote tier lags by more than `max_lag`; first calls `waits`."""

    def raise_failure(self) -> None:
        """Raise the error of a failed upload once, if asked for; an `OwnershipError` always."""

    def unsent(self) -> str:
        """Return a text on the checkpoints that are not uploaded yet; empty if there are none."""
        return ""

    def wait_for_uploads(self, timeout_s: float) -> None:
        """Block until the queue is empty or cannot succeed; else `DeadlineExceeded` lists it."""

    def finish_uploads(self, timeout_s: float) -> None:
        """Upload queued checkpoints until a deadline, then stop the upload thread."""


class IntervalMeasurements:
    """Passes costs of saves, recorded or of this process, to the automatic interval, if any."""

    def __init__(self, store: Store, owner: Ownership, emit: Emitter, auto: Auto | None) -> None:
        self._store = store
        self._owner = owner
        self._emit = emit
        self._auto = auto
        self._learnt_epoch: int | None = None
        self._last_id = ""

    # In the background

    def load_recorded_costs(self) -> None:
        """Pass the costs recorded in all manifests and claims to the `Auto`."""
        claim = self._owner.claim
        if self._auto is None or claim is None:
            return
        try:
            history = read_recorded_costs(self._store).history
        except HoldfastError as error:
            # The next commit retries; until then only costs measured by this process count.
            self._emit("housekeeping_failed", f'every="auto" cannot read the record: {error}')
            return
        self._auto.learn(history)
        self._learnt_epoch = claim.epoch
        self._emit_interval()

    def record_new_cost(self, entry: Entry) -> None:
        """Pass a new checkpoint's cost to the `Auto`; skip an old one of an unchanged save."""
        manifest = entry.manifest
        if self._auto is None or manifest.lacks or manifest.save_id == self._last_id:
            return
        self._last_id = manifest.save_id
        if self._learnt_epoch != manifest.epoch:
            self.load_recorded_costs()
            if self._learnt_epoch == manifest.epoch:
                return  # this save is in the record already
        cost = SaveCost.read(manifest.timings, is_first=manifest.sequence == 1)
        if cost is not None:
            self._auto.observe(cost, manifest.timestamp)
            self._emit_interval()

    # In the training thread

    def note_writing(self, is_writing: bool) -> None:
        """Report to the `Auto` whether the newest save is uncommitted."""
        if self._auto is not None:
            self._auto.note_writing(is_writing)

    def _emit_interval(self) -> None:
        if self._auto is None:
            return
        text, plan = self._auto.news(), self._auto.plan
        if text is not None and plan is not None:
            self._emit("interval", text, interval_s=plan.interval_s, limit=plan.limit)


class PostSaveTasks:
    """Calls a manager's maintenance tasks (retention, tuning, uploads) in the right order."""

    def __init__(
        self,
        manager: exits.Finishes,
        owner: Ownership,
        housekeeper: Housekeeper,
        uploads: UploadQueries,
        tuning: IntervalMeasurements,
        *,
        leads: bool,
    ) -> None:
        """Set up; a rank that does not lead leaves all but failures to the leader."""
        self._manager = manager
        self._owner = owner
        self._housekeeper = housekeeper
        self._uploads = uploads
        self._tuning = tuning
        self._leads = leads

    def after_claim(self) -> None:
        """Remove leftovers of earlier writers, read recorded costs, repair damaged checkpoints."""
        self._housekeeper.remove_unfinished()
        if self._leads:
            self._tuning.load_recorded_costs()
            self._uploads.request_repairs()

    def after_commit(self, entry: Entry) -> None:
        """Record a new checkpoint's cost, queue its upload, then run local retention."""
        if self._leads:
            self._tuning.record_new_cost(entry)
            self._uploads.queue_new_uploads()
        self._housekeeper.apply_retention(entry)

    def after_failure(self) -> None:
        """Keep the manager alive until its error is raised; let later managers claim the run."""
        exits.hold(self._manager)
        self._owner.let_others_claim()
