"""When the Trainer saves, and what it does when a save fails (docs/design.md, invariant 8)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from holdfast.engine.checkpoint import PendingSave
from holdfast.errors import SaveFailed, UsageError
from holdfast.events import Event as Told
from holdfast.manager import CheckpointManager
from holdfast.policy.classes import Due
from holdfast.policy.triggers import Event
from holdfast.store.base import Store
from holdfast.train.callbacks import Callbacks
from holdfast.train.counters import Counters
from holdfast.train.health import UnhealthyState
from holdfast.train.hooks import Callback
from holdfast.train.training import Metrics

logger = logging.getLogger("holdfast")

MAX_FAILURES_IN_A_ROW = 3

BeforeSave = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save whose end nobody was told of yet."""

    pending: PendingSave
    due: Due
    is_own: bool
    """Whether the Trainer began it, and no callback."""


class TrainingManager(CheckpointManager):
    """A manager that lets the training prepare itself before each save, whoever asks for it, and
    remembers each of them."""

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        state: Mapping[str, Any],
        *,
        counters: Counters,
        before_save: BeforeSave,
        skips_unhealthy: bool,
        **options: Any,
    ) -> None:
        """`before_save` is called with the step and the metrics of each save; what it raises
        keeps the save from being made."""
        super().__init__(root, state, **options)
        self.begun: list[Begun] = []
        """Saves whose end is still to be told, in their order."""
        self.is_between_steps = False
        """Whether all parts of the state belong to the same step."""
        self._counters = counters
        self._before_save = before_save
        self._skips_unhealthy = skips_unhealthy

    def save(self, step: int, **options: Any) -> PendingSave:
        """As for any manager, of the present step and between steps only.

        When the state is not healthy and such states are skipped, nothing is saved, and waiting
        for the save raises `UnhealthyState`.

        Raises:
            UsageError: it is called within a step, a validation or a save, or for another step.
        """
        return self._begin(step, options, is_own=False)

    def save_own(self, due: Due, metrics: Metrics) -> PendingSave:
        """A save that the Trainer makes by itself."""
        options = {"metrics": metrics, "reason": due.reason, "save_class": due.save_class}
        return self._begin(self._counters.step, options, is_own=True)

    def due(self, events: Sequence[Event], metrics: Metrics, vetoes: Collection[str]) -> Due | None:
        """The save of the highest class that is due at one of the events of this step."""
        now = self._counters
        stamp = self._now(now.step, now.epoch, now.samples, now.tokens)
        if self._every is None:
            return None
        every, previous, self._previous = self._every, self._previous, stamp
        return highest(
            every.decide(previous, self._saved, stamp, metrics, event, vetoes=vetoes)
            for event in events
        )

    @contextmanager
    def not_between_steps(self) -> Iterator[None]:
        """No save can be begun in the block."""
        before, self.is_between_steps = self.is_between_steps, False
        try:
            yield
        finally:
            self.is_between_steps = before

    def _begin(self, step: int, options: dict[str, Any], *, is_own: bool) -> PendingSave:
        self._check_moment(step)
        try:
            with self.not_between_steps():
                self._before_save(step, options.get("metrics") or {})
        except UnhealthyState as error:
            if not self._skips_unhealthy:
                raise
            logger.warning("%s\nno checkpoint is made of it", error)
            return _left_out(step, error)
        now = self._counters
        counted = {"epoch": now.epoch, "samples": now.samples, "tokens": now.tokens}
        pending = super().save(step, **{**counted, **options})
        due = Due(options.get("save_class", "permanent"), options.get("reason", "manual"))
        self.begun.append(Begun(pending=pending, due=due, is_own=is_own))
        return pending

    def _check_moment(self, step: int) -> None:
        if not self.is_between_steps:
            raise UsageError(
                "a checkpoint can be made between steps only, where all parts of the state belong "
                "together: in fit_start, step_end, epoch_end, log or fit_end, and in none of them "
                "within a validation"
            )
        if step != self._counters.step:
            raise UsageError(f"step={step!r}: the state is that of step {self._counters.step}")

    def _wait_for_the_save_before(self) -> None:
        with suppress(SaveFailed):  # it is in `begun`, and told of by the next look
            super()._wait_for_the_save_before()


def highest(dues: Iterable[Due | None]) -> Due | None:
    """The first one of the highest class."""
    return max((due for due in dues if due is not None), key=_rank, default=None)


def _rank(due: Due) -> int:
    return ("ephemeral", "permanent").index(due.save_class)


def _left_out(step: int, error: UnhealthyState) -> PendingSave:
    pending = PendingSave(step, timeout_s=0.0)
    pending.staged.set_exception(error)
    pending.committed.set_exception(error)
    return pending


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
    """Saves at the ends of steps: warns when a save failed, whoever began it, tries again at the
    next step, and raises at the third failure in a row."""

    def __init__(
        self,
        manager: TrainingManager,
        counters: Counters,
        callbacks: Callbacks,
        costs: SaveCosts,
        *,
        saved_step: int | None,
    ) -> None:
        """`saved_step` is the step of which there is a permanent checkpoint already."""
        self._manager = manager
        self._counters = counters
        self._callbacks = callbacks
        self._costs = costs
        self._saved_step = saved_step
        self._num_failures = 0
        self._retry: Due | None = None
        self._failed_step: int | None = None

    def at(self, events: Sequence[Event], metrics: Metrics) -> None:
        """Tell how earlier saves ended, and begin one if one of the events asks for it.

        Raises:
            SaveFailed: the third save in a row failed.
            UnhealthyState: the state is not to be saved, and not to be passed over either.
        """
        self._look()
        vetoes = self._callbacks.vetoes
        due = self._manager.due(events, metrics, vetoes)
        wanted = highest([self._due_again(vetoes), due])
        if wanted is not None:
            self._save(wanted, metrics)
        self._look()

    def finish(self, metrics: Metrics, reason: str) -> None:
        """Return when the present step is durable. It is saved once, also when a trigger was due.

        Raises:
            SaveFailed, UnhealthyState: as for `at`.
        """
        self._await()
        while self._saved_step != self._counters.step:
            if not self._save(Due("permanent", reason), metrics):
                return
            self._await()

    def settle(self, metrics: Metrics) -> None:
        """Return when no save is under way, and none is to be made up for.

        Raises:
            SaveFailed, UnhealthyState: as for `at`.
        """
        self._await()
        while self._retry is not None and self._save(self._retry, metrics):
            self._await()

    def _save(self, due: Due, metrics: Metrics) -> bool:
        """Whether a save was begun; it is not when the state is to be passed over."""
        pending = self._manager.save_own(due, metrics)
        return not isinstance(pending.failure(), UnhealthyState)

    def _due_again(self, vetoes: Collection[str]) -> Due | None:
        """What failed at an earlier step, unless a save under way makes up for it."""
        again = self._retry
        if again is None or self._failed_step == self._counters.step:
            return None
        if vetoes and again.save_class == "ephemeral":
            return None
        is_covered = any(_rank(begun.due) >= _rank(again) for begun in self._manager.begun)
        return None if is_covered else again

    def _await(self) -> None:
        with suppress(SaveFailed):
            # The manager's wait, because it has a deadline.
            self._manager.wait()
        self._look()

    def _look(self) -> None:
        """Tell of the saves that have ended; an owner's error is raised as it is."""
        under_way = self._manager.begun
        while under_way and under_way[0].pending.done():
            begun = under_way.pop(0)
            try:
                checkpoint = begun.pending.wait()
            except SaveFailed as error:
                self._failed_step = begun.pending.step
                self._failed(begun.due, error)
                continue
            self._num_failures = 0
            if self._retry is not None and _rank(begun.due) >= _rank(self._retry):
                self._retry = None
            if begun.is_own and checkpoint.save_class == "permanent":
                self._saved_step = checkpoint.step
            cost = self._costs.of(begun.pending, checkpoint.nbytes)
            with self._manager.not_between_steps():
                self._callbacks.tell(Callback.checkpoint_saved, checkpoint, cost)

    def _failed(self, due: Due, error: SaveFailed) -> None:
        self._num_failures += 1
        self._retry = highest([self._retry, due])
        with self._manager.not_between_steps():
            self._callbacks.tell(Callback.checkpoint_failed, error)
        if self._num_failures >= MAX_FAILURES_IN_A_ROW:
            raise error
        logger.warning(
            "%s (failure %d in a row; tried again after the next step, raised at failure %d)",
            error,
            self._num_failures,
            MAX_FAILURES_IN_A_ROW,
        )
