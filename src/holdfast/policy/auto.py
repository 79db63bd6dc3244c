"""The trigger for `every="auto"`: its interval follows from the run's own measurements.

Decides when the trigger fires, from measurements that others pass in. The arithmetic is in
`advisor`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.advisor import (
    DEFAULT_OVERHEAD_CAP,
    Advice,
    FailureRate,
    advise,
    given_rate,
    learnt_rate,
    span,
)
from holdfast.policy.clock import Time, Unit, parse
from holdfast.policy.costs import (
    DELAY_S,
    RESUME_S,
    Costs,
    DelayMeter,
    History,
    SaveCost,
    recent,
    typical_costs,
)
from holdfast.policy.triggers import NO_METRICS, Event, Metrics, Trigger

Bound: TypeAlias = Literal["optimum", "overhead_cap", "one_save_at_a_time", "at_least", "at_most"]

AT_LEAST = "1min"
"""Default shortest interval: saving more often gains nothing that a person would notice."""
AT_MOST = "4h"
"""Default longest interval: the most that a run may lose at its first failure."""
MATERIAL = 1.25
"""Factor by which the interval must change to be reported again."""

_NOTES: dict[Bound, str] = {
    "optimum": "",
    "overhead_cap": "; longer than the optimum, for the cap",
    "one_save_at_a_time": "; as long as a save is written",
    "at_least": "; not more often, as at_least says",
    "at_most": "; not less often, as at_most says",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """A chosen interval with the bound and the advice that it follows from."""

    interval_s: float
    """Seconds of work between two saves, without the cost of the first save."""
    limit: Bound
    advice: Advice

    @property
    def cycle_s(self) -> float:
        """Seconds from the beginning of a save to that of the next one, with the save's cost."""
        return self.advice.costs.cycle_s(self.interval_s)

    def __str__(self) -> str:
        costs, failures = self.advice.costs, self.advice.failures
        seen = "as given" if failures.num_failures is None else f"{failures.num_failures} seen"
        return (
            f"every {span(self.interval_s)}: a save costs {span(costs.save_s)} and is written in "
            f"{span(costs.commit_s)}, failures every {span(failures.mtbf_s)} ({seen}), "
            f"cap {100 * self.advice.overhead_cap:.3g}%{_NOTES[self.limit]}"
        )


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
        overhead: float = DEFAULT_OVERHEAD_CAP,
        mtbf: str | Time | None = None,
        at_least: str | Time = AT_LEAST,
        at_most: str | Time = AT_MOST,
    ) -> None:
        if isinstance(overhead, bool) or not isinstance(overhead, float) or not 0 < overhead < 1:
            raise UsageError(f"Auto: overhead={overhead!r} must be a share above 0 and below 1")
        rate = None if mtbf is None else _seconds(mtbf, "mtbf")
        least, most = _seconds(at_least, "at_least"), _seconds(at_most, "at_most")
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

    def decide(self, costs: Costs, failures: FailureRate) -> IntervalPlan:
        """Choose the interval for these costs and failures: the advisor's, within the bounds."""
        advice = advise(costs, failures, overhead_cap=self.overhead)
        least, most = float(self.at_least.value), float(self.at_most.value)
        limits: dict[Bound, float] = {advice.limit: advice.exact_s}
        if advice.exact_s < least:
            limits = {"at_least": least}
        elif advice.exact_s > most:
            # `at_most` bounds what may be lost; but a save that waits would delay training anyway.
            limits = {"at_most": most, "one_save_at_a_time": advice.commit_s}
        limit = max(limits, key=lambda name: limits[name])
        return IntervalPlan(interval_s=limits[limit], limit=limit, advice=advice)

    def rate(self, num_failures: int, trained_s: float) -> FailureRate:
        """Return the failure rate: `mtbf` if it was given, else an estimate from the run."""
        if self.mtbf is not None:
            return given_rate(float(self.mtbf.value))
        return learnt_rate(num_failures, trained_s)

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
                resumes_s=(*before.resumes_s, *(() if cost.resume_s is None else [cost.resume_s])),
                trained_s=max(before.trained_s, at.wall_s),
            )
            self._replan()

    def look(self, now: Timestamp, *, is_writing: bool) -> None:
        """Record training's progress; `is_writing`: the last save is not committed yet."""
        known = self._known
        known.is_writing = is_writing
        delay_s = known.delays.look(now.step, now.wall_s, is_writing=is_writing)
        if delay_s is not None:
            known.unrecorded[DELAY_S] = delay_s

    def saved(self, stall_s: float) -> None:
        """Record that a save has stopped training for `stall_s`, and is being written."""
        self._known.delays.save(stall_s)

    def restarted(self, resume_s: float) -> None:
        """Record that training resumed from a checkpoint, which took `resume_s` to load."""
        self._known.delays.reset()
        self._known.unrecorded = {RESUME_S: resume_s}

    def timings(self) -> dict[str, float]:
        """Return measurements in seconds for the next save's manifest; each is returned once."""
        unrecorded, self._known.unrecorded = self._known.unrecorded, {}
        return unrecorded

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
        history = self._known.history
        costs = typical_costs(history.saves, history.resumes_s)
        rate = self.rate(history.num_failures, history.trained_s)
        self._known.plan = None if costs is None else self.decide(costs, rate)


class _Measurements:
    """Measurements that a trigger received, and the plan that follows from them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.history = History()
        self.plan: IntervalPlan | None = None
        self.reported_s: float | None = None
        self.delays = DelayMeter()
        self.is_writing = False
        self.unrecorded: dict[str, float] = {}


def _seconds(value: str | Time, name: str) -> Time:
    return parse(value, what=f"Auto: {name}", units={Unit.SECOND})
