"""Claims about durations: what text they are read from, and what may be done with them."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import MAX_COUNT, Time, Unit, argument_name, parse, reading

counts = st.builds(
    Time,
    st.integers(1, MAX_COUNT),
    st.sampled_from([Unit.STEP, Unit.EPOCH, Unit.SAMPLE, Unit.TOKEN]),
)
seconds = st.builds(Time, st.integers(1, 10**9) | st.floats(1e-6, 1e9), st.just(Unit.SECOND))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500step", 500, Unit.STEP),
        ("500 Steps", 500, Unit.STEP),
        ("10_000step", 10_000, Unit.STEP),
        ("10ba", 10, Unit.STEP),
        ("2ep", 2, Unit.EPOCH),
        ("1epoch", 1, Unit.EPOCH),
        ("64sp", 64, Unit.SAMPLE),
        ("1e9tok", 10**9, Unit.TOKEN),
        ("1.5e3tok", 1500, Unit.TOKEN),
        ("10s", 10, Unit.SECOND),
        ("0.5s", 0.5, Unit.SECOND),
        ("90min", 5400, Unit.SECOND),
        ("1h30m", 5400, Unit.SECOND),
        (" 1h 30min ", 5400, Unit.SECOND),
        ("36h", 129_600, Unit.SECOND),
        ("2d", 172_800, Unit.SECOND),
        ("1d12h30m15s", 131_415, Unit.SECOND),
    ],
)
def test_text_with_a_unit_is_read(text: str, value: float, unit: Unit) -> None:
    """D53: spans beyond a day and minutes beyond 59 are as good as any other."""
    assert parse(text) == Time(value, unit)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (500, "text with a unit"),
        (True, "text with a unit"),
        (None, "text with a unit"),
        ("500", "a number and a unit"),
        ("", "a number and a unit"),
        ("step", "a number and a unit"),
        ("infba", "a number and a unit"),
        ("500step or so", "a number and a unit"),
        ("5parsec", "unknown unit 'parsec'"),
        ("5iter", "write step or ep instead"),
        ("0.1dur", "not supported by this version"),
        ("2cycle", "not supported by this version"),
        ("0step", "above zero"),
        ("0s", "above zero"),
        ("-5step", "above zero"),
        ("-1h", "above zero"),
        ("1e-9999s", "above zero"),
        ("1.5step", "whole number"),
        ("1e9999tok", "whole number, at most"),
        ("1e9999h", "seconds"),
        ("30m1h", "larger unit to the smaller"),
        ("1h1h", "larger unit to the smaller"),
        ("1h5step", "larger unit to the smaller"),
        ("1ep5step", "put together"),
    ],
)
def test_anything_else_is_refused_with_the_argument_named(value: str, message: str) -> None:
    """A2, D47, D53: bare numbers, booleans and settings that could never fire are errors."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse(value, what="every")
    assert str(caught.value).startswith(f"every={value!r}")


@given(counts | seconds)
def test_a_time_is_read_back_from_its_text(time: Time) -> None:
    assert parse(str(time)) == time


@given(st.text(max_size=12) | st.from_regex(r"[0-9.e_+-]{1,8}(step|h|m|s|tok)", fullmatch=True))
def test_any_text_gives_a_time_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse(text).value > 0


def test_times_of_one_unit_compare_and_add() -> None:
    half_hour, hour = parse("30min"), parse("1h")
    assert half_hour < hour
    assert hour >= half_hour
    assert hour == parse("60min")
    assert hash(hour) == hash(parse("3600.0s"))
    assert half_hour + half_hour == hour
    assert hour - half_hour == half_hour
    assert 2 * half_hour == hour
    assert hour / half_hour == Fraction(2)


def test_times_of_other_units_are_different_and_never_ordered() -> None:
    assert parse("5step") != parse("5ep")
    assert parse("5step") != 5
    with pytest.raises(UsageError, match="5step cannot be compared with 5ep: the units differ"):
        assert parse("5step") < parse("5ep")
    with pytest.raises(UsageError, match="5step cannot be added to 5ep"):
        parse("5step") + parse("5ep")


def test_bare_numbers_are_refused_in_arithmetic() -> None:
    """A2: nobody agrees on what a bare number counts."""
    with pytest.raises(UsageError, match="give it a unit"):
        parse("5step") + 5  # type: ignore[operator]
    with pytest.raises(UsageError, match="whole number"):
        parse("5step") * 1.5  # type: ignore[operator]
    with pytest.raises(UsageError, match="above zero"):
        parse("5step") - parse("5step")


@pytest.mark.parametrize("value", [True, 1.5, "5", 0, -1, MAX_COUNT + 1])
def test_a_count_is_a_whole_number_above_zero(value: int) -> None:
    """D53: a boolean is no count."""
    with pytest.raises(UsageError):
        Time(value, Unit.STEP)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, False])
def test_seconds_are_finite_and_above_zero(value: float) -> None:
    with pytest.raises(UsageError):
        Time(value, Unit.SECOND)


def test_each_unit_reads_its_own_counter() -> None:
    now = Timestamp(step=1, epoch=2, samples=3, tokens=4, wall_s=5.5)
    assert [reading(now, unit) for unit in Unit] == [1, 2, 3, 4, 5.5]
    assert reading(Timestamp(step=1), Unit.TOKEN) is None
    assert [argument_name(unit) for unit in Unit] == [
        "step",
        "epoch",
        "samples",
        "tokens",
        "wall_s",
    ]
