"""Result of a `fit`, and the exit code for a batch system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.engine.control.stop import REQUEUE_EXIT_CODE

EndReason = Literal["goal", "max_time", "signal", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a `fit`: the reason of its end and the step."""

    reason: EndReason
    """Cause of the end: the goal, the time limit, a signal, or the request of a callback.

    After a signal `fit` raises what ends the program, and this is not seen."""
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
