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
from holdfast.policy.clock import (
    ALL_UNITS,
    MAX_COUNT,
    Time,
    Unit,
    argument_name,
    get_counter,
    parse,
)

COUNTED_UNITS = [Unit.STEP, Unit.EPOCH, Unit.SAMPLE, Unit.TOKEN, Unit.CYCLE]
counts = st.builds(Time, st.integers(1, MAX_COUNT), st.sampled_from(COUNTED_UNITS))
seconds = st.builds(Time, st.integers(1, 10**9) | st.floats(1e-6, 1e9), st.just(Unit.SECOND))
fractions = st.builds(Time, st.floats(1e-12, 1) | st.just(1), st.just(Unit.DURATION))


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
        ("2cycle", 2, Unit.CYCLE),
        ("0.1dur", 0.1, Unit.DURATION),
        ("1dur", 1, Unit.DURATION),
        ("25e-2 DUR", 0.25, Unit.DURATION),
    ],
)
def test_text_with_a_unit_is_read(text: str, value: float, unit: Unit) -> None:
    """D53: spans beyond a day and minutes beyond 59 are as good as any other."""
    assert parse(text, units=ALL_UNITS) == Time(value, unit)


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
        ("5iter", "write step, ep or cycle instead"),
        ("2 iterations", "write step, ep or cycle instead"),
        ("0dur", "above zero and at most 1"),
        ("1.01dur", "above zero and at most 1"),
        ("-0.5dur", "above zero and at most 1"),
        ("1e-9999dur", "above zero"),
        ("0.1dur5step", "can be combined"),
        ("1.5cycle", "whole number"),
        ("0step", "above zero"),
        ("0s", "above zero"),
        ("-5step", "above zero"),
        ("-1h", "above zero"),
        ("1e-9999s", "above zero"),
        ("1.5step", "whole number"),
        ("1e9999tok", "whole number, at most"),
        ("1e9999h", "seconds"),
        ("30m1h", "from large to small"),
        ("1h1h", "from large to small"),
        ("1h5step", "from large to small"),
        ("1ep5step", "can be combined"),
    ],
)
def test_anything_else_is_refused_with_the_argument_named(value: str, message: str) -> None:
    """A2, D47, D53: bare numbers, booleans and settings that could never fire are errors."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse(value, what="every", units=ALL_UNITS)
    assert str(caught.value).startswith(f"every={value!r}")


@pytest.mark.parametrize("value", ["0.1dur", "2cycle", Time(2, Unit.CYCLE), Time(1, Unit.DURATION)])
def test_units_that_mean_nothing_to_the_caller_are_refused(value: str | Time) -> None:
    """D47: what cannot be resolved or is never counted would silently do nothing."""
    message = (
        rf"until='{value}': (dur|cycle) cannot be used here; known: step \(ba\), ep, sp, tok, s"
    )
    with pytest.raises(UsageError, match=message):
        parse(value, what="until")


@given(counts | seconds | fractions)
def test_a_time_is_read_back_from_its_text(time: Time) -> None:
    assert parse(str(time), units=ALL_UNITS) == time
    assert parse(f" {str(time).upper()} ", units=ALL_UNITS) == time
    assert parse(time, units=ALL_UNITS) is time


@given(
    st.text(max_size=12)
    | st.from_regex(r"[0-9.e_+-]{1,8}(step|h|m|s|tok|dur|cycle|iter)", fullmatch=True)
)
def test_any_text_gives_a_time_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse(text, units=ALL_UNITS).value > 0


@given(fraction=st.fractions(Fraction(1, 10**6), 1), whole=st.integers(1, 10**15))
def test_a_fraction_of_a_count_is_the_first_count_at_which_that_much_is_done(
    fraction: Fraction, whole: int
) -> None:
    part = Time(float(fraction), Unit.DURATION)
    resolved = part.resolve(Time(whole, Unit.TOKEN))
    assert resolved.unit is Unit.TOKEN
    assert resolved.exact - 1 < part.exact * whole <= resolved.exact


@pytest.mark.parametrize(
    ("fraction", "whole", "resolved"),
    [
        ("0.1dur", "1000step", "100step"),
        ("0.1dur", "70sp", "7sp"),
        ("0.35dur", "4ep", "2ep"),
        ("0.5dur", "3h50min", "6900.0s"),
        ("1dur", "5cycle", "5cycle"),
        ("20step", "4ep", "20step"),
    ],
)
def test_fractions_are_exact_as_they_are_written(fraction: str, whole: str, resolved: str) -> None:
    """C31: a tenth of a thousand steps is a hundred, and a run in seconds has fractions too."""
    time = parse(fraction, units=ALL_UNITS).resolve(parse(whole, units=ALL_UNITS))
    assert str(time) == resolved


@pytest.mark.parametrize("whole", [None, Time(1, Unit.DURATION)])
def test_a_fraction_of_an_unknown_length_is_an_error(whole: Time | None) -> None:
    """D47."""
    with pytest.raises(UsageError, match=r"0\.1dur is a fraction of the run"):
        parse("0.1dur", units=ALL_UNITS).resolve(whole)
    assert parse("5step").resolve(None) == parse("5step")


@given(st.sampled_from(COUNTED_UNITS), st.integers(1, 10**9), st.integers(1, 10**9))
def test_arithmetic_is_that_of_the_values(unit: Unit, a: int, b: int) -> None:
    assert (Time(a, unit) + Time(b, unit)).value == a + b
    assert (Time(a, unit) < Time(b, unit)) == (a < b)
    assert Time(a, unit) / Time(b, unit) == Fraction(a, b)
    assert Time(a + b, unit) - Time(b, unit) == Time(a, unit)


def test_fractions_of_the_run_add_up_to_one_at_most() -> None:
    tenth = parse("0.1dur", units=ALL_UNITS)
    assert parse("0.3dur", units=ALL_UNITS) / tenth == 3
    assert 10 * tenth == parse("1dur", units=ALL_UNITS)
    with pytest.raises(UsageError, match="at most 1"):
        11 * tenth


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
    now = Timestamp(step=1, epoch=2, samples=3, tokens=4, wall_s=5.5, cycle=6)
    units = [*COUNTED_UNITS, Unit.SECOND]
    assert [unit.read_progress(now) for unit in units] == [1, 2, 3, 4, 6, 5.5]
    assert [get_counter(now, unit, "it") for unit in units] == [1, 2, 3, 4, 6, 5.5]
    names = ["step", "epoch", "samples", "tokens", "cycle", "wall_s"]
    assert [argument_name(unit) for unit in units] == names


def test_what_the_loop_does_not_count_is_none_or_an_error_that_names_it() -> None:
    """D47."""
    assert Unit.TOKEN.read_progress(Timestamp(step=1)) is None
    with pytest.raises(UsageError, match="'it' can never fire: tokens was not given"):
        get_counter(Timestamp(step=1), Unit.TOKEN, "it")


def test_a_counter_cannot_tell_a_fraction_of_the_run() -> None:
    with pytest.raises(UsageError, match="resolve"):
        Unit.DURATION.read_progress(Timestamp(step=1))
    with pytest.raises(UsageError, match="length is not known"):
        get_counter(Timestamp(step=1), Unit.DURATION, "it")
