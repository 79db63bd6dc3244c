"""Durations with a unit, and reading them off a Timestamp.

Owns the units and their spelling. Knows nothing of what a duration is used for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import total_ordering

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp

MAX_COUNT = 2**63 - 1


class Unit(Enum):
    """What is counted. The value is the spelling that `str(Time)` uses."""

    STEP = "step"
    EPOCH = "ep"
    SAMPLE = "sp"
    TOKEN = "tok"
    SECOND = "s"


_COUNTS = {
    **dict.fromkeys(("step", "steps", "ba", "batch", "batches"), Unit.STEP),
    **dict.fromkeys(("ep", "epoch", "epochs"), Unit.EPOCH),
    **dict.fromkeys(("sp", "sample", "samples"), Unit.SAMPLE),
    **dict.fromkeys(("tok", "token", "tokens"), Unit.TOKEN),
}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_REFUSED = {
    **dict.fromkeys(("iter", "iters", "iteration", "iterations"), "write step or ep instead"),
    **dict.fromkeys(("dur", "cycle", "cycles"), "not supported by this version of Holdfast"),
}
_SPELLINGS = "step (ba), ep, sp, tok, s, min, h, d"
_PART = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,4})?)\s*([a-z]+)\s*", re.ASCII)

_ARGUMENTS = {
    Unit.STEP: "step",
    Unit.EPOCH: "epoch",
    Unit.SAMPLE: "samples",
    Unit.TOKEN: "tokens",
    Unit.SECOND: "wall_s",
}


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Time:
    """A duration above zero: a whole count of its unit, or seconds.

    Times of one unit can be compared, added, subtracted and divided. Anything else, also a bare
    number, is a `UsageError`: there is no unit that everybody means.

    >>> parse("1h30m") / parse("10min")
    Fraction(9, 1)
    """

    value: int | float
    unit: Unit

    def __post_init__(self) -> None:
        allowed: tuple[type, ...] = (int, float) if self.unit is Unit.SECOND else (int,)
        if isinstance(self.value, bool) or not isinstance(self.value, allowed):
            raise UsageError(f"{self.value!r} {self.unit.value}: must be a whole number")
        if not (math.isfinite(self.value) and 0 < self.value <= MAX_COUNT):
            raise UsageError(
                f"{self.value!r} {self.unit.value}: must be above zero and at most {MAX_COUNT}"
            )

    def __str__(self) -> str:
        return f"{self.value}{self.unit.value}"

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Time):
            return NotImplemented
        return (self.value, self.unit) == (other.value, other.unit)

    def __lt__(self, other: Time) -> bool:
        return self.value < self._same_unit(other, "compared with")

    def __add__(self, other: Time) -> Time:
        return Time(self.value + self._same_unit(other, "added to"), self.unit)

    def __sub__(self, other: Time) -> Time:
        return Time(self.value - self._same_unit(other, "reduced by"), self.unit)

    def __truediv__(self, other: Time) -> Fraction:
        divisor = self._same_unit(other, "divided by")
        return Fraction(self.value) / Fraction(divisor)

    def __mul__(self, times: int) -> Time:
        if isinstance(times, bool) or not isinstance(times, int):
            raise UsageError(f"{self} can be multiplied by a whole number, not by {times!r}")
        return Time(self.value * times, self.unit)

    __rmul__ = __mul__

    def _same_unit(self, other: object, verb: str) -> int | float:
        if not isinstance(other, Time):
            raise UsageError(f"{self} cannot be {verb} {other!r}: give it a unit")
        if other.unit is not self.unit:
            raise UsageError(f"{self} cannot be {verb} {other}: the units differ")
        return other.value


def parse(value: str | Time, *, what: str = "time") -> Time:
    """The `Time` that `value` spells: `500step`, `2ep`, `1e9tok`, `90min`, `1h30m`.

    Letter case, blanks and underscores in numbers do not matter. `what` names the argument in
    the error.

    Raises:
        UsageError: no unit, an unknown one, a fraction of something that is counted, or a value
            that is not above zero.
    """
    if isinstance(value, Time):
        return value
    if not isinstance(value, str):
        raise UsageError(f"{what}={value!r}: must be text with a unit, like '500step' or '30min'")
    parts = _split(value, what)
    try:
        return _clock_time(parts) if parts[0][1] in _SECONDS else _count(parts)
    except UsageError as error:
        raise UsageError(f"{what}={value!r}: {error}") from None


def reading(now: Timestamp, unit: Unit) -> int | float | None:
    """How far `now` is in `unit`, or None when the training loop does not count it."""
    counters: dict[Unit, int | float | None] = {
        Unit.STEP: now.step,
        Unit.EPOCH: now.epoch,
        Unit.SAMPLE: now.samples,
        Unit.TOKEN: now.tokens,
        Unit.SECOND: now.wall_s,
    }
    return counters[unit]


def argument_name(unit: Unit) -> str:
    """The argument by which a training loop tells the counter of `unit`."""
    return _ARGUMENTS[unit]


def _split(text: str, what: str) -> list[tuple[Decimal, str]]:
    """Every (number, unit) of `text`; the units are known ones."""
    parts: list[tuple[Decimal, str]] = []
    rest = text.strip().lower()
    while match := _PART.match(rest):
        parts.append((Decimal(match[1]), match[2]))
        rest = rest[match.end() :]
    if rest or not parts:
        raise UsageError(f"{what}={text!r}: must be a number and a unit: {_SPELLINGS}")
    for _, unit in parts:
        if unit in _REFUSED:
            raise UsageError(f"{what}={text!r}: unit {unit!r}: {_REFUSED[unit]}")
        if unit not in _COUNTS and unit not in _SECONDS:
            raise UsageError(f"{what}={text!r}: unknown unit {unit!r}; known: {_SPELLINGS}")
    return parts


def _count(parts: list[tuple[Decimal, str]]) -> Time:
    if len(parts) > 1:
        raise UsageError("only hours, minutes and the like can be put together")
    number, unit = parts[0]
    # Compared before it becomes an int: an int of 1e9999 costs, of 1e999999999 it costs all memory.
    if number > MAX_COUNT or number != number.to_integral_value():
        raise UsageError(f"{unit} must be a whole number, at most {MAX_COUNT}")
    return Time(int(number), _COUNTS[unit])


def _clock_time(parts: list[tuple[Decimal, str]]) -> Time:
    sizes = [_SECONDS.get(unit, 0) for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True) or 0 in sizes:
        raise UsageError("parts must go from the larger unit to the smaller, each once, like 1h30m")
    if any(number < 0 for number, _ in parts):
        raise UsageError("must be above zero")
    seconds = sum(
        (number * size for (number, _), size in zip(parts, sizes, strict=True)), Decimal()
    )
    if seconds > MAX_COUNT:
        raise UsageError(f"at most {MAX_COUNT} seconds")
    is_whole = seconds == seconds.to_integral_value()
    return Time(int(seconds) if is_whole else float(seconds), Unit.SECOND)
