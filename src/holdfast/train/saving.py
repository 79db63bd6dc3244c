"""When the Trainer saves, and what it does when a save fails (docs/design.md, invariant 8)."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import SaveFailed

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import PendingSave
    from holdfast.manager import CheckpointManager
    from holdfast.train.callbacks import Callbacks, Metrics
    from holdfast.train.trainer import Trainer

logger = logging.getLogger("holdfast")

MAX_FAILURES_IN_A_ROW = 3


class Saver:
    """Saves at the ends of steps: warns when a save failed, tries again at the next step, and
    raises at the third failure in a row."""

    def __init__(
        self,
        manager: CheckpointManager,
        trainer: Trainer,
        callbacks: Callbacks,
        *,
        saved_step: int | None,
    ) -> None:
        self._manager = manager
        self._trainer = trainer
        self._callbacks = callbacks
        self._saved_step = saved_step
        self._under_way: list[PendingSave] = []
        self._num_failures = 0
        self._is_retry_due = False

    def after_step(self, metrics: Metrics) -> None:
        """Tell how earlier saves ended, and begin one if it is time for it."""
        self._look()
        with suppress(SaveFailed):  # of the save before, which the next look tells of
            self._begin(metrics)
        self._look()

    def finish(self, metrics: Metrics) -> None:
        """Return when the present step is durable. It is saved once, also when a trigger was due.

        Raises:
            SaveFailed: the third attempt in a row failed.
        """
        self._await()
        while self._saved_step != self._trainer.counters.step:
            self._save("final", metrics)
            self._await()

    def _begin(self, metrics: Metrics) -> None:
        if self._is_retry_due:
            self._save("interval", metrics)
            return
        now = self._trainer.counters
        pending = self._manager.maybe_save(
            now.step, epoch=now.epoch, samples=now.samples, tokens=now.tokens, metrics=metrics
        )
        if pending is not None:
            self._under_way.append(pending)

    def _save(self, reason: str, metrics: Metrics) -> None:
        now = self._trainer.counters
        pending = self._manager.save(
            now.step,
            epoch=now.epoch,
            samples=now.samples,
            tokens=now.tokens,
            metrics=metrics,
            reason=reason,
        )
        self._is_retry_due = False
        self._under_way.append(pending)

    def _await(self) -> None:
        with suppress(SaveFailed):
            # The manager's wait, because it has a deadline.
            self._manager.wait()
        self._look()

    def _look(self) -> None:
        """Tell of the saves that have ended; an owner's error is raised as it is."""
        while self._under_way and self._under_way[0].done():
            try:
                checkpoint = self._under_way.pop(0).wait()
            except SaveFailed as error:
                self._failed(error)
                continue
            self._num_failures = 0
            self._saved_step = checkpoint.step
            self._callbacks.checkpoint_saved(self._trainer, checkpoint)

    def _failed(self, error: SaveFailed) -> None:
        self._num_failures += 1
        self._is_retry_due = True
        self._callbacks.checkpoint_failed(self._trainer, error)
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.warning(
            "%s (failure %d in a row; tried again after the next step, raised at failure %d)",
            error,
            self._num_failures,
            MAX_FAILURES_IN_A_ROW,
        )
