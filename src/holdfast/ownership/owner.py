"""A manager's ownership of a run: claim it, send heartbeats, release it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from typing_extensions import override

from holdfast.errors import HoldfastError, StoreError
from holdfast.events import Emitter
from holdfast.ownership.claim import Choice, Claim, ClaimHeartbeat, check_owner, claim_run, held
from holdfast.root.documents import others_in
from holdfast.store.base import Store

END_S = 30.0
"""Default limit, in seconds, on the release of a claim."""
_LEAST_S = 1.0


def left_s(end: float) -> float:
    """Return the seconds until `end` on the monotonic clock, but at least one."""
    return max(end - time.monotonic(), _LEAST_S)


class Ownership:
    """Ownership of a run by one manager, with its claim and heartbeat."""

    def __init__(
        self,
        store: Store,
        *,
        takeover: bool,
        emit: Emitter,
        is_tiered: bool = False,
        above: int = 0,
    ) -> None:
        """Own nothing yet. `is_tiered` and `above` are as for `claim_run`."""
        self._store = store
        self._is_tiered, self._above = is_tiered, above
        self._takeover = takeover
        self._emit = emit
        self._heartbeat: ClaimHeartbeat | None = None
        self._sequence = 0
        self.claim: Claim | None = None
        self.has_committed = False
        """Whether this claim has committed a save from which the run would resume."""
        self.is_clean = True
        """Whether every put of this claim is known to have ended."""
        self.unclear: set[str] = set()
        """Folders of this claim whose register must stay: a repeat of its put may still arrive."""

    def expect_no_live_owner(self) -> None:
        """Raise `OwnedElsewhere` if a live process owns the run; writes nothing."""
        check_owner(self._store, takeover=self._takeover, emit=self._emit)

    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        """Claim the run, to continue from a chosen checkpoint; see `claim_run`.

        If that fails, an earlier claim of this manager is released too.
        """
        before = self._give_up()  # the new claim would make the earlier one lose ownership
        try:
            claim = self._claim_run(choices)
        finally:
            self._end_heartbeat(is_over=before is not None and self._may_close(), timeout_s=END_S)
        self._heartbeat = ClaimHeartbeat(self._store, claim, self._emit)
        # A manager that is dropped without being closed must not look alive for ever.
        weakref.finalize(self, self._heartbeat.ask_to_stop)
        weakref.finalize(self, held.discard, claim.nonce)
        held.add(claim.nonce)
        self.claim, self._sequence, self.has_committed = claim, 0, False
        self.is_clean, self.unclear = True, set()
        self._emit("claimed", f"{self._store.url}: writer {claim.epoch}", epoch=claim.epoch)
        if claim.epoch == 1:
            with suppress(StoreError):  # only for people
                if text := others_in(self._store):
                    self._emit("preflight", text)

    def adopt(self, claim: Claim) -> None:
        """Go by the leader's claim; only a follower does."""
        raise AssertionError("a leader claims")

    def next_sequence(self) -> int:
        """Return the number of the next save of this claim."""
        self._sequence += 1
        return self._sequence

    def release_run(self, timeout_s: float = END_S) -> None:
        """Release the run; the close is recorded if nothing is in flight."""
        claim = self._give_up()
        self._end_heartbeat(is_over=claim is not None and self._may_close(), timeout_s=timeout_s)

    def let_others_claim(self) -> None:
        """Let later managers of this process claim the run, even if this one is never closed."""
        if self.claim is not None:
            held.discard(self.claim.nonce)

    def _give_up(self) -> Claim | None:
        claim, self.claim = self.claim, None
        if claim is not None:
            held.discard(claim.nonce)
        return claim

    def _may_close(self) -> bool:
        return self.is_clean and not self.unclear

    def _claim_run(self, choices: Iterator[Choice]) -> Claim:
        return claim_run(
            self._store,
            choices,
            takeover=self._takeover,
            emit=self._emit,
            tiered=self._is_tiered,
            above=self._above,
        )

    def _end_heartbeat(self, *, is_over: bool, timeout_s: float) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        self._stop_heartbeat(heartbeat, is_over=is_over, timeout_s=timeout_s)

    def _stop_heartbeat(
        self, heartbeat: ClaimHeartbeat | None, *, is_over: bool, timeout_s: float, **where: Any
    ) -> None:
        if heartbeat is None:
            return
        try:
            heartbeat.stop_heartbeat(is_over=is_over, timeout_s=timeout_s)
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"giving the run up: {error}", **where)


class Following(Ownership):
    """A follower's copy of the leader's claim; it claims nothing and sends no heartbeat."""

    @override
    def expect_no_live_owner(self) -> None:
        """No-op: the leader checks."""

    @override
    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        raise AssertionError("only the leader claims")

    @override
    def adopt(self, claim: Claim) -> None:
        if self.claim != claim:
            self.claim, self._sequence, self.has_committed = claim, 0, False
