"""Claims about `every="auto"`: when it saves, what it learns, and that it is the best interval."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.auto import Auto, daly_interval_s
from holdfast.policy.clock import span
from holdfast.policy.costs import History, SaveCost
from holdfast.policy.savers import Due, Saved, SavePolicy, as_trigger
from holdfast.policy.triggers import AnyTrigger, Every

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
COST = SaveCost(stall_s=2.0, write_s=30.0)


def at(step: int, wall_s: float) -> Timestamp:
    return Timestamp(step=step, wall_s=wall_s)


def told(auto: Auto, *costs: SaveCost, wall_s: float = 0.0) -> Auto:
    for cost in costs:
        auto.observe(cost, at(1, wall_s))
    return auto


def interval_s(auto: Auto) -> float:
    assert auto.plan is not None
    return auto.plan.interval_s


# How it is asked for


@pytest.mark.parametrize("text", ["auto", " Auto ", "AUTO"])
def test_the_word_is_the_trigger_with_its_defaults(text: str) -> None:
    assert as_trigger(text) == Auto() == holdfast.Auto()


def test_a_policy_may_have_it_in_either_class() -> None:
    policy = SavePolicy(permanent="1ep", ephemeral="auto")
    assert policy == SavePolicy(permanent=Every("1ep"), ephemeral=Auto())
    assert policy.auto is policy.ephemeral
    both = SavePolicy(permanent=Auto() | Every("1000step"))
    assert isinstance(both.permanent, AnyTrigger)
    assert both.auto is both.permanent.triggers[0]
    assert SavePolicy(permanent="1ep").auto is None


def test_twice_in_one_policy_is_refused() -> None:
    with pytest.raises(UsageError, match='"auto" is given twice'):
        SavePolicy(permanent="auto", ephemeral="auto")


def test_it_prints_its_settings() -> None:
    auto = Auto(mtbf="6h", at_most="1h")
    assert repr(auto) == "Auto(overhead=0.05, mtbf='21600s', at_least='60s', at_most='3600s')"
    assert eval(repr(auto)) == auto
    assert str(auto) == "auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overhead": 0.0}, "overhead=0.0"),
        ({"overhead": 1}, "overhead=1 "),
        ({"overhead": math.nan}, "overhead=nan"),
        ({"overhead": "5%"}, "overhead='5%'"),
        ({"mtbf": 3600}, "mtbf=3600"),
        ({"mtbf": "100step"}, "mtbf='100step'"),
        ({"at_least": "0.1dur"}, "at_least='0.1dur'"),
        ({"at_least": "2h", "at_most": "1h"}, "at_least='7200s' must not be above"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Auto(**settings)  # type: ignore[arg-type]


# Before anything was measured


def test_the_first_save_comes_after_at_least_to_be_measured() -> None:
    auto = Auto(at_least="90s")
    assert auto.plan is None
    assert auto.news() is None
    assert auto.due(None, None, at(5, 89.9)) is None
    assert auto.due(None, None, at(5, 90.0)) == "measuring (auto)"
    assert auto.due(None, None, at(0, 500.0), event="start") is None
    assert auto.due(None, at(5, 90.0), at(6, 179.0)) is None


def test_one_save_is_enough_to_go_by_even_the_first_of_a_process() -> None:
    """It pays for the memory of the copy: the interval is too long rather than too short."""
    first = told(Auto(), SaveCost(stall_s=8, write_s=30, is_first=True))
    assert interval_s(first) > interval_s(told(Auto(), COST))


def test_the_first_save_of_a_process_does_not_count_beside_others() -> None:
    cold = SaveCost(stall_s=8, write_s=300, is_first=True)
    assert told(Auto(), cold, COST).plan == told(Auto(), COST).plan
    assert told(Auto(), COST, cold).plan == told(Auto(), COST).plan


# The interval


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (900.0, 9.1)])
def test_the_optimum_is_the_published_one(mtbf_s: float, minutes: float) -> None:
    """The three cases that Daly's paper compares with simulations: dumps of 5 minutes."""
    digits = 0 if minutes > 10 else 1
    assert round(daly_interval_s(300, mtbf_s) / 60, digits) == minutes


def test_saves_that_cost_more_than_failures_are_made_once_a_failure() -> None:
    assert daly_interval_s(200, 100) == 100


def test_it_is_the_optimum_for_what_was_measured() -> None:
    auto = told(Auto(mtbf="6h"), COST)
    assert interval_s(auto) == pytest.approx(daly_interval_s(2, 6 * HOUR), rel=1e-12)
    assert auto.plan is not None
    assert auto.plan.limit == "optimum"


def test_medians_are_what_a_save_costs() -> None:
    saves = [SaveCost(stall_s=s, write_s=w) for s, w in ((1, 10), (2, None), (90, 30))]
    plan = told(Auto(), *saves).plan
    assert plan is not None
    assert (plan.stall_s, plan.write_s) == (2, 20)


def test_the_rate_is_learnt_from_the_starts_of_the_run() -> None:
    auto = Auto()
    auto.learn(History(saves=(COST,), num_failures=6, trained_s=20 * HOUR))
    expected = daly_interval_s(2, (20 + 12) * HOUR / 6.5)
    assert interval_s(auto) == pytest.approx(expected, rel=1e-12)


def test_time_without_a_failure_makes_it_longer() -> None:
    auto = told(Auto(), COST)
    assert interval_s(auto) == pytest.approx(daly_interval_s(2, DAY))
    assert interval_s(told(auto, COST, wall_s=5 * DAY)) == pytest.approx(
        daly_interval_s(2, 11 * DAY)
    )


@pytest.mark.parametrize(
    ("settings", "cost", "limit", "seconds"),
    [
        ({"mtbf": "1h"}, SaveCost(stall_s=20), "overhead_cap", 380),
        ({"mtbf": "1h", "overhead": 0.01}, SaveCost(stall_s=2), "overhead_cap", 198),
        ({"mtbf": "1h"}, SaveCost(stall_s=2, write_s=900), "one_save_at_a_time", 900),
        ({"mtbf": "10min"}, SaveCost(stall_s=0.01), "at_least", 60),
        ({"mtbf": "90d"}, SaveCost(stall_s=60), "at_most", 4 * HOUR),
        ({"mtbf": "1h", "at_most": "5min"}, SaveCost(stall_s=20), "at_most", 300),
        (
            {"mtbf": "1h", "at_most": "5min"},
            SaveCost(stall_s=2, write_s=900),
            "one_save_at_a_time",
            900,
        ),
        ({}, SaveCost(stall_s=0.0), "at_least", 60),
    ],
)
def test_bounds_hold_in_the_order_that_the_page_gives(
    settings: dict[str, str], cost: SaveCost, limit: str, seconds: float
) -> None:
    plan = told(Auto(**settings), cost).plan  # type: ignore[arg-type]
    assert plan is not None
    assert (plan.limit, plan.interval_s) == (limit, pytest.approx(seconds))


costs = st.builds(
    SaveCost,
    stall_s=st.floats(0, 1e3),
    write_s=st.none() | st.floats(0, 1e4),
    is_first=st.booleans(),
)


@given(cost=costs, mtbf_s=st.integers(60, 10**8), overhead=st.floats(0.001, 0.9))
def test_no_interval_is_out_of_bounds_or_over_the_cap_or_shorter_than_a_write(
    cost: SaveCost, mtbf_s: int, overhead: float
) -> None:
    plan = told(Auto(mtbf=f"{mtbf_s}s", overhead=overhead), cost).plan
    assert plan is not None
    assert plan.interval_s >= plan.write_s
    assert MINUTE <= plan.interval_s <= max(4 * HOUR, plan.write_s)
    if plan.interval_s < 4 * HOUR:
        assert plan.stall_s <= overhead * plan.cycle_s * (1 + 1e-9)


@given(
    stalls=st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)),
    failures=st.tuples(st.integers(0, 50), st.integers(0, 50)),
)
def test_dearer_saves_make_it_longer_and_more_failures_shorter(
    stalls: tuple[float, float], failures: tuple[int, int]
) -> None:
    (cheap, dear), (few, many) = sorted(stalls), sorted(failures)

    def found(stall_s: float, num_failures: int) -> float:
        auto = Auto(at_least="1s", at_most="100d")
        saves = (SaveCost(stall_s=stall_s),)
        auto.learn(History(saves=saves, num_failures=num_failures, trained_s=10 * DAY))
        return interval_s(auto)

    assert found(cheap, few) <= found(dear, few) * (1 + 1e-9)
    assert found(cheap, many) <= found(cheap, few) * (1 + 1e-9)


@given(recorded=st.lists(costs, max_size=70), later=st.lists(costs, max_size=70))
def test_what_was_recorded_and_what_was_seen_since_are_one(
    recorded: list[SaveCost], later: list[SaveCost]
) -> None:
    """After a resume nothing jumps: the record gives what the process before had."""
    resumed, straight = Auto(), Auto()
    resumed.learn(History(saves=tuple(recorded)))
    told(resumed, *later)
    straight.learn(History(saves=(*recorded, *later)))
    assert resumed.plan == straight.plan


def test_one_slow_save_does_not_matter_and_a_slower_store_does() -> None:
    slow = SaveCost(stall_s=40, write_s=900)
    auto = told(Auto(mtbf="1d"), *[COST] * 20)
    before = interval_s(auto)
    assert interval_s(told(auto, slow)) == before
    assert interval_s(told(auto, *[slow] * 25)) > 3 * before


# When it fires


def test_what_a_save_costs_is_no_part_of_the_interval() -> None:
    """Else saves would take more of the time than the cap."""
    auto = told(Auto(mtbf="1h"), SaveCost(stall_s=20))
    saved = at(100, 1000.0)
    assert auto.due(None, saved, at(200, 1000 + 380 + 19.9)) is None
    assert auto.due(None, saved, at(200, 1000 + 380 + 20.1)) == "every 6.33 min (auto)"
    assert auto.due(None, saved, at(100, 5000.0)) is None


def test_a_permanent_save_puts_the_ephemeral_one_off() -> None:
    policy = SavePolicy(permanent="100step", ephemeral=told(Auto(mtbf="1h"), SaveCost(stall_s=20)))
    saved = Saved(permanent=at(100, 1000.0), ephemeral=at(90, 700.0))
    assert policy.decide(at(110, 1390.0), saved, at(111, 1399.0)) is None
    due = policy.decide(at(110, 1390.0), saved, at(111, 1401.0))
    assert due == Due("ephemeral", "every 6.33 min (auto)")


def test_it_waits_while_a_save_is_written_but_not_for_ever() -> None:
    auto, saved = told(Auto(mtbf="1h", at_most="1h"), SaveCost(stall_s=20)), at(100, 1000.0)
    late, later = at(200, 1500.0), at(300, 1000 + HOUR)
    auto.note_writing(True)
    assert auto.due(None, saved, late) is None
    assert auto.due(None, saved, later)
    auto.note_writing(False)
    assert auto.due(None, saved, late)


# What it says


def test_the_explanation_has_the_numbers_and_comes_once_per_material_change() -> None:
    auto = Auto()
    auto.learn(History(saves=(COST,), num_failures=2, trained_s=10 * HOUR))
    assert auto.news() == (
        "every 5.91 min: a save costs 2 s and is written in 30 s, failures every 8.8 h (2 seen), "
        "cap 5%"
    )
    assert auto.news() is None
    told(auto, SaveCost(stall_s=2.1, write_s=31.0))
    assert auto.news() is None
    told(auto, *[SaveCost(stall_s=8, write_s=30)] * 3)
    assert "a save costs 8 s" in (auto.news() or "")
    told(auto, *[SaveCost(stall_s=8, write_s=3000)] * 9)
    assert (auto.news() or "").endswith("cap 5%; as long as a save is written")


def test_each_run_has_measurements_of_its_own() -> None:
    auto = told(Auto(mtbf="6h"), COST)
    fresh = auto.resolve(None)
    assert fresh == auto
    assert fresh.plan is None


# What it is worth


STEP_S, STALL_S, RESTART_S = 30.0, 4.0, 120.0


def lives(mtbf_s: float, over_s: float) -> Iterator[float]:
    """How long each start runs until it fails, or until the end."""
    generator, left_s = random.Random(7), over_s
    while left_s > 0:
        life_s = min(generator.expovariate(1 / mtbf_s), left_s)
        left_s -= life_s
        yield life_s


def useful_s(policy: SavePolicy, mtbf_s: float, over_s: float) -> float:
    """Plays a run with `policy`, asked at each step: steps, stalls, failures and restarts."""
    saved = at(0, 0.0)
    saves: tuple[SaveCost, ...] = ()
    for number, life_s in enumerate(lives(mtbf_s, over_s)):
        if policy.auto is not None:
            policy.auto.learn(History(saves=saves, num_failures=number, trained_s=saved.wall_s))
        now, left_s = saved, life_s - (RESTART_S if number else 0.0)
        while left_s > STEP_S:
            left_s -= STEP_S
            now = at(now.step + 1, now.wall_s + STEP_S)
            if policy.decide(None, Saved(permanent=saved), now) and left_s > STALL_S:
                left_s -= STALL_S
                saved, now = now, at(now.step, now.wall_s + STALL_S)
                saves = (*saves[-40:], SaveCost(stall_s=STALL_S, is_first=False))
                if policy.auto is not None:
                    policy.auto.observe(saves[-1], saved)
    return saved.step * STEP_S


def test_a_run_that_learns_its_failures_is_as_good_as_one_that_knew_the_best_interval() -> None:
    """From the first step of a run of 20 days on, with nothing given."""
    mtbf_s, over_s = 3 * HOUR, 20 * DAY
    learnt = useful_s(SavePolicy(permanent="auto"), mtbf_s, over_s)
    fixed = [120, 180, 300, 420, 600, 1200]
    best = max(useful_s(SavePolicy(permanent=f"{n}s"), mtbf_s, over_s) for n in fixed)
    assert learnt >= 0.98 * best


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (119, "119 s"), (120, "2 min"), (172_800, "2 d")]
)
def test_durations_are_short_to_read(seconds: float, text: str) -> None:
    assert span(seconds) == text
