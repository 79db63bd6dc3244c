"""The claim that a manager holds: checking, taking, keeping alive, giving up."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeout

from holdfast.engine.catalog import Entry
from holdfast.engine.claim import Claim, Heartbeat, check_owner, put_claim, put_closed
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
        """Whether this claim has a commit of its own."""
        self.is_clean = True
        """Whether every put of this claim is known to have ended."""

    def check(self) -> None:
        """Raise `OwnedElsewhere` when a live process has the run; writes nothing."""
        check_owner(self._store, takeover=self._takeover, emit=self._emit)

    def take(self, entry: Entry | None) -> bool:
        """Claim the run from `entry` on; False when that checkpoint went away meanwhile.

        Raises:
            OwnedElsewhere: somebody else was faster.
        """
        claim = put_claim(
            self._store,
            resumed_from=entry.reference if entry is not None else None,
            takeover=self._takeover,
            emit=self._emit,
        )
        if claim is None:
            return False
        self._stop_heartbeat()
        self._heartbeat = Heartbeat(self._store, claim, self._emit)
        self.claim, self._sequence, self.has_committed = claim, 0, False
        self._emit("claimed", f"{self._store.url}: writer {claim.epoch}", epoch=claim.epoch)
        return True

    def next_sequence(self) -> int:
        """The number of the next save of this claim."""
        self._sequence += 1
        return self._sequence

    def release(self) -> None:
        """Give the run up. The close is recorded only when nothing can be in flight."""
        claim, self.claim = self.claim, None
        self._stop_heartbeat()
        if claim is None or not self.is_clean:
            return
        try:
            put_closed(self._store, claim)
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"recording the close: {error}")

    def _stop_heartbeat(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return
        try:
            heartbeat.stop()
        except FutureTimeout:
            self._emit("housekeeping_failed", "the heartbeat hangs in the store")
