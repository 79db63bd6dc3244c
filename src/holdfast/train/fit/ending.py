"""End of a fit: its conditions, its result, and the exit code for a batch system."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from holdfast.engine.control.stop import REQUEUE_EXIT_CODE, Stop
from holdfast.policy.clock import Time, argument_name
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

    @property
    def exit_code(self) -> int:
        """Exit code for `sys.exit`: 75 if running the script again would continue, else 0."""
        return REQUEUE_EXIT_CODE if self.reason in ("max_time", "signal") else 0


class FitEnding:
    """Decides when a fit ends: at its goal, by a signal, a request, or the time limit."""

    def __init__(
        self, goal: Time, counters: Counters, *, stop: Stop | None, max_time_s: float
    ) -> None:
        self.goal = goal
        self.reason: EndReason | None = None
        """Reason of the end; None while training continues."""
        self._counters = counters
        self._counter = argument_name(goal.unit)
        self._stop = stop
        self._ends_at_s = time.monotonic() + max_time_s
        self._request: str | None = None

    def ask(self, reason: str) -> None:
        """Request that `fit` ends after the current step, for `reason`."""
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
            elif self._request is not None:
                self.reason = "stopped"
            elif time.monotonic() >= self._ends_at_s:
                self.reason = "max_time"
        return self.reason is not None

    def outcome(self, notes: tuple[str, ...]) -> Outcome:
        """Make the outcome of the fit; `notes` are those of the resume."""
        reason = self.reason if self.reason is not None else "goal"
        details = {"stopped": self._request, "signal": self._stop and self._stop.requested}
        detail = details.get(reason) or ""
        return Outcome(reason=reason, step=self._counters.step, detail=detail, notes=notes)
