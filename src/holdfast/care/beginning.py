"""Checks before a manager's first save: no accidental restart, enough space, and the claim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from holdfast.care.preflight import preflight
from holdfast.engine.claims.claim import Choice, settled_choice
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.claims.process import utc_now
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.tiers.claims import TieredOwnership
from holdfast.engine.tiers.tiered import Rules
from holdfast.errors import StoreError, UsageError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.policy.rule import Rule
from holdfast.store.base import Store

if TYPE_CHECKING:
    from holdfast.state.capture import Captured

_CLOCK_SKEW_S = 60.0
"""Difference between the clocks of two hosts for which no warning is logged, in seconds."""


class Beginning:
    """Checks whether a run may begin to save, and claims the run."""

    def __init__(
        self, catalog: Catalog, owner: Ownership, rules: Rules, emit: Emitter, *, preflight: bool
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._owner = owner
        self._rules = rules
        self._emit = emit
        self.preflight_due = preflight
        """Whether the next save must first check space and permissions."""
        self._has_compared_clocks = False

    def expect(self, captured: Captured, standing: Entry | None, *, is_rollback: bool) -> None:
        """Check that a save can be made, and claim the run if it is not claimed yet.

        Raises:
            OwnedElsewhere: a live process owns the run.
            UsageError: the root holds a run that was neither resumed nor loaded.
            PreflightFailed: a save would fail.
        """
        if self._owner.claim is None:
            self._owner.check()
            self._refuse_accidental_restart(standing)
        if self.preflight_due:
            self._check_room(captured, self._store, self._rules.local)
            if isinstance(self._owner, TieredOwnership):
                self._check_remote(captured, self._owner)
            self.preflight_due = False
        if self._owner.claim is None:
            self._owner.take(
                settled_choice(standing, is_rollback=is_rollback)
                if standing is not None
                else self._fresh_starts()
            )

    def refuse_existing(self, step: int, standing: Entry | None) -> None:
        """Raise `UsageError` if a checkpoint of this step exists, in any lineage.

        Exempt are `standing`, the run's latest, which may turn out to be unchanged, and parts that
        another saver has saved at this step.
        """
        if standing is not None and standing.step == step:
            return
        found = [entry for entry in self._catalog.checkpoints() if entry.step == step]
        there = [entry.folder for entry in found if not self._is_part_of_this_pass(entry)]
        if there:
            raise UsageError(
                f'{self._store.url}: on_existing="error", and there is a checkpoint of step '
                f"{step} already: {', '.join(there)}"
            )

    def refuse_later(self, standing: Entry | None) -> None:
        """Raise `UsageError` if the root has checkpoints of later steps than `standing`.

        With `on_existing="error"` the saves of these steps would be refused, hours later.
        """
        step = -1 if standing is None else standing.step
        whole = (e for e in self._catalog.checkpoints() if not e.manifest.lacks)
        later = sorted({entry.step for entry in whole if entry.step > step})
        if later:
            shown = ", ".join(map(str, later[:10])) + (", …" if len(later) > 10 else "")
            raise UsageError(
                f'{self._store.url}: on_existing="error", and the run is to go on from '
                f"{standing.folder if standing else 'its beginning'}, where there are checkpoints "
                f'of the steps {shown} already. Pass on_existing="keep" or "replace", or use '
                "another root"
            )

    def look_around(self) -> None:
        """Warn if this root, which has no checkpoint, directly contains the root of a run."""
        if not self._store.has_folders:
            return
        folders = [name[:-1] for name in self._store.children() if name.endswith("/")]
        for name in folders:
            is_ours = name in layout.FOLDERS or layout.parse_attempt(name) is not None
            # A link, or a folder that may not be read, is no reason to stop a run.
            with suppress(StoreError):
                if not is_ours and f"{layout.WRITERS}/" in self._store.children(name):
                    self._emit(
                        "warning",
                        f"{self._store.url}: no checkpoint is here, and {name!r} in it holds a "
                        f"run: was {self._store.url}/{name} meant?",
                    )

    def compare_clocks(self, standing: Entry | None) -> None:
        """Warn, once, if this host's clock is behind the time at which `standing` was saved."""
        if standing is None or self._has_compared_clocks:
            return
        now = utc_now()
        if _seconds_between(now, standing.manifest.created) > _CLOCK_SKEW_S:
            self._has_compared_clocks = True
            self._emit(
                "warning",
                f"the clock of this host says {now}, but {standing.folder} was saved at "
                f"{standing.manifest.created}: one of them is wrong. Hourly() and Daily() go by "
                "these times; nothing else does",
            )

    def _is_part_of_this_pass(self, entry: Entry) -> bool:
        """Whether a checkpoint is a part of the state that another saver of this process saved."""
        claim = self._owner.claim
        is_ours = claim is not None and entry.name.epoch == claim.epoch
        return is_ours and bool(entry.manifest.lacks)

    def _fresh_starts(self) -> Iterator[Choice]:
        while True:
            self._refuse_accidental_restart(None)
            self.look_around()
            yield Choice(point=None)

    def _refuse_accidental_restart(self, standing: Entry | None) -> None:
        """Raise `UsageError` on a fresh start where retention would then delete checkpoints."""
        if standing is None and self._catalog.ever_committed():
            raise UsageError(
                f"{self._store.url} holds the checkpoints of a run. Call resume() to go on with "
                "it, load() one of them whole to start from there (part of one is not enough), or "
                "give this run a root of its own"
            )

    def _check_remote(self, captured: Captured, owner: TieredOwnership) -> None:
        remote = owner.catalog.remote.store
        try:
            remote.children()
        except StoreError:
            return  # the claim reports that it is unreachable, and the first upload the rest
        with owner.remote_scratch():
            self._check_room(captured, remote, self._rules.remote)

    def _check_room(self, captured: Captured, store: Store, keep: Rule) -> None:
        specs = [spec for part in captured.components.values() for spec in part.specs]
        trees = sum(len(part.tree) for part in captured.components.values())
        chosen = preflight(
            store,
            nbytes_per_save=sum(spec.nbytes for spec in specs) + 2 * trees + 200 * len(specs),
            saves_kept=keep.quota(),
            num_files=2 * len(captured.components) + 2,
        )
        if chosen is not None:
            self._emit("preflight", f"{store.url}: large files are written {chosen}")


def _seconds_between(first: str, second: str) -> float:
    """Compute the seconds from one recorded time to another; 0 if one cannot be parsed."""
    try:
        between = datetime.fromisoformat(second) - datetime.fromisoformat(first)
    except (ValueError, TypeError):
        return 0.0
    return between.total_seconds()
