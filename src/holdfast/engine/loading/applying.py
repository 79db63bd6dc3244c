"""Applies the checkpoint that a search chose to the live state, under a claim of the run.

Knows whether the live state is whole, which it is not after a load that failed half-way. Which
checkpoint is chosen, and how it is read, is up to the search.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.claims.claim import Settled
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.loading.resume import LoadCandidate, Search
from holdfast.errors import ManagerUnusable, MismatchError
from holdfast.events import Emitter
from holdfast.state.apply import OpaqueLoadFailed


class Applying:
    """Applies checkpoints to the live state of one manager.

    Args:
        owner: claims the run for what is applied.
        emit: is told what was not taken, and why.
        reject: leaves a mark, with a reason, on a folder that could not be used.
    """

    def __init__(
        self, owner: Ownership, emit: Emitter, *, reject: Callable[[str, str], None]
    ) -> None:
        self._owner = owner
        self._emit = emit
        self._reject = reject
        self._touched: set[str] = set()
        """Components that a failed load may have filled in part."""
        self.half_loaded: str | None = None
        """Why the live state is neither the old one nor a stored one; None: it is whole."""

    def expect_whole(self, url: str) -> None:
        """Raise `ManagerUnusable` where the live state is half loaded."""
        if self.half_loaded is not None:
            raise ManagerUnusable(
                f"{url}: {self.half_loaded}; the state is half loaded. "
                "resume() or load() a whole checkpoint first"
            )

    def resume(self, search: Search) -> LoadCandidate | None:
        """Claim the run from the chosen checkpoint on, and apply it; None for a fresh start.

        Raises:
            MismatchError: it does not fit, which was found before anything was changed.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            HoldfastError: what the search and the claim raise.
        """

        def choose() -> None:
            self._owner.take(search)
            search.announce(self._emit, reject=self._reject)
            search.warn(self._emit)

        return self._apply_first(search, choose)

    def load(self, search: Search) -> LoadCandidate | None:
        """Apply the chosen checkpoint; the run goes on from it where it is owned and all is loaded.

        Raises as `resume` does.
        """

        def choose() -> None:
            search()
            candidate = search.candidate
            if (
                candidate is not None
                and candidate.options.is_full
                and self._owner.claim is not None
            ):
                self._owner.take(Settled(candidate.entry, is_rollback=search.is_rollback))

        return self._apply_first(search, choose)

    def _apply_first(self, search: Search, choose: Callable[[], None]) -> LoadCandidate | None:
        """Choose and apply, until a checkpoint was applied whole."""
        try:
            while True:
                choose()
                if search.candidate is None or self._has_applied(search.candidate, search):
                    return search.candidate
        except MismatchError as error:
            if self.half_loaded is None:
                raise
            raise error.beside(self.half_loaded) from error

    def _has_applied(self, candidate: LoadCandidate, search: Search) -> bool:
        """Apply a checkpoint; False where that failed and another choice may serve."""
        try:
            self._apply(candidate)
        except OpaqueLoadFailed as error:
            goes_on = search.goes_on_after(error)
            search.announce(self._emit, reject=self._reject)  # under the claim that found it
            if not goes_on:
                raise
            return False
        return True

    def _apply(self, candidate: LoadCandidate) -> None:
        left = sorted(self._touched.intersection(candidate.one_sided.new))
        if left:
            raise MismatchError(
                f"{candidate.entry.folder} lacks {', '.join(left)}, which a damaged checkpoint has "
                "filled in part: it"
            )
        try:
            candidate.prepared.apply(candidate.tensors)
        except BaseException as error:
            # Of any kind, an interrupt too: some tensors may be new, others old.
            self._touched |= {*candidate.prepared.needed}
            self.half_loaded = f"loading {candidate.entry.folder} was cut short by {error!r}"
            raise
        if candidate.options.is_full:
            self._touched.clear()
            self.half_loaded = None
