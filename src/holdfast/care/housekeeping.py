"""Retention and garbage collection after a commit or claim; errors are logged (invariant 8)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from holdfast.care.gc import collect
from holdfast.care.retention import Deleter, RetentionEvent, Waiting
from holdfast.engine.claims.claim import Claim
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.roots.commit import name_latest
from holdfast.errors import Superseded
from holdfast.events import Emitter
from holdfast.policy.rule import Rule
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
        """Delete nothing yet. With `replaces` a checkpoint replaces older ones of its step.
        `is_sent_to`: whether the root may be the remote tier of a run, where uploads put manifests.
        `waiting` says what must not be deleted yet."""
        self._is_sent_to = is_sent_to
        self._lock = threading.Lock()
        self._store = store
        self._owner = owner
        self._emit = emit
        self._deleter = Deleter(
            store, rule, self._tell, replaces=replaces, is_sent_to=is_sent_to, waiting=waiting
        )

    def after_commit(self, entry: Entry) -> None:
        """Point `latest` to a new checkpoint if a run would resume from it, then run retention."""
        if not entry.manifest.lacks:
            with self._trying("latest"):
                self._point_latest(entry)
        self.retain()

    def retain(self) -> None:
        """Delete what the retention rule does not keep. Thread-safe."""
        with self._lock, self._trying("retention"):
            self._retain()

    def after_claim(self, *, spared: Collection[str] = ()) -> None:
        """Remove what earlier writers left unfinished, except in the `spared` folders."""
        with self._trying("gc"):
            self._collect(spared)

    def trust(self, entry: Entry) -> None:
        """Mark a checkpoint as verified: the caller has read every byte and found it right."""
        self._deleter.trust(entry)

    def _point_latest(self, entry: Entry) -> None:
        latest = Catalog(self._store).latest() if entry.manifest.unhealthy else entry
        if latest is None or latest.folder != entry.folder:
            return
        name_latest(self._store, entry.folder)

    def _retain(self) -> None:
        claim = self._owner.claim
        if claim is None:
            return
        owner = self._owner
        self._deleter.carry_out(claim, has_committed=owner.has_committed, unclear=owner.unclear)

    def _collect(self, spared: Collection[str]) -> None:
        claim = self._owner.claim
        own_epoch = claim.epoch if claim is not None else None
        report = collect(
            self._store,
            own_epoch=own_epoch,
            spared=spared,
            is_sent_to=self._is_sent_to,
            emit=self._emit,
        )
        for folder, why in report.removed:
            self._emit("gc", f"removed {folder}: {why}", folder=folder)
        for folder, why in report.failed:
            self._emit("housekeeping_failed", f"gc of {folder}: {why}", folder=folder)

    def _tell(self, event: RetentionEvent) -> None:
        subject, step, why = event.subject, event.step, event.why
        match event.kind:
            case "retracted":
                text = f"deleted {subject}: {why}"
                self._emit("retracted", text, step=step, folder=subject)
            case "thinned":
                parts = event.components
                text = f"dropped {', '.join(parts)} of {subject}: {why}"
                self._emit("thinned", text, step=step, folder=subject, components=parts)
            case "postponed":
                text = f"{subject} is deleted or thinned later: {why}"
                self._emit("postponed", text, step=step, folder=subject)
            case "failed":
                self._emit("housekeeping_failed", f"retention of {subject}: {why}", step=step)
            case "unread":
                text = f"{subject} stays, whatever the rule says, because it cannot be read: {why}"
                self._emit("warning", text, folder=subject)
            case "unmet":
                self._emit(
                    "warning",
                    f"the rule {subject!r} needs {why}, which no checkpoint has. It keeps "
                    "everything until one has: correct the rule, or pass the missing value to a "
                    "save",
                )

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Log an error of the `with` block instead of raising it."""
        try:
            yield
        except Superseded as error:
            self._emit("warning", f"{what}: {error}")
        except Exception as error:  # noqa: BLE001 - also a fault in a user's rule (invariant 8)
            self._emit("housekeeping_failed", f"{what}: {error!r}")
