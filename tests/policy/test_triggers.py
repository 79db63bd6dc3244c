"""Claims about when a save is due."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import parse
from holdfast.policy.triggers import Every


def fired_steps(every: Every, steps: list[int], start: int | None = None) -> list[int]:
    previous = None if start is None else Timestamp(step=start)
    fired = []
    for step in steps:
        now = Timestamp(step=step)
        if every.due(previous, None, now):
            fired.append(step)
        previous = now
    return fired


@given(interval=st.integers(1, 20), start=st.integers(0, 50), length=st.integers(1, 100))
def test_counting_by_one_it_is_the_modulus(interval: int, start: int, length: int) -> None:
    """A1: for steps that grow by one nothing differs from `step % interval == 0`."""
    steps = list(range(start + 1, start + 1 + length))
    expected = [step for step in steps if step % interval == 0]
    assert fired_steps(Every(f"{interval}step"), steps, start) == expected


@given(interval=st.integers(1, 20), jumps=st.lists(st.integers(1, 50), max_size=50))
def test_a_jump_over_multiples_fires_once(interval: int, jumps: list[int]) -> None:
    """C30: it fires exactly where the number of passed multiples grew."""
    steps = [sum(jumps[: n + 1]) for n in range(len(jumps))]
    fired = fired_steps(Every(f"{interval}step"), steps)
    passed = [step // interval for step in [0, *steps]]
    grown = [b > a for a, b in itertools.pairwise(passed)]
    assert fired == [step for step, fire in zip(steps, grown, strict=True) if fire]


def test_nothing_is_due_at_the_start_or_when_asked_twice() -> None:
    every = Every("5step")
    assert not every.due(None, None, Timestamp(step=0))
    assert every.due(None, None, Timestamp(step=5))
    assert not every.due(Timestamp(step=5), None, Timestamp(step=5))


def test_after_a_resume_the_checkpoint_is_where_counting_goes_on() -> None:
    """D34: a resumed run does not save at once, nor skip its next multiple."""
    assert fired_steps(Every("500step"), [1201, 1499, 1500], start=1200) == [1500]


def test_going_back_does_not_fire() -> None:
    assert not Every("5step").due(Timestamp(step=23), None, Timestamp(step=11))


@pytest.mark.parametrize(
    ("interval", "before", "after"),
    [
        ("2ep", Timestamp(step=1, epoch=1), Timestamp(step=2, epoch=2)),
        ("100sp", Timestamp(step=1, samples=96), Timestamp(step=2, samples=128)),
        ("1e3tok", Timestamp(step=1, tokens=999), Timestamp(step=2, tokens=4001)),
    ],
)
def test_other_counters_fire_too(interval: str, before: Timestamp, after: Timestamp) -> None:
    every = Every(interval)
    assert every.due(before, None, after)
    assert not every.due(after, None, after)


def test_seconds_count_from_the_last_save() -> None:
    every = Every("10min")
    saved = Timestamp(step=5, wall_s=1000.0)
    asked = Timestamp(step=8, wall_s=1500.0)
    assert not every.due(asked, saved, Timestamp(step=9, wall_s=1599.9))
    assert every.due(asked, saved, Timestamp(step=9, wall_s=1600.0))
    assert not every.due(None, None, Timestamp(step=9, wall_s=599.0))
    assert every.due(None, None, Timestamp(step=9, wall_s=600.0))


@pytest.mark.parametrize(
    ("interval", "argument"), [("2ep", "epoch"), ("5sp", "samples"), ("1e9tok", "tokens")]
)
def test_a_counter_that_is_never_given_is_an_error(interval: str, argument: str) -> None:
    """D47: a trigger that could never fire says so, and names the argument."""
    with pytest.raises(UsageError, match=f"{argument} was not given"):
        Every(interval).due(None, None, Timestamp(step=5))


def test_a_counter_that_appears_later_counts_from_zero() -> None:
    every = Every("2ep")
    assert every.due(Timestamp(step=5), None, Timestamp(step=6, epoch=2))
    assert not every.due(Timestamp(step=5), None, Timestamp(step=6, epoch=1))


@pytest.mark.parametrize("interval", [500, True, 0, "0step", "", "500", "5iter", "0.1dur"])
def test_bad_intervals_are_refused_at_construction(interval: object) -> None:
    """A2, D47, D53."""
    with pytest.raises(UsageError, match="every="):
        Every(interval)  # type: ignore[arg-type]


def test_equal_intervals_are_equal_triggers() -> None:
    assert Every("90min") == Every(parse("1h30m"))
    assert repr(Every("90min")) == "Every(interval='5400s')"
