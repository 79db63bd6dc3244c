"""Costs of saves and failures as a run has measured them, and the goodput that they leave.

The measured ones are records and their medians. `holdfast advise` reads them from the manifests,
`Auto` also takes them from saves as they are made; both get the same numbers. The goodput is that
of a save interval: simulated for a trace of failures, or the exact mean for memoryless ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError

Seconds = npt.NDArray[np.float64]

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
class Costs:
    """Costs of one save and of one failure, in seconds.

    Raises:
        UsageError: a value that is negative, not finite or not a number.
    """

    stall_s: float
    """Time that training stops for a save."""
    background_s: float = 0.0
    """Delay of training by the writing of a save in the background, beyond the stall."""
    commit_s: float = 0.0
    """Time from the end of the stall to the commit. A failure in between loses that save."""
    restart_s: float = 0.0
    """Time from the detection of a failure to the first new step."""
    detection_s: float = 0.0
    """Time from a failure to its detection."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check_seconds(item.name, getattr(self, item.name))

    @property
    def save_s(self) -> float:
        """Time that a save costs the training."""
        return self.stall_s + self.background_s

    @property
    def down_s(self) -> float:
        """Downtime of a failure: its detection and the restart, without lost work."""
        return self.restart_s + self.detection_s

    def cycle_s(self, interval_s: float) -> float:
        """Compute the time from one save to the next, with `interval_s` of work between them.

        There is one save at a time: the next one waits until the one before is committed.
        """
        return self.stall_s + max(interval_s + self.background_s, self.commit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Simulated run: how its time was spent. The four parts add up to `wall_s`."""

    wall_s: float
    useful_s: float
    """Work that no failure undid."""
    lost_s: float
    """Work that a failure undid."""
    saving_s: float
    """Stalls, slowdown by background writes, and waiting for the previous save."""
    down_s: float
    """Time between failures and the first step after them."""
    num_failures: int
    num_saves: int
    """Committed saves."""

    @property
    def goodput(self) -> float:
        """Share of the time that was useful, from 0 to 1."""
        return self.useful_s / self.wall_s


def simulate(
    interval_s: float, costs: Costs, failures: Sequence[float] | Seconds, *, over_s: float
) -> SimulatedRun:
    """Replay `failures` (seconds since the start, ascending) with a save every `interval_s`.

    The interval is seconds of work. A failure during a restart begins the restart
    again. Unsaved work counts if no failure follows before the end at `over_s`.

    >>> trace = [5_000.0, 5_100.0, 20_000.0]
    >>> outcome = simulate(600, Costs(stall_s=10, restart_s=200), trace, over_s=36_000)
    >>> round(outcome.goodput, 3), outcome.num_failures, outcome.lost_s
    (0.965, 3, 180.0)

    Raises:
        UsageError: the interval, the length or the failures are invalid.
    """
    check_seconds("interval_s", interval_s, above_zero=True)
    check_seconds("over_s", over_s, above_zero=True)
    times = _checked_failures(failures)
    times = times[times < over_s]
    begins = np.concatenate(([0.0], times))
    ends = np.concatenate((times, [over_s]))
    downs = np.minimum(np.where(np.arange(len(begins)) > 0, costs.down_s, 0.0), ends - begins)
    ups = ends - begins - downs
    cycle_s = costs.cycle_s(interval_s)
    cycles = np.floor(ups / cycle_s)
    work = cycles * interval_s + np.minimum(ups - cycles * cycle_s, interval_s)
    saves = np.floor(np.maximum(ups - _until_commit(interval_s, costs), -cycle_s) / cycle_s) + 1
    useful = np.minimum(saves * interval_s, work)
    useful[-1] = work[-1]
    return SimulatedRun(
        wall_s=float(over_s),
        useful_s=float(useful.sum()),
        lost_s=float((work - useful).sum()),
        saving_s=float((ups - work).sum()),
        down_s=float(downs.sum()),
        num_failures=len(times),
        num_saves=int(saves.sum()),
    )


def exponential_failures(mtbf_s: float, *, over_s: float, seed: int) -> Seconds:
    """Draw times of memoryless failures, on average one in `mtbf_s`, before `over_s`.

    Raises:
        UsageError: a time is not above zero.
    """
    check_seconds("mtbf_s", mtbf_s, above_zero=True)
    check_seconds("over_s", over_s, above_zero=True)
    generator = np.random.default_rng(seed)
    times = np.zeros(1)
    while times[-1] < over_s:
        num_missing = int((over_s - times[-1]) / mtbf_s * 1.01) + 100
        gaps = generator.exponential(mtbf_s, num_missing)
        times = np.concatenate((times, times[-1] + np.cumsum(gaps)))
    return times[1:][times[1:] < over_s]


def expected_goodput(interval_s: float, costs: Costs, *, mtbf_s: float) -> float:
    """Compute the mean goodput of a long run with memoryless failures.

    Between two failures, on average `mtbf_s` apart, save number k counts when there is time for a
    restart, the cycles before it and its own commit; the sum of these probabilities over k is the
    mean number of saves that count. When a save is committed as its stall ends, the result is the
    reciprocal of the complete model of J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006):
    `mtbf e^(down / mtbf) (e^((interval + save) / mtbf) - 1) / interval`.

    Raises:
        UsageError: a time is not above zero.
    """
    check_seconds("interval_s", interval_s, above_zero=True)
    check_seconds("mtbf_s", mtbf_s, above_zero=True)
    to_first_commit = costs.down_s + _until_commit(interval_s, costs)
    num_saves = math.exp(-to_first_commit / mtbf_s) / -math.expm1(
        -costs.cycle_s(interval_s) / mtbf_s
    )
    return interval_s * num_saves / mtbf_s


def check_seconds(name: str, value: float, *, above_zero: bool = False) -> None:
    """Raise `UsageError` unless `value` is a number of seconds, finite and not negative."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        least = "above zero" if above_zero else "at least 0"
        raise UsageError(f"{name}={value!r} must be a number of seconds, {least}")


def _until_commit(interval_s: float, costs: Costs) -> float:
    """Compute the time from the beginning of the work that a save covers to its commit."""
    return interval_s + costs.stall_s + costs.commit_s


def _checked_failures(failures: Sequence[float] | Seconds) -> Seconds:
    times = np.asarray(failures, dtype=np.float64)
    if times.ndim != 1 or not np.isfinite(times).all():
        raise UsageError("failures: must be one list of finite numbers, seconds since the start")
    if (times < 0).any() or (np.diff(times) < 0).any():
        raise UsageError("failures: must be ascending, and none before the start")
    return times


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
        """Make a cost from the timings of a manifest; None where they lack the stall."""
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
        """Record that training reached `step` at `wall_s`; returns the delay once a write ended.

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
