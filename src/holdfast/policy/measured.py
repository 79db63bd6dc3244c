"""Measurements of a run: the costs of its saves and resumes, and its failures.

Records and their medians. `holdfast advise` reads them from the manifests, `Auto` also takes them
from saves as they are made; both get the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from holdfast.policy.simulate import Costs

CAPTURE_S, STAGE_S, WRITE_S = "capture_s", "stage_s", "write_s"
DELAY_S = "delay_s"
"""Timing in a manifest: delay of training by the writing of the previous save."""
RESUME_S = "resume_s"
"""Timing in the first manifest after a resume: how long the resume took."""

NUM_RECENT = 32
"""Number of newest saves that count: one slow save does not matter, a slower store soon does."""
MIN_DELAYS = 3
"""Number of measured delays from which they count: a single step may be slow for any reason."""
ASSUMED_RESTART_S = 120.0
"""Assumed time of a resume until one is measured; affects only the expected cost of failures."""
MAX_S = 1e10
"""Limit of plausible times: three centuries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """Cost of one save, in seconds. None where it was not measured."""

    stall_s: float
    """Time that training was stopped."""
    write_s: float | None = None
    """Time of writing after the stall."""
    delay_s: float | None = None
    """Delay of training by the writing of the save."""
    resume_s: float | None = None
    """Duration of the resume before it, if it is the first save after one."""
    is_first: bool = False
    """Whether it is the first save of its process, which also allocates memory for the copy."""

    @classmethod
    def read(cls, timings: Mapping[str, float], *, is_first: bool) -> SaveCost | None:
        """Read the timings of a manifest; None where they do not contain the stall."""
        capture_s, stage_s = timing(timings, CAPTURE_S), timing(timings, STAGE_S)
        if capture_s is None or stage_s is None:
            return None
        return cls(
            stall_s=capture_s + stage_s,
            write_s=timing(timings, WRITE_S),
            delay_s=timing(timings, DELAY_S),
            resume_s=timing(timings, RESUME_S),
            is_first=is_first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Recorded saves and resumes of a run, oldest first, and its failures."""

    saves: tuple[SaveCost, ...] = ()
    resumes_s: tuple[float, ...] = ()
    num_failures: int = 0
    trained_s: float = 0.0
    """Training time during which these failures happened."""


def timing(timings: Mapping[str, float], name: str) -> float | None:
    """Read a timing of a manifest; None where it is missing or not a valid time."""
    seconds = timings.get(name)
    return seconds if seconds is not None and 0 <= seconds < MAX_S else None


def recent(saves: Sequence[SaveCost]) -> tuple[SaveCost, ...]:
    """Select the newest saves, without the first of each process if there are others.

    A save that was left out once is never selected later, whatever saves follow.
    """
    warm = [save for save in saves if not save.is_first]
    return tuple((warm or saves)[-NUM_RECENT:])


def typical_costs(saves: Sequence[SaveCost], resumes_s: Sequence[float] = ()) -> Costs | None:
    """Compute median costs of recent saves and resumes; None where no save was measured.

    Costs other than the stall that were never measured count as 0, a resume as two minutes. The
    delay by a write is limited to the duration of the write.
    """
    counted = recent(saves)
    if not counted:
        return None
    write_s = _median(save.write_s for save in counted) or 0.0
    delay_s = _median((save.delay_s for save in counted), at_least=MIN_DELAYS) or 0.0
    return Costs(
        stall_s=median(save.stall_s for save in counted),
        background_s=min(delay_s, write_s),
        commit_s=write_s,
        restart_s=median(resumes_s[-NUM_RECENT:]) if resumes_s else ASSUMED_RESTART_S,
    )


class DelayMeter:
    """Measures by how much the writing of a save delays training, from the times of the steps.

    The time of the steps during which a save was written is compared with that of as many steps
    without one. Used from one thread.
    """

    _MIN_QUIET = 8
    """Steps without a save that are needed before a delay is computed."""
    _NUM_QUIET = 64

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=self._NUM_QUIET)
        self.reset()

    def reset(self) -> None:
        """Forget the last step, so that the next `look` measures nothing."""
        self._last: tuple[int, float] | None = None
        self._stall_s = 0.0
        self._is_writing = False
        self._busy_steps, self._busy_s = 0, 0.0

    def save(self, stall_s: float) -> None:
        """Record that a save has stopped training for `stall_s`, and is being written."""
        self._stall_s += stall_s
        self._is_writing = True

    def look(self, step: int, wall_s: float, *, is_writing: bool) -> float | None:
        """Record that training has reached `step` after `wall_s` seconds.

        `is_writing`: the last save is still being written. Returns the delay in seconds, at least
        0, at the first look after a write, else None.
        """
        last, self._last = self._last, (step, wall_s)
        stall_s, self._stall_s = self._stall_s, 0.0
        was_writing, self._is_writing = self._is_writing, is_writing
        num_steps = step - last[0] if last is not None else 0
        work_s = wall_s - last[1] - stall_s if last is not None else 0.0
        if not was_writing:
            if num_steps > 0 and work_s >= 0:
                self._quiet.append(work_s / num_steps)
            return None
        self._busy_steps += num_steps
        self._busy_s += work_s
        return None if is_writing else self._delay_s()

    def _delay_s(self) -> float | None:
        steps, busy_s = self._busy_steps, self._busy_s
        self._busy_steps, self._busy_s = 0, 0.0
        if steps <= 0 or len(self._quiet) < self._MIN_QUIET:
            return None
        return max(0.0, busy_s - steps * _trimmed_mean(self._quiet))


def _trimmed_mean(values: Iterable[float]) -> float:
    """Compute the mean without a tenth at each end, such as steps with an evaluation between."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return fmean(ordered[cut : len(ordered) - cut])


def _median(values: Iterable[float | None], *, at_least: int = 1) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) >= at_least else None
