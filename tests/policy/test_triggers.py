"""Claims about when a save is due."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, Unit, parse
from holdfast.policy.savers import as_trigger
from holdfast.policy.triggers import (
    At,
    AtEnd,
    AtStart,
    Event,
    Every,
    Metrics,
    On,
    Trigger,
    WallClock,
    When,
)


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


@pytest.mark.parametrize("interval", [500, True, 0, "0step", "", "500", "5iter", "0dur", "2dur"])
def test_bad_intervals_are_refused_at_construction(interval: object) -> None:
    """A2, D47, D53."""
    with pytest.raises(UsageError, match="Every: interval="):
        Every(interval)  # type: ignore[arg-type]


def test_equal_intervals_are_equal_triggers() -> None:
    assert Every("90min") == Every(parse("1h30m"))
    assert repr(Every("90min")) == "Every(interval='5400s')"
    tenth = Every("0.1dur", max_duration="40ep")
    assert repr(tenth) == "Every(interval='0.1dur', max_duration='40ep')"
    assert tenth == Every("0.1dur").resolve(parse("40ep"))


def test_the_reason_says_what_fired() -> None:
    now = Timestamp(step=10, wall_s=600.0)
    assert Every("5step").due(None, None, now) == "every 5step"
    assert At("10step", "3step").due(None, None, now) == "at 10step, 3step"
    assert WallClock("10min").due(None, None, now) == "every 600s of training"
    assert (Every("5step") | At("10step")).due(None, None, now) == "every 5step, at 10step"
    assert (Every("7step") | At("3step")).due(now, None, now) is None


# Fractions of the run


@given(parts=st.integers(1, 40), length=st.integers(40, 2000))
def test_a_fraction_of_the_run_saves_that_often_and_at_the_end(parts: int, length: int) -> None:
    """C31: also where the length is no multiple of the number of saves."""
    every = Every(Time(1 / parts, Unit.DURATION)).resolve(Time(length, Unit.STEP))
    fired = fired_steps(every, list(range(1, length + 1)))
    if Fraction(str(1 / parts)) * parts == 1:  # what is written is exactly one part
        assert fired == [math.ceil(n * Fraction(length, parts)) for n in range(1, parts + 1)]
    assert parts - 1 <= len(fired) <= parts + 1


@pytest.mark.parametrize(
    "trigger", [Every("0.1dur"), At("5step", "0.5dur"), Every("5step") | Every("0.5dur")]
)
def test_a_fraction_of_an_unknown_length_is_an_error(trigger: Trigger) -> None:
    """D47: when the length is asked for, and at the first look at the latest."""
    with pytest.raises(UsageError, match="is a fraction of the run"):
        trigger.resolve(None)
    with pytest.raises(UsageError, match="fraction of the run, whose length is not known"):
        trigger.due(None, None, Timestamp(step=6))


@pytest.mark.parametrize(
    ("interval", "whole", "message"),
    [
        ("5step", "100step", "only a fraction of the run needs max_duration"),
        ("0.5dur", "0.5dur", "max_duration='0.5dur': dur cannot be used here"),
        ("0.5dur", 100, "max_duration=100"),
    ],
)
def test_a_length_that_is_none_or_for_nothing_is_refused(
    interval: str, whole: object, message: str
) -> None:
    """D47."""
    with pytest.raises(UsageError, match=message):
        Every(interval, max_duration=whole)  # type: ignore[arg-type]


def test_resolving_changes_nothing_else() -> None:
    trigger = Every("5step") | At("3step") | WallClock("1h") | AtStart() | AtEnd() | On("signal")
    assert trigger.resolve(None) == trigger
    assert At("0.5dur", "50step").resolve(parse("100step")) == At("50step")
    assert Every("0.5dur").resolve(parse("1h")).due(None, None, Timestamp(step=1, wall_s=1800.0))


# Fixed places


def test_fixed_steps_fire_once_each_and_after_a_jump() -> None:
    """O4, O23: at the place, or at the first look behind it."""
    at = At(steps=[100, 250, 251])
    steps = [50, 100, 101, 249, 260, 261]
    pairs = itertools.pairwise([None, *(Timestamp(step=step) for step in steps)])
    fired = [now.step for before, now in pairs if now and at.due(before, None, now)]
    assert fired == [100, 260]


def test_fixed_places_may_have_any_unit() -> None:
    at = At("2ep", "90s")
    assert at.due(None, None, Timestamp(step=9, epoch=2)) == "at 2ep"
    assert at.due(None, None, Timestamp(step=9, epoch=1, wall_s=91.0)) == "at 90s"
    with pytest.raises(UsageError, match="epoch was not given"):
        at.due(None, None, Timestamp(step=9))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "must name a place"),
        ([5, 6, 5], "5step is given twice"),
        ([0], "above zero"),
        ([-1], "above zero"),
        ([True], "whole number"),
        ([1.5], "whole number"),
    ],
)
def test_fixed_steps_that_would_do_nothing_are_refused(steps: list[int], message: str) -> None:
    """D47: none, twice, negative or no whole number."""
    with pytest.raises(UsageError, match=message):
        At(steps=steps)


# The wall clock


def test_the_wall_clock_does_not_care_about_other_saves() -> None:
    clock = WallClock("10min")
    saved = Timestamp(step=9, wall_s=1195.0)
    before = Timestamp(step=9, wall_s=1199.0)
    now = Timestamp(step=10, wall_s=1201.0)
    assert clock.due(before, saved, now)
    assert not Every("10min").due(before, saved, now)
    assert not clock.due(now, saved, Timestamp(step=11, wall_s=1799.0))


@pytest.mark.parametrize("interval", ["5step", "0s", "0.5dur", 5])
def test_a_wall_clock_counts_seconds_only(interval: object) -> None:
    """D53."""
    with pytest.raises(UsageError, match="WallClock: interval="):
        WallClock(interval)  # type: ignore[arg-type]


# Functions


def test_a_function_sees_where_training_is_what_was_measured_and_what_happened() -> None:
    """C4, A5."""

    def improved(now: Timestamp, metrics: Metrics, event: Event) -> bool:
        return event == "evaluation" and metrics["loss"] < 1.0

    now = Timestamp(step=10)
    assert When(improved).due(None, None, now, {"loss": 0.5}, "evaluation") == "improved"
    assert When(improved).due(None, None, now, {"loss": 1.5}, "evaluation") is None
    assert When(improved).due(None, None, now) is None
    assert When(improved, "a new best").due(None, None, now, {"loss": 0}, "evaluation") == (
        "a new best"
    )
    assert as_trigger(improved) == When(improved)


def test_a_function_that_forgets_to_return_is_an_error() -> None:
    """D47: None would mean that nothing is ever saved."""
    with pytest.raises(UsageError, match=r"must return True or False"):
        When(lambda now, metrics, event: None).due(None, None, Timestamp(step=1))  # type: ignore[arg-type, return-value]


# Start, end and other events


@pytest.mark.parametrize(
    ("step", "previous", "event", "always", "fires"),
    [
        (0, None, "start", False, True),
        (0, None, "step", False, False),
        (0, Timestamp(step=0), "start", False, False),
        (0, Timestamp(step=0), "start", True, True),
        (7, Timestamp(step=7), "start", True, False),
    ],
)
def test_the_first_checkpoint_is_for_runs_that_loaded_nothing(
    step: int, previous: Timestamp | None, event: Event, always: bool, fires: bool
) -> None:
    """O8, A6: `always` also when something was loaded, but never behind step 0."""
    reason = AtStart(always).due(previous, None, Timestamp(step=step), {}, event)
    assert reason == ("initial" if fires else None)


@pytest.mark.parametrize(
    ("step", "saved", "fires"), [(9, None, True), (9, 5, True), (9, 9, False), (0, None, False)]
)
def test_the_last_checkpoint_is_made_when_there_is_something_new(
    step: int, saved: int | None, fires: bool
) -> None:
    """O20, A7, D25: nothing for a run that was already complete."""
    last = None if saved is None else Timestamp(step=saved)
    now = Timestamp(step=step)
    assert AtEnd().due(last, last, now, {}, "end") == ("final" if fires else None)
    assert AtEnd().due(last, last, now) is None


def test_other_events_fire_when_there_is_something_new() -> None:
    on = On("exception", "signal")
    now = Timestamp(step=9)
    assert on.due(None, None, now, {}, "signal") == "signal"
    assert on.due(None, Timestamp(step=9), now, {}, "signal") is None
    assert on.due(None, None, now, {}, "epoch") is None
    assert on.due(None, None, Timestamp(step=0), {}, "exception") is None


@pytest.mark.parametrize("events", [(), ("step",), ("end",), ("epoch", "sigterm")])
def test_events_that_never_happen_are_refused(events: tuple[Event, ...]) -> None:
    """D47."""
    with pytest.raises(UsageError, match="is unknown; choose from epoch, cycle, evaluation"):
        On(*events)


# Put together


def test_any_of_is_flat_and_says_what_it_is_made_of() -> None:
    both = Every("5step") | (At("7step") | AtEnd())
    assert both.triggers == (Every("5step"), At("7step"), AtEnd())  # type: ignore[attr-defined]
    assert str(both) == "every 5step | at 7step | at the end"
    with pytest.raises(TypeError):
        Every("5step") | "7step"  # type: ignore[operator]


@pytest.mark.parametrize("value", ["500step", parse("500step"), Every("500step")])
def test_an_interval_is_a_trigger(value: str | Time | Trigger) -> None:
    assert as_trigger(value) == Every("500step")


@pytest.mark.parametrize("value", [500, None, True, ["500step"]])
def test_what_is_no_trigger_is_refused(value: object) -> None:
    """A2, D47."""
    with pytest.raises(UsageError, match="every="):
        as_trigger(value)  # type: ignore[arg-type]
