"""Feeds `every="auto"` with measurements: recorded ones of the root, and new ones of this process.

Owns when and in which thread they are passed; `holdfast.policy.auto` computes the interval.
"""

from __future__ import annotations

from holdfast.care.advise import gather
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.roots.catalog import Entry
from holdfast.errors import HoldfastError
from holdfast.events import Emitter
from holdfast.format.manifest import Timestamp
from holdfast.policy.auto import Auto
from holdfast.policy.costs import SaveCost
from holdfast.store.base import Store


class Tuning:
    """Passes one manager's measured costs to its `Auto`; without one, all methods are no-ops."""

    def __init__(self, store: Store, owner: Ownership, emit: Emitter, auto: Auto | None) -> None:
        self._store = store
        self._owner = owner
        self._emit = emit
        self._auto = auto
        self._learnt_epoch: int | None = None
        self._last_id = ""

    # In the background

    def after_claim(self) -> None:
        """Read the recorded costs of the run, once per claim, from all manifests and claims."""
        claim = self._owner.claim
        if self._auto is None or claim is None:
            return
        try:
            history = gather(self._store).history
        except HoldfastError as error:
            # The next commit retries; until then only costs measured by this process count.
            self._emit("housekeeping_failed", f'every="auto" cannot read the record: {error}')
            return
        self._auto.learn(history)
        self._learnt_epoch = claim.epoch
        self._tell()

    def after_commit(self, entry: Entry) -> None:
        """Pass on the cost of a new checkpoint, unless an unchanged save returned an old one."""
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

    # In the training thread

    def look(self, now: Timestamp, *, is_writing: bool) -> None:
        """Pass on that training is at `now`; `is_writing`: the newest save is not committed yet."""
        if self._auto is not None:
            self._auto.look(now, is_writing=is_writing)

    def saved(self, stall_s: float) -> None:
        """Pass on that a save has just stopped training for `stall_s`, and is being written."""
        if self._auto is not None:
            self._auto.saved(stall_s)

    def resumed(self, resume_s: float) -> None:
        """Pass on that training resumed from a checkpoint, and that this took `resume_s`."""
        if self._auto is not None:
            self._auto.restarted(resume_s)

    def timings(self) -> dict[str, float]:
        """Return timings, in seconds, that the next whole save records beside its own cost."""
        return {} if self._auto is None else self._auto.timings()

    def _tell(self) -> None:
        if self._auto is None:
            return
        text, plan = self._auto.news(), self._auto.plan
        if text is not None and plan is not None:
            self._emit("interval", text, interval_s=plan.interval_s, limit=plan.limit)
