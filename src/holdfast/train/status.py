"""Status of a `fit`: its manager, the step under way, its end and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from signal import Signals
from typing import Any, Literal

from holdfast.checkpoints import Checkpoints
from holdfast.control.stop import REQUEUE_EXIT_CODE, Stop
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.policy.clock import Time, argument_name
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.root.best import BEST
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.group import Group
from holdfast.train.training import Counters

EndReason = Literal["goal", "max_time", "signal", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a `fit`: the reason of its end and the step."""

    reason: EndReason
    """Cause of the end: the goal, the time limit, a signal, or the request of a callback.

    After a signal `fit` raises the exception that ends the program, and returns nothing."""
    step: int
    """Completed steps of the whole run."""
    detail: str = ""
    """Reason given by the callback, or the signal's name."""
    notes: tuple[str, ...] = ()
    """Notes of the resume: what was not loaded, stayed as it was, or is not restored exactly."""
    find_best: Callable[[], Checkpoint | None] = field(
        default=lambda: None, repr=False, compare=False
    )
    """Function that finds the best checkpoint in the root."""

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint that `best` names (docs/keeping.md); None: there is none.

        Read from the root whenever it is asked for.
        """
        return self.find_best()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the best checkpoint as it is now, as another process may not have the root."""
        return _restored, (self.reason, self.step, self.detail, self.notes, self.best)

    @property
    def exit_code(self) -> int:
        """Exit code for `sys.exit`: 75 if running the script again would continue, else 0."""
        return REQUEUE_EXIT_CODE if self.reason in ("max_time", "signal") else 0


def _restored(
    reason: EndReason, step: int, detail: str, notes: tuple[str, ...], best: Checkpoint | None
) -> Outcome:
    return Outcome(reason=reason, step=step, detail=detail, notes=notes, find_best=lambda: best)


class FitStatus:
    """Status of a Trainer's last `fit`, and of the step under way, when no save can be made."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.manager: CheckpointManager | None = None
        """Manager while `fit` runs, else None."""
        self.ending: FitEnding | None = None
        """End of the current or last `fit`; None before the first one."""
        self.is_running = False
        """Whether a `fit` or an evaluation runs."""
        self.is_between_steps = False
        """Whether a save can be begun: not within a step, a validation, or hooks of a save."""
        self.is_under_way = False
        """Whether a step has begun, to which logged metrics belong."""
        self.has_begun = False
        """Whether data was fetched, or a load failed halfway, since the Trainer was made."""

    @contextmanager
    def running(self, manager: CheckpointManager | None, callbacks: Callbacks) -> Iterator[None]:
        """Note that a `fit`, or an evaluation without a manager, runs during the block."""
        self.manager, self.is_running = manager, True
        try:
            yield
        except BaseException as error:
            callbacks.call_exception_hooks(error)
            raise
        finally:
            self.manager, self.is_running, self.is_between_steps = None, False, False

    def fence(self) -> None:
        """Wait for a save that still copies the state, as it is about to change."""
        if self.manager is not None:
            self.manager.fence()

    @property
    def present_step(self) -> int:
        """The step under way; between steps, the last completed one."""
        return self._counters.step + self.is_under_way

    def enter_step(self) -> None:
        """Record that a step has begun."""
        self.is_between_steps, self.is_under_way = False, True

    def leave_step(self) -> None:
        """Record that the step is complete and counted, and the state consistent."""
        self.is_between_steps, self.is_under_way = True, False

    @contextmanager
    def refusing_saves(self) -> Iterator[None]:
        """Refuse saves during the block."""
        before, self.is_between_steps = self.is_between_steps, False
        try:
            yield
        finally:
            self.is_between_steps = before

    def check_save_step(self, step: int) -> None:
        """Check that a save of `step` may begin."""
        if not self.is_between_steps:
            raise UsageError(
                "a checkpoint can be made between steps only, where all parts of the state belong "
                "together: in fit_start, step_end, epoch_end, log or fit_end, but not during a "
                "validation"
            )
        if step != self._counters.step:
            raise UsageError(f"step={step!r}: the state is at step {self._counters.step}")


class FitEnding:
    """Decides when a fit ends: at its goal, by a signal, a request, or the time limit."""

    def __init__(
        self,
        goal: Time,
        counters: Counters,
        *,
        stop: Stop | None,
        max_time_s: float,
        group: Group,
        checkpoints: Checkpoints,
    ) -> None:
        self.goal = goal
        self.reason: EndReason | None = None
        """Reason of the end; None while training continues."""
        self.begun_at: int | None = None
        """Completed steps when this call began to train; None before that."""
        self._counters = counters
        self._counter = argument_name(goal.unit)
        self._stop = stop
        self._ends_at_s = time.monotonic() + max_time_s
        self._group = group
        self._checkpoints = checkpoints
        self._request: str | None = None
        self._agreed: EndReason | None = None
        """With several ranks, the reason on which they agreed when they met."""

    def request_end(self, reason: str) -> None:
        """Request that `fit` ends after the current step, or where the ranks meet next."""
        self._request = self._request or reason or "a request"

    def is_at_goal(self) -> bool:
        """Whether training has reached the goal."""
        value: int | None = getattr(self._counters, self._counter)
        return value is not None and value >= self.goal.value

    def is_beyond_goal(self) -> bool:
        """Whether training is past the goal, not just at it."""
        value: int | None = getattr(self._counters, self._counter)
        return value is not None and value > self.goal.value

    def is_here(self) -> bool:
        """Whether training ends at this step; once True, it stays so."""
        if self.reason is None:
            if self.is_at_goal():
                self.reason = "goal"
            elif self._stop is not None and self._stop.requested is not None:
                self.reason = "signal"
            else:
                self.reason = self._own_reason() if self._group.is_alone else self._agreed
        return self.reason is not None

    def agree_on_end(self, num_saves: int) -> int:
        """Agree on whether training ends; return how many saves ended on every rank."""
        reasons: list[EndReason | None] = [None, "max_time", "stopped"]
        mine = reasons.index(self._own_reason())
        # With a root the manager lets the ranks agree on signals.
        shares = self._stop is not None and self._checkpoints.root is None
        received = self._stop.received if self._stop is not None and shares else None
        signal = Signals[received].value if received else 0
        first, last, number = self._group.max([mine, -num_saves, signal])
        self._agreed = reasons[first]
        if number and self._stop is not None:
            self._stop.agree(Signals(number).name)
        return -last

    def _own_reason(self) -> EndReason | None:
        if self._request is not None:
            return "stopped"
        return "max_time" if time.monotonic() >= self._ends_at_s else None

    def outcome(self, notes: tuple[str, ...]) -> Outcome:
        """Make the outcome of the fit; `notes` are those of the resume."""
        reason = self.reason if self.reason is not None else "goal"
        asked = self._request or "a request on another rank"
        details = {"stopped": asked, "signal": self._stop and self._stop.requested}
        detail = details.get(reason) or ""
        return Outcome(
            reason=reason,
            step=self._counters.step,
            detail=detail,
            notes=notes,
            find_best=partial(find_best_checkpoint, self._checkpoints),
        )


def find_best_checkpoint(checkpoints: Checkpoints) -> Checkpoint | None:
    """Find the best checkpoint in a root, if any; claims nothing."""
    if checkpoints.root is None:
        return None
    catalog = catalog_of(checkpoints.root, Emitter(), checkpoints.encrypt)
    try:
        entry = catalog.find_checkpoint(BEST)
    except NoCheckpoint:
        return None
    return build_checkpoint(catalog.find_store(entry.folder), entry)
