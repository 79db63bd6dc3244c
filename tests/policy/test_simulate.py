"""Claims about the simulator: it plays what it says, and its mean is the one that is known."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.costs import (
    Costs,
    SimulatedRun,
    expected_goodput,
    exponential_failures,
    simulate,
)

DAY = 86_400.0
SAFE = Costs(stall_s=300, restart_s=600)
BESIDE = Costs(stall_s=2, background_s=5, commit_s=60, restart_s=120, detection_s=30)
SLOW_DISK = Costs(stall_s=2, background_s=5, commit_s=600, restart_s=120)


@pytest.mark.parametrize(
    ("costs", "mtbf_s", "interval_s"),
    [
        (SAFE, DAY, 7000.0),
        (SAFE, DAY / 4, 3400.0),
        (SAFE, 900.0, 550.0),
        (SAFE, DAY, 100.0),
        (SAFE, 3600.0, 9000.0),
        (BESIDE, 3600.0, 200.0),
        (BESIDE, 10 * DAY, 3600.0),
        (SLOW_DISK, 7200.0, 60.0),
        (SLOW_DISK, 7200.0, 1200.0),
    ],
)
def test_failures_without_memory_give_the_known_mean(
    costs: Costs, mtbf_s: float, interval_s: float
) -> None:
    over_s = 100_000 * mtbf_s
    failures = exponential_failures(mtbf_s, over_s=over_s, seed=7)
    played = simulate(interval_s, costs, failures, over_s=over_s).goodput
    assert played == pytest.approx(expected_goodput(interval_s, costs, mtbf_s=mtbf_s), rel=0.02)


@pytest.mark.parametrize("interval_s", [10.0, 600.0, 7000.0, 50_000.0])
def test_saves_that_are_committed_at_once_give_the_complete_model_of_daly(
    interval_s: float,
) -> None:
    model = (
        DAY * math.exp(600 / DAY) * math.expm1((interval_s + 300) / DAY) / interval_s
    )  # wall time for a second of work
    assert expected_goodput(interval_s, SAFE, mtbf_s=DAY) == pytest.approx(1 / model, rel=1e-12)


def test_without_failures_only_saving_costs() -> None:
    outcome = simulate(90, Costs(stall_s=10, restart_s=50), [], over_s=10_000)
    assert outcome == SimulatedRun(
        wall_s=10_000,
        useful_s=9000,
        lost_s=0,
        saving_s=1000,
        down_s=0,
        num_failures=0,
        num_saves=100,
    )
    assert outcome.goodput == 0.9


@pytest.mark.parametrize(
    ("failure_s", "num_saves", "useful_s", "lost_s"),
    [
        (99.0, 0, 0, 90),  # in the stall of the first save
        (104.0, 0, 0, 94),  # before its commit
        (105.0, 1, 90, 5),
        (150.0, 1, 90, 50),
    ],
)
def test_a_failure_undoes_what_was_not_committed(
    failure_s: float, num_saves: int, useful_s: float, lost_s: float
) -> None:
    costs = Costs(stall_s=5, background_s=5, commit_s=10, restart_s=20, detection_s=3)
    outcome = simulate(90, costs, [failure_s], over_s=failure_s + 23)
    assert outcome.num_saves == num_saves
    assert (outcome.useful_s, outcome.lost_s) == (useful_s, lost_s)
    assert outcome.down_s == 23


def test_a_failure_during_a_restart_begins_it_anew() -> None:
    outcome = simulate(100, Costs(stall_s=0, restart_s=50), [10.0, 40.0, 70.0], over_s=200)
    assert outcome.down_s == 30 + 30 + 50
    assert outcome.useful_s == 80


def test_a_save_waits_for_the_one_before() -> None:
    costs = Costs(stall_s=1, background_s=2, commit_s=100)
    assert costs.cycle_s(10) == 101
    assert costs.cycle_s(98) == 101
    assert costs.cycle_s(200) == 203


def replay(interval_s: int, costs: Costs, failures: list[int], over_s: int) -> SimulatedRun:
    """The same second by second: slow and plain."""
    totals = dict.fromkeys(("useful_s", "lost_s", "saving_s", "down_s"), 0)
    num_saves = 0
    for number, (begin, end) in enumerate(pairwise([0, *failures, over_s])):
        down = int(costs.down_s) if number else 0
        kept = work = 0
        cycle: int = 0
        commits: list[tuple[int, int]] = []
        for now in range(begin, end + 1):
            while commits and commits[0][0] <= now:
                kept, num_saves = commits.pop(0)[1], num_saves + 1
            if now == end:
                break
            if now < begin + down:
                totals["down_s"] += 1
                continue
            if cycle < interval_s:
                work += 1
            else:
                totals["saving_s"] += 1
            cycle += 1
            if cycle == interval_s + costs.stall_s:
                commits.append((now + 1 + int(costs.commit_s), work))
            if cycle == costs.cycle_s(interval_s):
                cycle = 0
            while commits and commits[0][0] <= now:
                kept, num_saves = commits.pop(0)[1], num_saves + 1
        kept = work if end == over_s and number == len(failures) else kept
        totals["useful_s"] += kept
        totals["lost_s"] += work - kept
    return SimulatedRun(wall_s=over_s, num_failures=len(failures), num_saves=num_saves, **totals)


@given(
    interval_s=st.integers(1, 30),
    costs=st.tuples(*[st.integers(0, 12)] * 5),
    gaps=st.lists(st.integers(1, 90), max_size=8),
    rest=st.integers(1, 90),
)
def test_it_is_the_same_as_second_by_second(
    interval_s: int, costs: tuple[int, ...], gaps: list[int], rest: int
) -> None:
    names = [field.name for field in dataclasses.fields(Costs)]
    chosen = Costs(**dict(zip(names, costs, strict=True)))
    failures = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    over_s = sum(gaps) + rest
    played = simulate(interval_s, chosen, failures, over_s=over_s)
    assert played == replay(interval_s, chosen, failures, over_s)
    parts = played.useful_s + played.lost_s + played.saving_s + played.down_s
    assert parts == pytest.approx(over_s)


@given(
    interval_s=st.floats(0.001, 1e6),
    costs=st.tuples(*[st.floats(0, 1e5)] * 5),
    gaps=st.lists(st.floats(0, 1e6), max_size=20),
    rest=st.floats(0.001, 1e6),
)
def test_no_part_is_negative_and_all_time_is_accounted_for(
    interval_s: float, costs: tuple[float, ...], gaps: list[float], rest: float
) -> None:
    names = [field.name for field in dataclasses.fields(Costs)]
    chosen = Costs(**dict(zip(names, costs, strict=True)))
    failures = np.cumsum(gaps)
    over_s = float(sum(gaps)) + rest
    played = simulate(interval_s, chosen, failures, over_s=over_s)
    parts = (played.useful_s, played.lost_s, played.saving_s, played.down_s)
    assert min(parts) >= -1e-9 * over_s
    assert sum(parts) == pytest.approx(over_s)


def test_failures_come_from_the_seed_alone_and_as_often_as_asked() -> None:
    one, again, other = (exponential_failures(60, over_s=600_000, seed=s) for s in (1, 1, 2))
    assert one.tolist() == again.tolist()
    assert one.tolist() != other.tolist()
    assert len(one) == pytest.approx(10_000, rel=0.05)
    assert (np.diff(one) >= 0).all()
    assert 0 <= one[0] <= one[-1] < 600_000
    assert len(exponential_failures(1e9, over_s=1.0, seed=1)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Costs(stall_s=-1), "stall_s=-1"),
        (lambda: Costs(stall_s=math.nan), "stall_s=nan"),
        (lambda: Costs(stall_s=1, restart_s=math.inf), "restart_s=inf"),
        (lambda: Costs(stall_s=True), "stall_s=True"),
        (lambda: simulate(0, SAFE, [], over_s=10), "interval_s=0"),
        (lambda: simulate(5, SAFE, [], over_s=0), "over_s=0"),
        (lambda: simulate(5, SAFE, [3, 2], over_s=10), "ascending"),
        (lambda: simulate(5, SAFE, [-1], over_s=10), "before the start"),
        (lambda: simulate(5, SAFE, [math.nan], over_s=10), "finite"),
        (lambda: simulate(5, SAFE, [[1.0]], over_s=10), "one list"),  # type: ignore[list-item]
        (lambda: exponential_failures(0, over_s=1, seed=1), "mtbf_s=0"),
        (lambda: expected_goodput(1, SAFE, mtbf_s=0), "mtbf_s=0"),
    ],
)
def test_values_that_mean_nothing_are_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
