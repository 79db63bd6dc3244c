"""Claims about the advisor: its interval is the best one, and what it says adds up."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.advisor import (
    Advice,
    advise,
    daly_interval_s,
    gamma_quantile,
    given_rate,
    learnt_rate,
    span,
    young_interval_s,
)
from holdfast.policy.clock import parse
from holdfast.policy.costs import Costs, expected_goodput, exponential_failures, simulate
from holdfast.policy.triggers import Every

HOUR, DAY = 3600.0, 86_400.0
COSTS = Costs(stall_s=2, background_s=5, commit_s=60, restart_s=120, detection_s=30)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (900.0, 9.1)])
def test_the_optimum_is_the_published_one(mtbf_s: float, minutes: float) -> None:
    """The three cases that Daly's paper compares with simulations: dumps of 5 minutes."""
    digits = 0 if minutes > 10 else 1
    assert round(daly_interval_s(300, mtbf_s) / 60, digits) == minutes


def test_the_first_order_optimum_is_the_root_of_twice_cost_times_mtbf() -> None:
    assert young_interval_s(50, 10_000) == 1000
    assert daly_interval_s(0.01, DAY) == pytest.approx(young_interval_s(0.01, DAY), rel=0.01)


def test_saves_that_cost_more_than_failures_are_made_once_a_failure() -> None:
    assert daly_interval_s(200, 100) == 100


@pytest.mark.parametrize("mtbf_s", [900.0, 6 * HOUR, 30 * DAY])
@pytest.mark.parametrize("costs", [Costs(stall_s=300, restart_s=600), COSTS])
def test_no_other_interval_is_noticeably_better(costs: Costs, mtbf_s: float) -> None:
    advice = advise(costs, given_rate(mtbf_s), overhead_cap=0.9)
    assert advice.limit == "optimum"
    others = [advice.interval_s * 1.1**n for n in range(-20, 21)]
    best = max(expected_goodput(other, costs, mtbf_s=mtbf_s) for other in others)
    assert advice.goodput == pytest.approx(best, rel=0.005)
    assert advice.goodput > max(advice.half_goodput, advice.double_goodput)


def test_what_is_expected_is_what_a_simulation_gives() -> None:
    advice = advise(COSTS, given_rate(HOUR))
    failures = exponential_failures(HOUR, over_s=50_000 * HOUR, seed=3)
    played = simulate(advice.interval_s, COSTS, failures, over_s=50_000 * HOUR)
    shares = (played.goodput, *(s / played.wall_s for s in (played.lost_s, played.down_s)))
    assert shares == pytest.approx((advice.goodput, advice.lost, advice.down), rel=0.02)
    assert played.saving_s / played.wall_s == pytest.approx(advice.saving, rel=0.02)


costs_of_any_kind = st.builds(
    Costs,
    stall_s=st.floats(0, 1e3),
    background_s=st.floats(0, 1e3),
    commit_s=st.floats(0, 1e4),
    restart_s=st.floats(0, 1e4),
    detection_s=st.floats(0, 1e3),
)


@given(
    costs=costs_of_any_kind,
    mtbf_s=st.floats(60, 1e8),
    cap=st.floats(0.001, 0.9),
    step_s=st.none() | st.floats(0.01, 100),
)
def test_the_cap_holds_no_save_waits_and_shares_add_up(
    costs: Costs, mtbf_s: float, cap: float, step_s: float | None
) -> None:
    advice = advise(costs, given_rate(mtbf_s), overhead_cap=cap, step_s=step_s)
    interval_s = advice.interval_s
    assert costs.save_s / (costs.save_s + interval_s) <= cap * (1 + 1e-6)
    assert interval_s + costs.background_s >= costs.commit_s * (1 - 1e-6)
    unit_s = step_s or 1.0
    floor = max(advice.daly_s, advice.cap_s, advice.commit_s)
    assert interval_s == pytest.approx(max(unit_s, floor), abs=unit_s * 1.001)
    assert advice.every.value * unit_s == pytest.approx(interval_s)
    shares = (advice.goodput, advice.saving, advice.lost, advice.down)
    assert min(shares) >= 0
    assert math.fsum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "limit", "sentence"),
    [
        ({}, "optimum", "cost least together"),
        ({"overhead_cap": 0.001}, "overhead_cap", "more than 0.1% of the time"),
        ({"costs": Costs(stall_s=0.1, commit_s=900)}, "one_save_at_a_time", "wait for the commit"),
    ],
)
def test_the_reason_is_told(changes: dict[str, Any], limit: str, sentence: str) -> None:
    costs = changes.pop("costs", COSTS)
    advice = advise(costs, given_rate(6 * HOUR), **changes)
    assert advice.limit == limit
    assert sentence in advice.lines()[1]


def test_the_explanation_has_the_numbers_for_people_and_for_programs() -> None:
    advice = advise(COSTS, learnt_rate(6, 20 * HOUR), step_s=0.7)
    assert advice.lines() == (
        "save every 705 steps (8.22 min of training)",
        "because there saves and the work that failures undo cost least together",
        "a save stops training for 2 s, delays it by 5 s more, and is committed 60 s later",
        "a failure costs 2.5 min until training goes on",
        "failures: one in 4.92 h (90%: 2.86 h to 10.9 h), from 6 in 20 h",
        "optimum by Daly 8.22 min, by Young 8.3 min",
        "expected goodput 96.1%; saves take 1.4%, work done again 1.7%, restarts 0.8%",
        "at half the interval 95.4%, at double 95.4%",
    )
    facts = json.loads(json.dumps(advice.as_dict()))
    assert facts["every"] == "705step"
    assert facts["costs"]["restart_s"] == 120
    assert facts["failures"]["num_failures"] == 6
    assert facts["shortest_s"] < facts["interval_s"] < facts["longest_s"]


def test_the_advice_can_be_given_to_a_trigger() -> None:
    assert Every(advise(COSTS, given_rate(HOUR), step_s=0.5).every) == Every("440step")
    assert advise(COSTS, given_rate(HOUR)).every == parse("220s")
    assert "as given" in advise(COSTS, given_rate(HOUR)).lines()[4]


def test_free_saves_are_made_at_each_step() -> None:
    assert advise(Costs(stall_s=0), given_rate(DAY), step_s=2.0).every == parse("1step")


# What is known of the rate of failures


@pytest.mark.parametrize(
    ("shape", "probability", "quantile"),
    [
        (0.5, 0.95, 3.841458820694124 / 2),
        (0.5, 0.05, 0.003932140000019522 / 2),
        (1.0, 0.95, -math.log(0.05)),
        (10.0, 0.05, 10.850811394182585 / 2),
        (10.0, 0.95, 31.410432844230918 / 2),
        (50.0, 0.5, 99.33412923598846 / 2),
    ],
)
def test_quantiles_are_those_of_the_tables(
    shape: float, probability: float, quantile: float
) -> None:
    """Twice a gamma variable of shape k/2 is chi-squared with k degrees of freedom."""
    assert gamma_quantile(shape, probability) == pytest.approx(quantile, rel=1e-7)


def test_before_anything_was_seen_the_assumption_stands_with_a_wide_range() -> None:
    rate = learnt_rate(0, 0.0)
    assert rate.mtbf_s == DAY
    assert rate.low_s < DAY / 3
    assert rate.high_s > 100 * DAY


def test_what_was_seen_outweighs_the_assumption() -> None:
    rate = learnt_rate(1000, 1000 * 900.0)
    assert rate.mtbf_s == pytest.approx(900, rel=0.05)
    assert 0.9 < rate.low_s / 900 < 1 < rate.high_s / 900 < 1.15


@given(failures=st.integers(0, 60), hours=st.floats(0, 1e5))
def test_more_failures_are_a_shorter_time_and_more_time_without_a_longer_one(
    failures: int, hours: float
) -> None:
    rate = learnt_rate(failures, hours * HOUR)
    assert rate.low_s < rate.mtbf_s < rate.high_s
    assert learnt_rate(failures + 1, hours * HOUR).mtbf_s < rate.mtbf_s
    assert learnt_rate(failures, (hours + 1) * HOUR).mtbf_s > rate.mtbf_s


def test_the_stated_range_holds_the_truth_as_often_as_it_says() -> None:
    """Runs whose rates come from the assumption itself: 90% of the ranges hold the true mean."""
    generator, hits, num_runs = random.Random(5), 0, 600
    for _ in range(num_runs):
        rate = max(generator.gammavariate(0.5, 2 / DAY), 1e-12)
        observed_s, at, seen = 3 * DAY, generator.expovariate(rate), 0
        while at < observed_s:
            seen, at = seen + 1, at + generator.expovariate(rate)
        learnt = learnt_rate(seen, observed_s)
        hits += learnt.low_s <= 1 / rate <= learnt.high_s
    assert hits / num_runs == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (119, "119 s"), (120, "2 min"), (172_800, "2 d")]
)
def test_lengths_of_time_are_short_to_read(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advise(COSTS, given_rate(1), overhead_cap=0), "overhead_cap=0"),
        (lambda: advise(COSTS, given_rate(1), overhead_cap=1), "overhead_cap=1"),
        (lambda: advise(COSTS, given_rate(1), overhead_cap=math.nan), "overhead_cap=nan"),
        (lambda: advise(COSTS, given_rate(1), step_s=0), "step_s=0"),
        (lambda: given_rate(0), "mtbf_s=0"),
        (lambda: learnt_rate(-1, 5), "num_failures=-1"),
        (lambda: learnt_rate(True, 5), "num_failures=True"),
        (lambda: learnt_rate(1, -5), "observed_s=-5"),
        (lambda: learnt_rate(1, 5, prior_mtbf_s=0), "prior_mtbf_s=0"),
    ],
)
def test_values_that_mean_nothing_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_an_advice_is_a_value() -> None:
    first, second = (advise(COSTS, given_rate(HOUR)) for _ in range(2))
    assert isinstance(first, Advice)
    assert first == second
