"""Loads the checkpoint that a search chose into the live state, under a claim of the run.

Knows whether the live state is whole, which it is not after a load that failed half-way, and which
settings of the script were replaced. The search decides which checkpoint is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.errors import MismatchError, NotSealed
from holdfast.events import Emitter, Kind
from holdfast.loading.search import CheckpointSearch, LoadCandidate, PassedOver, Search
from holdfast.ownership.annotations import reject
from holdfast.ownership.claim import settled_choice
from holdfast.ownership.owner import Ownership
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.store.base import Store


class CheckpointApplier:
    """Loads checkpoints into the live state of one manager, whose `owner` claims the run."""

    is_sharing = False
    """Whether ranks read blocks for each other, which needs fresh memory."""

    def __init__(self, store: Store, owner: Ownership, emit: Emitter) -> None:
        self._store = store
        self._owner = owner
        self._emit = emit
        self._touched: set[str] = set()
        """Components that a failed load may have partly overwritten."""
        self.half_loaded: str | None = None
        """Why the live state is partly old and partly stored; None: it is whole."""

    def make_search(self, **parts: Any) -> CheckpointSearch:
        """Make a `CheckpointSearch` of these parts."""
        return CheckpointSearch(**parts)

    @contextmanager
    def counted_load(self, method: str, arguments: Mapping[str, str]) -> Iterator[None]:
        """Count the load in the `with` block, with several ranks, and keep what was called."""
        yield

    def apply_checkpoint(self, search: Search, *, claims: bool) -> LoadCandidate | None:
        """Choose and apply a checkpoint, another if that fails; return it, or None to start anew.

        A resume `claims` the run, to continue from the chosen checkpoint. A load does so only if
        this manager owns the run and everything is loaded.
        """
        try:
            while True:
                if claims:
                    self._owner.claim_ownership(search.choices())
                    self._emit_skipped(search)
                    search.log_problems(self._emit)
                else:
                    self._choose_named(search)
                if search.candidate is None or self._try_apply(search.candidate, search):
                    return search.candidate
        except MismatchError as error:
            if self.half_loaded is None:
                raise
            raise error.beside(self.half_loaded) from error

    def _choose_named(self, search: Search) -> None:
        search.choose()
        chosen = search.candidate
        if chosen is not None and chosen.options.is_full and self._owner.claim is not None:
            self._owner.claim_ownership(
                settled_choice(chosen.entry, is_rollback=search.is_rollback)
            )

    def _emit_skipped(self, search: Search) -> None:
        """Emit events for the skipped checkpoints with the reasons, and mark damaged ones."""
        for folder, error in search.newly_passed_over():
            if not isinstance(error, PassedOver | NotSealed):
                self._reject(folder, str(error))
                continue
            is_warned = isinstance(error, PassedOver) and error.is_warned
            kind: Kind = "warning" if is_warned else "passed_over"
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

    def _try_apply(self, candidate: LoadCandidate, search: Search) -> bool:
        """Apply a checkpoint; False if that failed and the caller should choose again."""
        try:
            self._apply_candidate(candidate)
        except OpaqueLoadFailed as error:
            may_retry = search.record_failure(error)
            self._emit_skipped(search)  # under the claim that found it
            if not may_retry:
                raise
            return False
        return True

    def _apply_candidate(self, candidate: LoadCandidate) -> None:
        left = sorted(self._touched.intersection(candidate.one_sided.new))
        if left:
            raise MismatchError(
                f"{candidate.entry.folder} lacks {', '.join(left)}, which a damaged checkpoint has "
                "filled in part: it"
            )
        try:
            candidate.prepared.apply_values(candidate.tensors)
        except BaseException as error:
            # Any exception, even an interrupt: some tensors may be new, others old.
            self._touched |= {*candidate.prepared.needed}
            self.half_loaded = f"loading {candidate.entry.folder} was cut short by {error!r}"
            raise
        if candidate.options.is_full:
            self._touched.clear()
            self.half_loaded = None
