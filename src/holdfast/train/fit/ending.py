"""End of a fit: its conditions and its reason."""

from __future__ import annotations

import time

from holdfast.engine.control.stop import Stop
from holdfast.policy.clock import Time, argument_name
from holdfast.train.counters import Counters
from holdfast.train.fit.outcome import EndReason, Outcome


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
        """Request the end after the current step."""
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
