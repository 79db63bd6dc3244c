"""Claims about the saves that a forecast assumes.

That what it says comes true is tested with real managers in tests/care/test_forecast.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.format.manifest import Timestamp
from holdfast.policy.forecast import (
    Coming,
    Record,
    Situation,
    Sizes,
    coming_saves,
    foresee,
)
from holdfast.policy.rule import Candidate
from holdfast.policy.rules import Best, Last
from holdfast.policy.savers import SavePolicy

SIZES = Sizes(30, {"model": 10, "optimizer": 20})


def saved(sequence: int, step: int, **more: Any) -> Candidate:
    at = {"samples": 8 * step, "wall_s": 2.0 * step}
    return Candidate(
        order=(1, sequence),
        timestamp=Timestamp(step=step, **{**at, **more.pop("at", {})}),
        created=f"2026-02-01T00:{sequence:02d}:00+00:00",
        components=("model", "optimizer"),
        nbytes=30,
        **more,
    )


def assumed(
    history: list[Candidate], every: str | None, number: int = 3, began: str = "", **more: Any
) -> Coming:
    record = Record(
        history=history,
        policies={} if every is None else {"main": SavePolicy(permanent=every)},
        parts={},
        sizes={entry.order: SIZES for entry in history},
        after=history[0].order,
        began=began,
    )
    return coming_saves(record, more.pop("rule", Last(2)), number, **more)


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("100step", [300, 400, 500]),
        ("1000sp", [375, 500, 625]),
        ("300s", [400, 550, 700]),
        (None, [350, 450, 550]),
    ],
)
def test_steps_follow_from_the_interval_or_repeat_the_last_distance(
    every: str | None, steps: list[int]
) -> None:
    found = assumed([saved(2, 250), saved(1, 150)], every)
    assert [save.timestamp.step for save in found.saves] == steps
    assert [save.order for save in found.saves] == [(1, 3), (1, 4), (1, 5)]
    assert found.is_by_interval == (every is not None)
    for save in found.saves:
        assert save.timestamp.samples == 8 * save.timestamp.step
        assert save.timestamp.wall_s == 2.0 * save.timestamp.step
        assert (save.nbytes, save.components) == (30, ("model", "optimizer"))


def test_one_checkpoint_is_enough() -> None:
    assert [one.timestamp.step for one in assumed([saved(1, 40)], None).saves] == [80, 120, 160]
    assert [one.timestamp.step for one in assumed([saved(1, 0)], None).saves] == [1, 2, 3]


def test_an_interval_in_what_the_run_does_not_count_is_not_followed() -> None:
    found = assumed([saved(2, 250), saved(1, 150)], "1000tok")
    assert not found.is_by_interval
    assert [save.timestamp.step for save in found.saves] == [350, 450, 550]


def test_the_time_goes_on_from_the_newest_or_from_the_resume() -> None:
    history = [saved(2, 250), saved(1, 150)]
    assert assumed(history, "100step").saves[0].created == "2026-02-01T00:03:40+00:00"
    began = "2026-03-01T00:00:00+00:00"
    assert assumed(history, "100step", began=began).saves[0].created == "2026-03-01T00:01:40+00:00"


def test_an_interval_that_means_never_is_foretold_as_far_as_dates_go() -> None:
    found = assumed([saved(2, 250), saved(1, 150)], "1000000000000step")
    assert {save.created[:4] for save in found.saves} == {"9999"}
    odd = assumed([saved(2, 250, at={"wall_s": 1e300}), saved(1, 150)], "100step")
    assert odd.saves[0].created.startswith("9999")


@pytest.mark.parametrize(("mode", "worst"), [("min", 5.0), ("max", 1.0)])
def test_no_coming_save_is_a_new_best(mode: Any, worst: float) -> None:
    values = [2.0, 5.0, math.nan, 1.0]
    history = [
        saved(number, 100 * number, metrics={"loss": value, "other": 7.0})
        for number, value in zip(range(4, 0, -1), values, strict=True)
    ]
    (save, *_) = assumed(history, "100step", rule=Best("loss", mode=mode)).saves
    assert save.metrics == {"loss": worst, "other": 7.0}
    given = assumed(history, "100step", rule=Best("loss"), metrics={"loss": -1.0}).saves[0]
    assert given.metrics == {"loss": -1.0, "other": 7.0}


def test_what_is_held_stays_and_is_decided_all_the_same() -> None:
    history = [saved(2, 200), saved(1, 100)]
    now = Situation(entries=history, lineage={(1, 1), (1, 2)}, resumed_from=None, held={(1, 1)})
    (first, *_) = foresee(now, Last(1), assumed(history, "100step", 1))
    assert [made.entry.order for made in first.done] == [(1, 2)]
    assert [made.entry.order for made in first.decisions if not made.keep] == [(1, 2), (1, 1)]


def test_dropped_components_free_their_bytes_once() -> None:
    history = [saved(2, 200), saved(1, 100)]
    now = Situation(
        entries=history,
        lineage={(1, 1), (1, 2)},
        resumed_from=None,
        sizes={entry.order: SIZES for entry in history},
    )
    rule = Last(1) | Last(9).then_drop("optimizer")
    saves = [*foresee(now, rule, assumed(history, "100step", 2))]
    assert saves[0].freed_nbytes == {(1, 2): 20, (1, 1): 20}
    assert saves[1].freed_nbytes == {(1, 3): 20}
    left = {made.entry.order: made.entry.nbytes for made in saves[1].decisions}
    assert left == {(1, 4): 30, (1, 3): 30, (1, 2): 10, (1, 1): 10}
