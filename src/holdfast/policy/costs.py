"""Costs of saves and failures as a run has measured them: records and their medians.

`holdfast advise` reads them from the manifests, `Auto` also from saves of its own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CAPTURE_S, STAGE_S, WRITE_S = "capture_s", "stage_s", "write_s"

NUM_RECENT = 32
"""Number of newest saves that count: one slow save does not matter, a slower store soon does."""
MAX_S = 1e10
"""Limit of plausible times: three centuries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Cost of one save, in seconds. None if it was not measured."""

    stall_s: float
    """Time that training was stopped."""
    write_s: float | None = None
    """Time of writing after the stall."""
    is_first: bool = False
    """Whether it is the first save of its process, which also allocates memory for the copy."""

    @classmethod
    def read(cls, timings: Mapping[str, float], *, is_first: bool) -> SaveCost | None:
        """Make a cost from the timings of a manifest; None where they lack the stall."""
        capture_s, stage_s = timing(timings, CAPTURE_S), timing(timings, STAGE_S)
        if capture_s is None or stage_s is None:
            return None
        return cls(stall_s=capture_s + stage_s, write_s=timing(timings, WRITE_S), is_first=is_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Recorded saves of a run, oldest first, and its failures."""

    saves: tuple[SaveCost, ...] = ()
    num_failures: int = 0
    trained_s: float = 0.0
    """Training time during which these failures happened."""


def timing(timings: Mapping[str, float], name: str) -> float | None:
    """Read a timing of a manifest; None where it is missing or not a valid time."""
    seconds = timings.get(name)
    return seconds if seconds is not None and 0 <= seconds < MAX_S else None


def recent(saves: Sequence[SaveCost]) -> tuple[SaveCost, ...]:
    """Select the newest saves, without the first of each process if there are others."""
    warm = [save for save in saves if not save.is_first]
    return tuple((warm or saves)[-NUM_RECENT:])
