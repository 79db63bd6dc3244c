"""Chores of a manager after its saves and claims, in the thread that saves."""

from __future__ import annotations

from holdfast.care.housekeeping import Housekeeper
from holdfast.care.tuning import Tuning
from holdfast.care.uploads import Uploads
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.control import exits
from holdfast.engine.roots.catalog import Entry


class ManagerChores:
    """Order of the chores of one manager."""

    def __init__(
        self,
        manager: exits.Finishes,
        owner: Ownership,
        housekeeper: Housekeeper,
        uploads: Uploads,
        tuning: Tuning,
    ) -> None:
        self._manager = manager
        self._owner = owner
        self._housekeeper = housekeeper
        self._uploads = uploads
        self._tuning = tuning

    def after_claim(self) -> None:
        """Remove what earlier writers left, read what the run has recorded, mend."""
        self._housekeeper.after_claim()
        self._tuning.after_claim()
        self._uploads.mend_now()

    def after_commit(self, entry: Entry) -> None:
        """Queue the upload of a new checkpoint before anything is deleted because of it."""
        self._tuning.after_commit(entry)
        self._uploads.committed()
        self._housekeeper.after_commit(entry)

    def after_failure(self) -> None:
        """Keep the manager until somebody is told; a later one of this process may have the run."""
        exits.hold(self._manager)
        self._owner.let_others_claim()
