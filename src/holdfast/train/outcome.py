"""How a `fit` ended, and what a batch system is to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndReason = Literal["goal", "max_time", "stopped"]

REQUEUE_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, run it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a `fit` ended."""

    reason: EndReason
    """The goal was reached, the time was over, or a callback asked to stop."""
    step: int
    """Steps of the whole run that are done."""
    detail: str = ""
    """What the callback gave as its reason."""

    @property
    def exit_code(self) -> int:
        """For `sys.exit`: 75 where running the script again goes on, else 0."""
        return REQUEUE_EXIT_CODE if self.reason == "max_time" else 0
