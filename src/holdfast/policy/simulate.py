"""Simulation of a run that fails at times: its goodput at a given save interval.

Replays a trace of failures, or computes the exact mean for memoryless failures. Knows nothing of
where the costs come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError

Seconds = npt.NDArray[np.float64]


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
        """Downtime of a failure: its cost without the work that is done again."""
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
    anew. Unsaved work counts if no failure follows before the end at `over_s`.

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
