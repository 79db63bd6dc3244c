"""Advice on how often to save, from the cost of a save and the rate of failures.

Pure arithmetic on measured values; measuring is not done here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from holdfast.errors import UsageError
from holdfast.policy.clock import Time, Unit
from holdfast.policy.costs import Costs, check_seconds, expected_goodput

Limit: TypeAlias = Literal["optimum", "overhead_cap", "one_save_at_a_time"]

DEFAULT_OVERHEAD_CAP = 0.05
"""Default limit on the part of the time that saves take, even in a run that never fails."""
DEFAULT_PRIOR_MTBF_S = 86_400.0
"""Assumed mean time between failures of a run without a record: one failure a day."""
PRIOR_FAILURES = 0.5
"""Weight of the assumed rate: half a failure, as in Jeffreys' prior of a Poisson rate."""
CREDIBLE = 0.9
"""Probability that the stated range holds the true mean time between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """Mean time between failures of a run with its credible range, in seconds."""

    mtbf_s: float
    low_s: float
    """Lower end of the range: 5% probability that the true mean is shorter."""
    high_s: float
    """Upper end of the range: 5% probability that the true mean is longer."""
    num_failures: int | None = None
    """Number of failures observed; None when the rate was given."""
    observed_s: float | None = None
    """Length of the observation; None when the rate was given."""


def given_rate(mtbf_s: float) -> FailureRate:
    """Make a `FailureRate` from a known mean time between failures.

    Raises:
        UsageError: the time is not above zero.
    """
    check_seconds("mtbf_s", mtbf_s, above_zero=True)
    return FailureRate(mtbf_s=mtbf_s, low_s=mtbf_s, high_s=mtbf_s)


def learnt_rate(
    num_failures: int, observed_s: float, *, prior_mtbf_s: float = DEFAULT_PRIOR_MTBF_S
) -> FailureRate:
    """Estimate the failure rate of a run from `num_failures` within `observed_s` seconds.

    The rate is taken to be constant. Its posterior is a gamma distribution that starts as half a
    failure in half of `prior_mtbf_s`; `mtbf_s` is one over its mean.

    >>> rate = learnt_rate(6, 20 * 3600)
    >>> [round(s / 3600, 1) for s in (rate.low_s, rate.mtbf_s, rate.high_s)]
    [2.9, 4.9, 10.9]

    Raises:
        UsageError: an argument is not a count or not a time.
    """
    if isinstance(num_failures, bool) or not isinstance(num_failures, int) or num_failures < 0:
        raise UsageError(f"num_failures={num_failures!r} must be a whole number, at least 0")
    check_seconds("observed_s", observed_s)
    check_seconds("prior_mtbf_s", prior_mtbf_s, above_zero=True)
    shape = num_failures + PRIOR_FAILURES
    exposure_s = observed_s + PRIOR_FAILURES * prior_mtbf_s
    tail = (1 - CREDIBLE) / 2
    return FailureRate(
        mtbf_s=exposure_s / shape,
        low_s=exposure_s / gamma_quantile(shape, 1 - tail),
        high_s=exposure_s / gamma_quantile(shape, tail),
        num_failures=num_failures,
        observed_s=observed_s,
    )


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute J. W. Young's optimal save interval, of first order (Comm. of the ACM 17, 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Compute J. T. Daly's optimal save interval (Future Generation Computer Systems 22, 2006).

    >>> round(daly_interval_s(5 * 60, 6 * 3600) / 60)
    57
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    factor = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval_s(save_s, mtbf_s) * factor - save_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advised interval with the numbers it follows from. Shares are parts of the time, 0 to 1."""

    every: Time
    """Argument for `Every`: steps where the length of a step is known, else seconds."""
    interval_s: float
    """The interval in seconds of training."""
    limit: Limit
    """Reason for the interval: the optimum, or one of two reasons to save less often."""
    young_s: float
    daly_s: float
    overhead_cap: float
    cap_s: float
    """The shortest interval under the overhead cap."""
    commit_s: float
    """The shortest interval at which no save waits for the one before."""
    shortest_s: float
    """The interval at the shortest credible time between failures."""
    longest_s: float
    """The interval at the longest credible time between failures."""
    goodput: float
    """Expected share of the time for work that is never done again."""
    saving: float
    """Expected share of the time for saves."""
    lost: float
    """Expected share of the time for work that is done again."""
    down: float
    """Expected share of the time between failures and the next step."""
    half_goodput: float
    """Expected goodput at half the interval."""
    double_goodput: float
    """Expected goodput at double the interval."""
    costs: Costs
    failures: FailureRate

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values, with `every` as text."""
        return {**asdict(self), "every": str(self.every)}

    @property
    def exact_s(self) -> float:
        """Interval before rounding up to whole steps or seconds."""
        return max(self.daly_s, self.cap_s, self.commit_s)

    def lines(self) -> tuple[str, ...]:
        """Return the advice as lines of text, the interval first."""
        return (
            f"save every {_every(self)}",
            f"because {_because(self)}",
            *_cost_lines(self.costs),
            _failure_line(self.failures),
            f"optimum by Daly {span(self.daly_s)}, by Young {span(self.young_s)}",
            f"expected goodput {self.goodput:.1%}; saves take {self.saving:.1%}, work done again "
            f"{self.lost:.1%}, restarts {self.down:.1%}",
            f"at half the interval {self.half_goodput:.1%}, at double {self.double_goodput:.1%}",
        )


def advise(
    costs: Costs,
    failures: FailureRate,
    *,
    overhead_cap: float = DEFAULT_OVERHEAD_CAP,
    step_s: float | None = None,
) -> Advice:
    """Advise the interval that loses the least time, with at most `overhead_cap` spent on saves.

    The optimum is Daly's. It is made longer when saves would take more than the cap, or when each
    would have to wait for the commit of the one before, and rounded up to whole steps of `step_s`
    seconds, or to whole seconds.

    Raises:
        UsageError: the cap is not between 0 and 1, or `step_s` is not a time.
    """
    if isinstance(overhead_cap, bool) or not 0 < overhead_cap < 1:
        raise UsageError(f"overhead_cap={overhead_cap!r} must be above 0 and below 1")
    if step_s is not None:
        check_seconds("step_s", step_s, above_zero=True)
    floors: dict[Limit, float] = {
        "overhead_cap": costs.save_s * (1 / overhead_cap - 1),
        "one_save_at_a_time": max(0.0, costs.commit_s - costs.background_s),
    }
    lengths: dict[Limit, float] = {
        "optimum": daly_interval_s(costs.save_s, failures.mtbf_s),
        **floors,
    }
    limit = max(lengths, key=lambda name: lengths[name])
    unit_s = step_s or 1.0
    # Rounding must not make an interval of exactly so many steps one longer.
    count = max(1, math.ceil(lengths[limit] / unit_s - 1e-9))
    interval_s = count * unit_s
    goodput, saving, lost, down = shares(interval_s, costs, failures.mtbf_s)
    shortest, longest = (
        max(daly_interval_s(costs.save_s, mtbf_s), *floors.values())
        for mtbf_s in (failures.low_s, failures.high_s)
    )
    return Advice(
        every=Time(count, Unit.SECOND if step_s is None else Unit.STEP),
        interval_s=interval_s,
        limit=limit,
        young_s=young_interval_s(costs.save_s, failures.mtbf_s),
        daly_s=lengths["optimum"],
        overhead_cap=overhead_cap,
        cap_s=floors["overhead_cap"],
        commit_s=floors["one_save_at_a_time"],
        shortest_s=shortest,
        longest_s=longest,
        goodput=goodput,
        saving=saving,
        lost=lost,
        down=down,
        half_goodput=expected_goodput(interval_s / 2, costs, mtbf_s=failures.mtbf_s),
        double_goodput=expected_goodput(interval_s * 2, costs, mtbf_s=failures.mtbf_s),
        costs=costs,
        failures=failures,
    )


def shares(interval_s: float, costs: Costs, mtbf_s: float) -> tuple[float, float, float, float]:
    """Compute mean shares of goodput, saving, work done again and downtime at an interval."""
    goodput = expected_goodput(interval_s, costs, mtbf_s=mtbf_s)
    up = math.exp(-costs.down_s / mtbf_s)
    cycle_s = costs.cycle_s(interval_s)
    # The probabilities that training is still up, summed over the saving part of every cycle.
    reached = math.exp(-interval_s / mtbf_s) * -math.expm1((interval_s - cycle_s) / mtbf_s)
    saving = up * reached / -math.expm1(-cycle_s / mtbf_s)
    # What remains is above zero but for rounding.
    return goodput, saving, max(0.0, up - saving - goodput), 1 - up


@lru_cache(maxsize=64)  # computed after each save, while the number of failures stays
def gamma_quantile(shape: float, probability: float) -> float:
    """Compute the quantile of a gamma distribution of scale 1, to nine digits."""
    low, high = 0.0, shape + 20 * math.sqrt(shape) + 20
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        if _gamma_below(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return high


def span(seconds: float) -> str:
    """Format a duration for display.

    >>> span(0.25), span(90), span(5400), span(400_000)
    ('0.25 s', '90 s', '1.5 h', '4.63 d')
    """
    for size, unit, least in ((86_400, "d", 2 * 86_400), (3600, "h", 3600), (60, "min", 120)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _gamma_below(shape: float, x: float) -> float:
    """Compute the regularised lower incomplete gamma function by its series (DLMF 8.11.4)."""
    if x == 0:
        return 0.0
    num_terms = int(x + 12 * math.sqrt(x)) + 60
    return math.fsum(
        math.exp((shape + k) * math.log(x) - x - math.lgamma(shape + k + 1))
        for k in range(num_terms)
    )


def _every(advice: Advice) -> str:
    if advice.every.unit is Unit.SECOND:
        return f"{span(advice.interval_s)} of training"
    return f"{advice.every.value} steps ({span(advice.interval_s)} of training)"


def _because(advice: Advice) -> str:
    match advice.limit:
        case "optimum":
            return "there saves and the work that failures undo cost least together"
        case "overhead_cap":
            return f"saves would take more than {advice.overhead_cap:.1%} of the time otherwise"
        case "one_save_at_a_time":
            return "each save would wait for the commit of the one before otherwise"


def _cost_lines(costs: Costs) -> tuple[str, str]:
    return (
        f"a save stops training for {span(costs.stall_s)}, delays it by {span(costs.background_s)} "
        f"more, and is committed {span(costs.commit_s)} later",
        f"a failure costs {span(costs.down_s)} until training goes on",
    )


def _failure_line(failures: FailureRate) -> str:
    mean = f"failures: one in {span(failures.mtbf_s)}"
    if failures.observed_s is None:
        return f"{mean}, as given"
    return (
        f"{mean} ({CREDIBLE:.0%}: {span(failures.low_s)} to {span(failures.high_s)}), "
        f"from {failures.num_failures} in {span(failures.observed_s)}"
    )
