"""Maintenance that a manager does after its claims and saves, in the thread that saves."""

from __future__ import annotations

from holdfast.care.housekeeping import Housekeeper
from holdfast.care.tuning import Tuning
from holdfast.care.uploads import Uploads
from holdfast.engine.claims.owner import Ownership
from holdfast.engine.control import exits
from holdfast.engine.roots.catalog import Entry


class ManagerChores:
    """Calls a manager's maintenance tasks (retention, tuning, uploads) in the right order."""

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
        """Remove leftovers of earlier writers, read recorded costs, repair damaged checkpoints."""
        self._housekeeper.after_claim()
        self._tuning.after_claim()
        self._uploads.mend_now()

    def after_commit(self, entry: Entry) -> None:
        """Queue the upload of a new checkpoint before anything is deleted because of it."""
        self._tuning.after_commit(entry)
        self._uploads.committed()
        self._housekeeper.after_commit(entry)

    def after_failure(self) -> None:
        """Keep the manager until its failure is raised; let later managers claim the run."""
        exits.hold(self._manager)
        self._owner.let_others_claim()
