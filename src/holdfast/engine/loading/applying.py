"""From a search to a live state that is as a checkpoint says: claimed, applied, and whole.

Knows whether the live state is whole, which it is not after a load that failed half-way; what is
found, and how it is read, is the search's.
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
    """Fills the live state of one manager.

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

    def resume(self, search: Search) -> LoadCandidate | None:
        """Claim the run from what is found on, and apply it; None for a fresh start.

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
        """Apply what is found; where the run is owned, and all of it is wanted, the run goes on
        from there. Raises as `resume` does."""

        def choose() -> None:
            search()
            found = search.found
            if found is not None and found.options.is_full and self._owner.claim is not None:
                self._owner.take(Settled(found.entry, is_rollback=search.is_rollback))

        return self._apply_first(search, choose)

    def _apply_first(self, search: Search, choose: Callable[[], None]) -> LoadCandidate | None:
        """Apply what is chosen, until something can be applied whole."""
        try:
            while True:
                choose()
                if search.found is None or self._has_applied(search.found, search):
                    return search.found
        except MismatchError as error:
            if self.half_loaded is None:
                raise
            raise error.beside(self.half_loaded) from error

    def _has_applied(self, found: LoadCandidate, search: Search) -> bool:
        """Whether it was applied; False where another choice may serve."""
        try:
            self._apply(found)
        except OpaqueLoadFailed as error:
            goes_on = search.goes_on_after(error)
            search.announce(self._emit, reject=self._reject)  # under the claim that found it
            if not goes_on:
                raise
            return False
        return True

    def _apply(self, found: LoadCandidate) -> None:
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
