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
    """The goal was reached, the time was over, a signal came, or a callback asked to stop.

    After a signal `fit` raises what ends the program, and this is not seen."""
    step: int
    """Steps of the whole run that are done."""
    detail: str = ""
    """What the callback gave as its reason, or the signal's name."""
    notes: tuple[str, ...] = ()
    """What the resume did not load, left as it was (new), or could not restore exactly."""

    @property
    def exit_code(self) -> int:
        """Exit code for `sys.exit`: 75 if running the script again would continue, else 0."""
        return REQUEUE_EXIT_CODE if self.reason in ("max_time", "signal") else 0
