"""The claim that a manager holds: checking, taking, keeping alive, giving up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout

from holdfast.engine.claim import (
    Choice,
    Claim,
    Heartbeat,
    check_owner,
    claim_run,
    put_closed,
)
from holdfast.errors import HoldfastError
from holdfast.events import Emitter
from holdfast.store.base import Store


class Ownership:
    """One manager's side of the run's ownership."""

    def __init__(self, store: Store, *, takeover: bool, emit: Emitter) -> None:
        self._store = store
        self._takeover = takeover
        self._emit = emit
        self._heartbeat: Heartbeat | None = None
        self._sequence = 0
        self.claim: Claim | None = None
        self.has_committed = False
        """Whether this claim has a commit of its own from which the run would go on."""
        self.is_clean = True
        """Whether every put of this claim is known to have ended."""
        self.unclear: set[str] = set()
        """Folders of this claim whose register must stay: a copy of their put may still arrive."""

    def check(self) -> None:
        """Raise `OwnedElsewhere` when a live process has the run; writes nothing."""
        check_owner(self._store, takeover=self._takeover, emit=self._emit)

    def take(self, choose: Callable[[], Choice]) -> None:
        """Claim the run from the chosen checkpoint on; see `claim_run`.

        Raises:
            OwnedElsewhere: a live process owns the run.
        """
        before, self.claim = self.claim, None  # a claim of our own fences the one before off
        claim = self._claim(choose)
        self._stop_heartbeat()
        if before is not None and self._has_ended():
            self._record_close(before)
        self._heartbeat = Heartbeat(self._store, claim, self._emit)
        # A manager that is dropped without being closed must not look alive for ever.
        weakref.finalize(self, self._heartbeat.ask_to_stop)
        self.claim, self._sequence, self.has_committed = claim, 0, False
        self.is_clean, self.unclear = True, set()
        self._emit("claimed", f"{self._store.url}: writer {claim.epoch}", epoch=claim.epoch)

    def next_sequence(self) -> int:
        """The number of the next save of this claim."""
        self._sequence += 1
        return self._sequence

    def release(self) -> None:
        """Give the run up. The close is recorded only when nothing can be in flight."""
        claim, self.claim = self.claim, None
        self._stop_heartbeat()
        if claim is not None and self._has_ended():
            self._record_close(claim)

    def _has_ended(self) -> bool:
        return self.is_clean and not self.unclear

    def _claim(self, choose: Callable[[], Choice]) -> Claim:
        return claim_run(self._store, choose, takeover=self._takeover, emit=self._emit)

    def _record_close(self, claim: Claim) -> None:
        try:
            put_closed(self._store, claim)
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"recording the close: {error}")

    def _stop_heartbeat(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            self._end(heartbeat)

    def _end(self, heartbeat: Heartbeat) -> None:
        try:
            heartbeat.stop()
        except FutureTimeout:
            self._emit("housekeeping_failed", "the heartbeat hangs in the store")
