"""How a `fit` resumes: from the newest checkpoint, from one that was named, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.errors import NoCheckpoint, UsageError
from holdfast.manager import CheckpointManager
from holdfast.results import Checkpoint
from holdfast.train.fit.starting import StartingPoint

logger = logging.getLogger("holdfast")

_NEWEST = ("if_available", "always")


@dataclass(frozen=True, slots=True)
class Resuming:
    """Arguments of `fit` about its resume."""

    how: str | int = "if_available"
    """"if_available", "always", "never", or the name of a checkpoint of the root."""
    strict: bool = True
    override: Collection[str] = ()

    def check_resume_arguments(self, start: StartingPoint | None, *, has_root: bool) -> None:
        """Check them before anything is read."""
        is_named = self.how not in (*_NEWEST, "never")
        if is_named and start is not None:
            raise UsageError(
                f"resume={self.how!r} and start_from name two checkpoints: one of this root, one "
                "of another. Leave one of the arguments out"
            )
        if not has_root and (is_named or (self.how == "always" and start is None)):
            raise UsageError(f"resume={self.how!r}: this Trainer has no root (checkpoints=None)")

    def resume_or_roll_back(
        self, manager: CheckpointManager, *, can_start: bool
    ) -> Checkpoint | None:
        """Resume from the newest checkpoint, or roll the run back to the named one.

        `can_start`: whether the run may start elsewhere, so that no checkpoint is required.
        """
        if self.how in _NEWEST:
            required = self.how == "always" and not can_start
            return manager.resume(strict=self.strict, override=self.override, required=required)
        newest = manager.list()[:1]
        try:
            found = manager.resume(self.how, strict=self.strict, override=self.override)
        except NoCheckpoint as error:
            raise NoCheckpoint(
                f'resume={self.how!r} is neither "if_available", "always" nor "never", so it names '
                f"a checkpoint: {error}"
            ) from error
        if found is not None and newest and newest[0].folder != found.folder:
            logger.warning(
                "resume=%r: the run is rolled back from step %d to step %d. Each start of this "
                "script rolls it back again: drop the argument to resume from newer checkpoints",
                self.how,
                newest[0].step,
                found.step,
            )
        return found
