"""When the Trainer saves, and what it does when a save fails (docs/design.md, invariant 8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast.engine.checkpoint import PendingSave
from holdfast.errors import SaveFailed
from holdfast.events import Event as Told
from holdfast.manager import CheckpointManager
from holdfast.policy.triggers import Event
from holdfast.train.callbacks import Callbacks
from holdfast.train.counters import Counters
from holdfast.train.health import UnhealthyState
from holdfast.train.hooks import Callback
from holdfast.train.training import Metrics

logger = logging.getLogger("holdfast")

MAX_FAILURES_IN_A_ROW = 3

BeforeSave = Callable[[int, Mapping[str, float]], None]


class TrainingManager(CheckpointManager):
    """A manager that lets the training prepare itself before each save, whoever asks for it."""

    before_save: BeforeSave | None = None
    """Called with the step and the metrics; what it raises keeps the save from being made."""

    def save(self, step: int, **options: Any) -> PendingSave:
        """As for any manager."""
        if self.before_save is not None:
            self.before_save(step, options.get("metrics") or {})
        return super().save(step, **options)


class SaveCosts:
    """What saves cost: a sink that remembers how long they took in the background."""

    def __init__(self) -> None:
        self._durations_s: dict[int, float] = {}

    def __call__(self, event: Told) -> None:
        """Receive an event of the manager, on whatever thread."""
        if event.kind == "committed" and event.step is not None:
            self._durations_s[event.step] = event.fields["save_s"]

    def of(self, pending: PendingSave, nbytes: int) -> dict[str, float]:
        """The metrics of a save that is durable; forgets those of earlier steps."""
        for step in list(self._durations_s):
            if step < pending.step:
                del self._durations_s[step]
        return {
            "save/stall_s": pending.stall_s,
            "save/duration_s": self._durations_s[pending.step],
            "save/nbytes": float(nbytes),
        }


class Saver:
    """Saves at the ends of steps: warns when a save failed, tries again at the next step, and
    raises at the third failure in a row."""

    def __init__(
        self,
        manager: CheckpointManager,
        counters: Counters,
        callbacks: Callbacks,
        costs: SaveCosts,
        *,
        saved_step: int | None,
        skip_unhealthy: bool,
    ) -> None:
        self._manager = manager
        self._counters = counters
        self._callbacks = callbacks
        self._costs = costs
        self._saved_step = saved_step
        self._skip_unhealthy = skip_unhealthy
        self._under_way: list[PendingSave] = []
        self._num_failures = 0
        self._is_retry_due = False

    def at(self, events: Sequence[Event], metrics: Metrics) -> None:
        """Tell how earlier saves ended, and begin one if one of the events asks for it.

        Raises:
            UnhealthyState: the state is not to be saved, and not to be passed over either.
        """
        self._look()
        with suppress(SaveFailed):  # of the save before, which the next look tells of
            self._unless_unhealthy(lambda: self._begin(events, metrics))
        self._look()

    def finish(self, metrics: Metrics, reason: str) -> None:
        """Return when the present step is durable. It is saved once, also when a trigger was due.

        Raises:
            SaveFailed: the third attempt in a row failed.
            UnhealthyState: as for `after_step`.
        """
        self._await()
        while self._saved_step != self._counters.step:
            if not self._unless_unhealthy(lambda: self._save(reason, metrics)):
                return
            self._await()

    def _unless_unhealthy(self, save: Callable[[], None]) -> bool:
        try:
            save()
        except UnhealthyState as error:
            if not self._skip_unhealthy:
                raise
            logger.warning("%s\nno checkpoint is made of it", error)
            return False
        return True

    def _begin(self, events: Sequence[Event], metrics: Metrics) -> None:
        if self._is_retry_due:
            self._save("retry", metrics)
            return
        now = self._counters
        for event in events:
            pending = self._manager.maybe_save(
                now.step,
                epoch=now.epoch,
                samples=now.samples,
                tokens=now.tokens,
                metrics=metrics,
                event=event,
            )
            if pending is not None:
                self._under_way.append(pending)
                return

    def _save(self, reason: str, metrics: Metrics) -> None:
        now = self._counters
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
            pending = self._under_way.pop(0)
            try:
                checkpoint = pending.wait()
            except SaveFailed as error:
                self._failed(error)
                continue
            self._num_failures = 0
            if checkpoint.save_class == "permanent":
                self._saved_step = checkpoint.step
            cost = self._costs.of(pending, checkpoint.nbytes)
            self._callbacks.tell(Callback.checkpoint_saved, checkpoint, cost)

    def _failed(self, error: SaveFailed) -> None:
        self._num_failures += 1
        self._is_retry_due = True
        self._callbacks.tell(Callback.checkpoint_failed, error)
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.warning(
            "%s (failure %d in a row; tried again after the next step, raised at failure %d)",
            error,
            self._num_failures,
            MAX_FAILURES_IN_A_ROW,
        )
