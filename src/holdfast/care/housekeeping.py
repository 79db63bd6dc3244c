"""Chores of a manager after a commit or a claim, which never stop training (invariant 8).

`ManagerChores` has their order, in the thread that saves: retention and gc by the `Housekeeper`,
`Uploads` to a second root, and what `every="auto"` is told (`Tuning`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast.care.advise import gather
from holdfast.care.gc import collect
from holdfast.care.retention import Deleter, Waiting
from holdfast.engine.claims.claim import Claim
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.control import exits
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.roots.commit import name_latest
from holdfast.errors import HoldfastError, Superseded
from holdfast.events import Emitter
from holdfast.format.manifest import Timestamp
from holdfast.policy.auto import Auto
from holdfast.policy.measured import SaveCost
from holdfast.policy.retention import Rule
from holdfast.store.base import Store


class Claimant(Protocol):
    """Holder of a claim, in whose name chores are done."""

    @property
    def claim(self) -> Claim | None:
        """The claim in whose name they are done; without one nothing is."""
        ...

    @property
    def has_committed(self) -> bool:
        """Whether that claim has a commit of its own from which the run would go on."""
        ...

    @property
    def unclear(self) -> Collection[str]:
        """Folders whose registers must stay, because a copy of their put may still arrive."""
        ...


class Housekeeper:
    """Does the chores of one manager; failures are logged, and tried again next time."""

    def __init__(
        self,
        store: Store,
        owner: Claimant,
        rule: Rule,
        emit: Emitter,
        *,
        replaces: bool = False,
        is_sent_to: bool = True,
        waiting: Waiting | None = None,
    ) -> None:
        """With `replaces` a checkpoint takes the place of older ones of its step. `is_sent_to`:
        whether the root may be the remote tier of a run, where senders put manifests. `waiting`
        says what must not be deleted yet."""
        self._is_sent_to = is_sent_to
        self._lock = threading.Lock()
        self._store = store
        self._owner = owner
        self._emit = emit
        self._deleter = Deleter(
            store, rule, emit, replaces=replaces, is_sent_to=is_sent_to, waiting=waiting
        )

    def after_commit(self, entry: Entry) -> None:
        """Move `latest`, if a run would go on from this one, then delete what the rule drops."""
        if not entry.manifest.lacks:
            with self._trying("latest"):
                latest = Catalog(self._store).latest() if entry.manifest.unhealthy else entry
                if latest is not None and latest.folder == entry.folder:
                    name_latest(self._store, entry.folder)
        self.retain()

    def retain(self) -> None:
        """Delete what the rule drops. From any thread."""
        owner = self._owner
        with self._lock, self._trying("retention"):
            claim = owner.claim
            if claim is not None:
                self._deleter.carry_out(
                    claim, has_committed=owner.has_committed, unclear=owner.unclear
                )

    def after_claim(self, *, spared: Collection[str] = ()) -> None:
        """Remove what earlier writers left unfinished, but for the `spared` folders."""
        claim = self._owner.claim
        with self._trying("gc"):
            report = collect(
                self._store,
                own_epoch=claim.epoch if claim is not None else None,
                spared=spared,
                is_sent_to=self._is_sent_to,
                emit=self._emit,
            )
            for folder, why in report.removed:
                self._emit("gc", f"removed {folder}: {why}", folder=folder)
            for folder, why in report.failed:
                self._emit("housekeeping_failed", f"gc of {folder}: {why}", folder=folder)

    def trust(self, entry: Entry) -> None:
        """Take a checkpoint for whole: a load has read every byte of it."""
        self._deleter.trust(entry)

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Log an error instead of raising it."""
        try:
            yield
        except Superseded as error:
            self._emit("warning", f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - also a fault in a user's rule (invariant 8)
            self._emit("housekeeping_failed", f"{what}: {error!r}")


class Uploads:
    """Uploads of committed checkpoints, as a manager with one root sees them: no-ops.

    `care.mirror.Mirror` sends to a second root.
    """

    def committed(self) -> None:
        """Queue a new checkpoint of the local root, before anything there is deleted."""

    def mend_now(self) -> None:
        """Let what is damaged locally and whole remotely be mended from now on."""

    def expect_room(self, now: Timestamp) -> None:
        """Return when the remote tier is no further behind than it may be.

        Raises:
            DeadlineExceeded: it does not catch up.
        """

    def raise_failure(self) -> None:
        """Raise what must not be missed: that the run went on elsewhere, each time; and a failed
        upload once, if it is to be raised."""

    def settle(self, timeout_s: float) -> None:
        """Return when nothing waits to be sent any more, or nothing of it can be.

        Raises:
            DeadlineExceeded: says what still waits.
        """

    def close(self, timeout_s: float) -> None:
        """Send what is left, up to a deadline, and end.

        Raises:
            UploadFailed: something is left, and that is to be raised.
            OwnershipError: the run went on elsewhere, and nobody was told yet.
        """


class Tuning:
    """Tells the `Auto` of one manager what the root records, and what saves and resumes cost.

    Owns when it is told what, and in which thread; what follows is for `holdfast.policy.auto`.
    Without an `Auto` every method does nothing.
    """

    def __init__(self, store: Store, owner: Ownership, emit: Emitter, auto: Auto | None) -> None:
        self._store = store
        self._owner = owner
        self._emit = emit
        self._auto = auto
        self._learnt_epoch: int | None = None
        self._last_id = ""

    # In the background

    def after_claim(self) -> None:
        """Read what the run has recorded, once per claim: every manifest and claim of the root."""
        claim = self._owner.claim
        if self._auto is None or claim is None:
            return
        try:
            history = gather(self._store).history
        except HoldfastError as error:
            # The next commit tries again; until then what is known from this process counts.
            self._emit("housekeeping_failed", f'every="auto" cannot read the record: {error}')
            return
        self._auto.learn(history)
        self._learnt_epoch = claim.epoch
        self._tell()

    def after_commit(self, entry: Entry) -> None:
        """Take in what this save cost, unless it is one that was there already."""
        manifest = entry.manifest
        if self._auto is None or manifest.lacks or manifest.save_id == self._last_id:
            return
        self._last_id = manifest.save_id
        if self._learnt_epoch != manifest.epoch:
            self.after_claim()
            if self._learnt_epoch == manifest.epoch:
                return  # this save is in the record already
        cost = SaveCost.read(manifest.timings, is_first=manifest.sequence == 1)
        if cost is not None:
            self._auto.observe(cost, manifest.timestamp)
            self._tell()

    # In the thread that trains

    def look(self, now: Timestamp, *, is_writing: bool) -> None:
        """Training is at `now`; `is_writing`: the newest save is not committed yet."""
        if self._auto is not None:
            self._auto.look(now, is_writing=is_writing)

    def saved(self, stall_s: float) -> None:
        """A save has just stopped training for so long, and is being written."""
        if self._auto is not None:
            self._auto.saved(stall_s)

    def resumed(self, resume_s: float) -> None:
        """Training goes on from a checkpoint, which took so long to load."""
        if self._auto is not None:
            self._auto.restarted(resume_s)

    def timings(self) -> dict[str, float]:
        """Times, in seconds, that the next save of the whole state records beside its own cost."""
        return {} if self._auto is None else self._auto.timings()

    def _tell(self) -> None:
        if self._auto is None:
            return
        text, plan = self._auto.news(), self._auto.plan
        if text is not None and plan is not None:
            self._emit("interval", text, interval_s=plan.interval_s, limit=plan.limit)


class ManagerChores:
    """Order of the chores of one manager."""

    def __init__(
        self,
        manager: exits.Finishes,
        owner: Ownership,
        housekeeper: Housekeeper,
        uploads: Uploads,
        tuning: Tuning,
    ) -> None:
        self._manager = manager
        self._owner = owner
        self._housekeeper = housekeeper
        self._uploads = uploads
        self._tuning = tuning

    def after_claim(self) -> None:
        """Remove what earlier writers left, read what the run has recorded, mend."""
        self._housekeeper.after_claim()
        self._tuning.after_claim()
        self._uploads.mend_now()

    def after_commit(self, entry: Entry) -> None:
        """Queue the upload of a new checkpoint before anything is deleted because of it."""
        self._tuning.after_commit(entry)
        self._uploads.committed()
        self._housekeeper.after_commit(entry)

    def after_failure(self) -> None:
        """Keep the manager until somebody is told; a later one of this process may have the run."""
        exits.hold(self._manager)
        self._owner.let_others_claim()
