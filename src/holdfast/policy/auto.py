"""The trigger for `every="auto"`: its interval follows from the run's own measurements.

Decides when the trigger fires, from measurements that others pass in.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, TypeAlias

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, Unit, parse, span
from holdfast.policy.costs import History, SaveCost, recent
from holdfast.policy.triggers import NO_METRICS, Event, Metrics, Trigger

Bound: TypeAlias = Literal["optimum", "overhead_cap", "one_save_at_a_time", "at_least", "at_most"]

OVERHEAD = 0.05
"""Default limit on the part of the time that saves take, even in a run that never fails."""
AT_LEAST = "1min"
"""Default shortest interval: saving more often gains nothing that a person would notice."""
AT_MOST = "4h"
"""Default longest interval: the most that a run may lose at its first failure."""
MATERIAL = 1.25
"""Factor by which the interval must change to be reported again."""
_ASSUMED_FAILURES, _ASSUMED_S = 0.5, 43_200.0
"""One failure a day with the weight of half a failure, as in Jeffreys' prior of a Poisson rate."""

_NOTES: dict[Bound, str] = {
    "optimum": "",
    "overhead_cap": "; longer than the optimum, for the cap",
    "one_save_at_a_time": "; as long as a save is written",
    "at_least": "; limited by at_least",
    "at_most": "; limited by at_most",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """A chosen interval, with the bound and the measurements that it follows from."""

    interval_s: float
    """Seconds of work between two saves, without the stall of the first save."""
    limit: Bound
    stall_s: float
    write_s: float
    mtbf_s: float
    """Mean time between failures."""
    num_failures: int | None
    """Failures of the run; None if `mtbf_s` was given."""
    overhead: float

    @property
    def cycle_s(self) -> float:
        """Seconds from the beginning of a save to the beginning of the next one."""
        return self.stall_s + self.interval_s

    def __str__(self) -> str:
        seen = "as given" if self.num_failures is None else f"{self.num_failures} seen"
        return (
            f"every {span(self.interval_s)}: a save costs {span(self.stall_s)} and is written in "
            f"{span(self.write_s)}, failures every {span(self.mtbf_s)} ({seen}), "
            f"cap {100 * self.overhead:.3g}%{_NOTES[self.limit]}"
        )


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute J. T. Daly's optimal save interval (Future Generation Computer Systems 22, 2006).

    The first factor is J. W. Young's optimum (Comm. of the ACM 17, 1974).

    >>> round(daly_interval_s(5 * 60, 6 * 3600) / 60)
    57
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True, slots=True, init=False)
class Auto(Trigger):
    """Save at the interval that loses the least time, from the costs of saves and failures.

    `overhead` is the largest part of the time that saves may take. `mtbf` is a time between
    failures that you know; by default it is estimated from the starts of this run, from
    one failure a day. No interval is shorter than `at_least` or longer than `at_most`, except
    that saves never wait for each other. The first save comes after `at_least`, to be measured.

        CheckpointManager(root, state, every=Auto(mtbf="6h", at_most="1h"))

    Measurements belong to one run: `resolve` returns a trigger without any.

    Raises:
        UsageError: `overhead` is not a share, or times are invalid or contradict each other.
    """

    overhead: float
    mtbf: Time | None
    at_least: Time
    at_most: Time
    _known: _Measurements = field(repr=False, compare=False)

    def __init__(
        self,
        *,
        overhead: float = OVERHEAD,
        mtbf: str | Time | None = None,
        at_least: str | Time = AT_LEAST,
        at_most: str | Time = AT_MOST,
    ) -> None:
        if isinstance(overhead, bool) or not isinstance(overhead, float) or not 0 < overhead < 1:
            raise UsageError(f"Auto: overhead={overhead!r} must be a share above 0 and below 1")
        rate = None if mtbf is None else _parse_clock_time(mtbf, "mtbf")
        least, most = _parse_clock_time(at_least, "at_least"), _parse_clock_time(at_most, "at_most")
        if least > most:
            raise UsageError(f"Auto: at_least='{least}' must not be above at_most='{most}'")
        object.__setattr__(self, "overhead", overhead)
        object.__setattr__(self, "mtbf", rate)
        object.__setattr__(self, "at_least", least)
        object.__setattr__(self, "at_most", most)
        object.__setattr__(self, "_known", _Measurements())

    def __repr__(self) -> str:
        mtbf = f"mtbf='{self.mtbf}', " if self.mtbf else ""
        bounds = f"at_least='{self.at_least}', at_most='{self.at_most}'"
        return f"Auto(overhead={self.overhead}, {mtbf}{bounds})"

    def __str__(self) -> str:
        return "auto"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire when the current interval of training time is over and there is a new step.

        While a save is being written, the trigger waits, at most `at_most` since that save.
        """
        if now.step <= (last_saved.step if last_saved else 0):
            return None
        since_s = now.wall_s - (last_saved.wall_s if last_saved else 0.0)
        plan = self._known.plan
        if since_s < (self.at_least.value if plan is None else plan.cycle_s):
            return None
        if self._known.is_writing and since_s < self.at_most.value:
            return None
        return "measuring (auto)" if plan is None else f"every {span(plan.interval_s)} (auto)"

    def resolve(self, max_duration: Time | None) -> Auto:
        """Return a trigger with the same settings and no measurements, for another run."""
        return Auto(
            overhead=self.overhead, mtbf=self.mtbf, at_least=self.at_least, at_most=self.at_most
        )

    @property
    def plan(self) -> IntervalPlan | None:
        """The current interval and its reasons; None before the first measurement."""
        return self._known.plan

    def decide(self, history: History) -> IntervalPlan | None:
        """Choose the interval for recorded saves and failures; None if no save was measured."""
        saves = recent(history.saves)
        if not saves:
            return None
        stall_s = median(save.stall_s for save in saves)
        write_s = median([save.write_s for save in saves if save.write_s is not None] or [0.0])
        if self.mtbf is not None:
            num_failures, mtbf_s = None, float(self.mtbf.value)
        else:
            num_failures = history.num_failures
            mtbf_s = (history.trained_s + _ASSUMED_S) / (num_failures + _ASSUMED_FAILURES)
        limits: dict[Bound, float] = {
            "optimum": daly_interval_s(stall_s, mtbf_s),
            "overhead_cap": stall_s * (1 / self.overhead - 1),
            "at_least": float(self.at_least.value),
        }
        most = float(self.at_most.value)
        if max(limits.values()) > most:
            limits = {"at_most": most}
        # A save that waits for the previous one would delay training, also beyond `at_most`.
        limits["one_save_at_a_time"] = write_s
        limit = max(limits, key=lambda name: limits[name])
        return IntervalPlan(
            interval_s=limits[limit],
            limit=limit,
            stall_s=stall_s,
            write_s=write_s,
            mtbf_s=mtbf_s,
            num_failures=num_failures,
            overhead=self.overhead,
        )

    # Measurements in and out. Called by the training thread unless a docstring says otherwise.

    def learn(self, history: History) -> None:
        """Replace all measurements by the run's recorded history. Thread-safe."""
        with self._known.lock:
            self._known.history = replace(history, saves=recent(history.saves))
            self._replan()

    def observe(self, cost: SaveCost, at: Timestamp) -> None:
        """Record the cost of a committed save that was begun at `at`. Thread-safe."""
        with self._known.lock:
            before = self._known.history
            self._known.history = replace(
                before,
                saves=recent((*before.saves, cost)),
                trained_s=max(before.trained_s, at.wall_s),
            )
            self._replan()

    def note_writing(self, is_writing: bool) -> None:
        """Record whether the last save is still being written."""
        self._known.is_writing = is_writing

    def news(self) -> str | None:
        """Describe the interval if it changed enough to be reported, else None. Thread-safe.

        Example: "every 12 min: a save costs 1.2 s …".
        """
        known = self._known
        with known.lock:
            plan, reported_s = known.plan, known.reported_s
            if plan is None:
                return None
            if reported_s is not None and 1 / MATERIAL < plan.interval_s / reported_s < MATERIAL:
                return None
            known.reported_s = plan.interval_s
            return str(plan)

    def _replan(self) -> None:
        self._known.plan = self.decide(self._known.history)


class _Measurements:
    """Measurements that a trigger received, and the plan that follows from them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.history = History()
        self.plan: IntervalPlan | None = None
        self.reported_s: float | None = None
        self.is_writing = False


def _parse_clock_time(value: str | Time, name: str) -> Time:
    return parse(value, what=f"Auto: {name}", units={Unit.SECOND})
