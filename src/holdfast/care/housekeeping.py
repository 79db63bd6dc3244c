"""What follows a commit or a claim, and must never stop training (invariant 8)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from holdfast.care.gc import collect
from holdfast.care.retention import Deleter
from holdfast.engine.claims.claim import Claim
from holdfast.engine.claims.notes import reject
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.roots.commit import name_latest
from holdfast.errors import HoldfastError, Superseded
from holdfast.events import Emitter
from holdfast.policy.retention import Rule
from holdfast.store.base import Store


class Owner(Protocol):
    """Whose chores these are: one side of the ownership of a run."""

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


def never_held(entry: Entry) -> str:
    """For a root of which nothing waits for anybody."""
    return ""


class Housekeeper:
    """Does the chores of one manager; what goes wrong is told, and tried again next time."""

    def __init__(
        self,
        store: Store,
        owner: Owner,
        rule: Rule,
        emit: Emitter,
        *,
        replaces: bool = False,
        is_sent_to: bool = True,
        held: Callable[[Entry], str] = never_held,
        spared: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """With `replaces` a checkpoint takes the place of older ones of its step. `is_sent_to`:
        whether the root may be the remote tier of a run, where senders put manifests. `held` says
        why something must not be deleted yet; `spared` are folders that gc leaves alone."""
        self._spared = spared
        self._is_sent_to = is_sent_to
        self._lock = threading.Lock()
        self._store = store
        self._owner = owner
        self._emit = emit
        self._deleter = Deleter(
            store,
            rule,
            replaces=replaces,
            is_sent_to=is_sent_to,
            retracted=self._tell_retracted,
            thinned=self._tell_thinned,
            failed=self._tell_failed,
            postponed=self._tell_postponed,
            held=held,
            unread=self._tell_unread,
            missing=self._tell_missing,
        )

    def after_commit(self, entry: Entry) -> None:
        """Move `latest`, if a run would go on from this one, then delete what the rule drops."""
        if not entry.manifest.lacks:
            self._try("latest", partial(self._point_latest, entry))
        self.retain()

    def retain(self) -> None:
        """Delete what the rule drops. From any thread."""
        with self._lock:
            self._try("retention", self._retain)

    def after_claim(self) -> None:
        """Remove what earlier writers left unfinished."""
        self._try("gc", self._collect)

    def trust(self, entry: Entry) -> None:
        """A load has read every byte of this one."""
        self._deleter.trust(entry)

    def reject(self, folder: str, reason: str) -> None:
        """Leave a mark on a checkpoint that could not be used."""
        self._emit("rejected", f"{folder} cannot be used: {reason}", folder=folder, reason=reason)
        claim = self._owner.claim
        by = f"writer {claim.epoch}" if claim is not None else "a reader"
        self._try("rejected mark", partial(reject, self._store, folder, by=by, reason=reason))

    def _point_latest(self, entry: Entry) -> None:
        latest = Catalog(self._store).latest() if entry.manifest.unhealthy else entry
        if latest is None or latest.folder != entry.folder:
            return
        name_latest(self._store, entry.folder)

    def _retain(self) -> None:
        claim = self._owner.claim
        if claim is not None:
            self._deleter.carry_out(
                claim, has_committed=self._owner.has_committed, unclear=self._owner.unclear
            )

    def _collect(self) -> None:
        claim = self._owner.claim
        own_epoch = claim.epoch if claim is not None else None
        report = collect(
            self._store,
            own_epoch=own_epoch,
            spared=self._spared(),
            is_sent_to=self._is_sent_to,
            emit=self._emit,
        )
        for folder, why in report.removed:
            self._emit("gc", f"removed {folder}: {why}", folder=folder)
        for folder, why in report.failed:
            self._emit("housekeeping_failed", f"gc of {folder}: {why}", folder=folder)

    def _tell_retracted(self, entry: Entry, why: str) -> None:
        self._emit(
            "retracted", f"deleted {entry.folder}: {why}", step=entry.step, folder=entry.folder
        )

    def _tell_thinned(self, entry: Entry, components: tuple[str, ...], why: str) -> None:
        self._emit(
            "thinned",
            f"dropped {', '.join(components)} of {entry.folder}: {why}",
            step=entry.step,
            folder=entry.folder,
            components=components,
        )

    def _tell_failed(self, entry: Entry, error: HoldfastError) -> None:
        self._emit("housekeeping_failed", f"retention of {entry.folder}: {error}", step=entry.step)

    def _tell_postponed(self, entry: Entry, why: str) -> None:
        self._emit(
            "postponed",
            f"{entry.folder} is deleted or thinned later: {why}",
            step=entry.step,
            folder=entry.folder,
        )

    def _tell_unread(self, folder: str, error: HoldfastError) -> None:
        self._emit(
            "warning",
            f"{folder} stays, whatever the rule says, because it cannot be read: {error}",
            folder=folder,
        )

    def _tell_missing(self, rule: str, what: str) -> None:
        self._emit(
            "warning",
            f"the rule {rule!r} needs {what}, which no checkpoint has. It keeps everything until "
            "one has: correct the rule, or pass the missing value to a save",
        )

    def _try(self, what: str, job: Callable[[], None]) -> None:
        try:
            job()
        except Superseded as error:
            self._emit("warning", f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - also a fault in a user's rule (invariant 8)
            self._emit("housekeeping_failed", f"{what}: {error!r}")
