"""From a search to a live state that is as a checkpoint says: claimed, applied, and whole.

Knows whether the live state is whole, which it is not after a load that failed half-way; what is
found, and how it is read, is the search's.
"""

from __future__ import annotations

from holdfast.engine.claims.claim import settled_choice
from holdfast.engine.claims.notes import reject
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.loading.resume import Avoided, Candidate, PassedOver, Search
from holdfast.errors import ManagerUnusable, MismatchError, NotSealed
from holdfast.events import Emitter, Kind
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.store.base import Store


class Applying:
    """Fills the live state of one manager.

    Args:
        store: where marks are left on checkpoints that could not be used.
        owner: claims the run for what is applied.
        emit: is told what was not taken, and why.
    """

    def __init__(self, store: Store, owner: Ownership, emit: Emitter) -> None:
        self._store = store
        self._owner = owner
        self._emit = emit
        self._touched: set[str] = set()
        """Components that a load which failed may have filled in part."""
        self.half_loaded: str | None = None
        """Why the live state is neither the old one nor a stored one; None: it is whole."""

    def expect_whole(self, url: str) -> None:
        """Raise `ManagerUnusable` where the live state is half loaded."""
        if self.half_loaded is not None:
            raise ManagerUnusable(
                f"{url}: {self.half_loaded}; the state is half loaded. "
                "resume() or load() a whole checkpoint first"
            )

    def resume(self, search: Search) -> Candidate | None:
        """Claim the run from what is found on, and apply it; None for a fresh start.

        Raises:
            MismatchError: it does not fit, which was found before anything was changed.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            HoldfastError: what the search and the claim raise.
        """
        return self._apply_first(search, is_resume=True)

    def load(self, search: Search) -> Candidate | None:
        """Apply what is found; where the run is owned, and all of it is wanted, the run goes on
        from there. Raises as `resume` does."""
        return self._apply_first(search, is_resume=False)

    def _apply_first(self, search: Search, *, is_resume: bool) -> Candidate | None:
        """Apply what is chosen, until something can be applied whole."""
        try:
            while True:
                if is_resume:
                    self._owner.take(search.choices())
                    self._announce(search)
                    search.warn(self._emit)
                else:
                    self._choose_named(search)
                if search.found is None or self._has_applied(search.found, search):
                    return search.found
        except MismatchError as error:
            if self.half_loaded is None:
                raise
            raise error.beside(self.half_loaded) from error

    def _choose_named(self, search: Search) -> None:
        search.choose()
        found = search.found
        if found is not None and found.options.is_full and self._owner.claim is not None:
            self._owner.take(settled_choice(found.entry, is_rollback=search.is_rollback))

    def _announce(self, search: Search) -> None:
        """Log what was passed over and why, and mark what is damaged."""
        for folder, error in search.newly_passed_over():
            if not isinstance(error, PassedOver | NotSealed):
                self._reject(folder, str(error))
                continue
            kind: Kind = "warning" if isinstance(error, Avoided) else "passed_over"
            text = f"passed over {folder}: {error}"
            self._emit(kind, text, folder=folder, reason=str(error))

    def _reject(self, folder: str, reason: str) -> None:
        text = f"{folder} cannot be used: {reason}"
        self._emit("rejected", text, folder=folder, reason=reason)
        claim = self._owner.claim
        by = f"writer {claim.epoch}" if claim is not None else "a reader"
        try:
            reject(self._store, folder, by=by, reason=reason)
        except Exception as error:  # noqa: BLE001 - a mark that cannot be left stops no resume
            self._emit("housekeeping_failed", f"rejected mark: {error!r}")

    def _has_applied(self, found: Candidate, search: Search) -> bool:
        """Whether it was applied; False where another choice may serve."""
        try:
            self._apply(found)
        except OpaqueLoadFailed as error:
            goes_on = search.goes_on_after(error)
            self._announce(search)  # under the claim that found it
            if not goes_on:
                raise
            return False
        return True

    def _apply(self, found: Candidate) -> None:
        left = sorted(self._touched.intersection(found.one_sided.new))
        if left:
            raise MismatchError(
                f"{found.entry.folder} lacks {', '.join(left)}, which a damaged checkpoint has "
                "filled in part: it"
            )
        try:
            found.prepared.apply(found.tensors)
        except BaseException as error:
            self._touched |= {*found.prepared.needed}
            self.half_loaded = f"loading {found.entry.folder} was cut short by {error!r}"
            raise
        if found.options.is_full:
            self._touched.clear()
            self.half_loaded = None
