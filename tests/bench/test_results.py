"""Shares and ratios are taken inside a round; the goals say what they found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.goals import GOALS, best_of, goals_table, quotient, value, worst
from bench.limits import ceilings
from bench.local import share
from bench.results import Outcome, Results


@pytest.fixture
def results() -> Results:
    found = Results()
    for disk_s, save_s in ((1.0, 2.0), (4.0, 5.0), (3.0, 30.0)):
        found.add("local/gpt/limits", Outcome(figures={"ceiling_save_s": [disk_s]}))
        found.add(
            "local/gpt/save/holdfast-awaited",
            Outcome(figures={"durable_s": [save_s], "disk_s": [disk_s]}),
        )
    return found


def test_a_share_is_the_median_of_the_shares_of_the_rounds(results: Results) -> None:
    figure = ("local/gpt/save/holdfast-awaited", "durable_s")
    assert share(results, "local/gpt", "save", figure) == 0.5  # of medians it would be 0.6


def test_a_round_that_failed_has_no_share(results: Results) -> None:
    results.cases["local/gpt/save/holdfast-awaited"][0] = Outcome(figures={}, error="died")
    figure = ("local/gpt/save/holdfast-awaited", "durable_s")
    assert share(results, "local/gpt", "save", figure) == pytest.approx(0.45)
    assert results.has_failed
    assert results.error("local/gpt/save/holdfast-awaited") == "died"


def test_ceilings_are_the_best_of_the_ways_that_were_measured() -> None:
    found = ceilings(
        {
            "direct_write_s": [3.0, 5.0],
            "copy_touched_s": [0.2],
            "copy_touched_all_s": [0.1],
            "cold_read_s": [2.0],
            "direct_read_s": [1.0],
            "blake3_all_s": [0.3],
        }
    )
    assert found == {
        "ceiling_save_s": [3.0, 5.0],
        "ceiling_stage_s": [0.1],
        "ceiling_cold_s": [1.0],
        "ceiling_warm_s": [0.4],
    }


def test_worst_needs_all_and_best_of_takes_what_there_is(results: Results) -> None:
    limit, save = "local/gpt/limits:ceiling_save_s", "local/gpt/save/holdfast-awaited:durable_s"
    assert worst(quotient(limit, save), quotient(save, limit))(results) == 2.0
    assert worst(quotient(limit, save), value("none:x_s"))(results) is None
    assert best_of(limit, "none:x_s", over=save)(results) == 2.0
    assert best_of("none:x_s", over=save)(results) is None


def test_every_goal_has_a_row_and_says_when_it_was_not_measured(results: Results) -> None:
    lines = goals_table(results, GOALS)
    assert len(lines) == 2 + len(GOALS) == 2 + len({goal.measure for goal in GOALS})
    assert lines[2].endswith("| at least 0.90× | 0.50× | **no** |")
    assert all("not measured" in line for line in lines[3:])


def test_a_goal_is_met_at_its_bound() -> None:
    goal = GOALS[0]
    assert goal.is_lower_bound
    assert goal.is_met(goal.bound)
    assert not goal.is_met(goal.bound - 0.01)
    assert replace(goal, is_lower_bound=False).is_met(goal.bound - 0.01)


def test_a_part_has_only_what_belongs_to_one_benchmark(results: Results) -> None:
    results.add("slowdown/none", Outcome(figures={}))
    results.notes["gpu"] = "no CUDA"
    assert list(results.part("slowdown").cases) == ["slowdown/none"]
    assert results.part("gpu").notes == {"gpu": "no CUDA"}
