"""Durations with a unit, and counters of training, also within the current epoch or cycle.

Independent of what durations are used for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import total_ordering

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp

MAX_COUNT = 2**63 - 1
_START = Timestamp(step=0, samples=0, tokens=0)


class Unit(Enum):
    """Unit of a duration. The value is the spelling that `str(Time)` uses."""

    STEP = "step"
    EPOCH = "ep"
    SAMPLE = "sp"
    TOKEN = "tok"
    SECOND = "s"
    CYCLE = "cycle"
    """A round of training that the loop defines, such as one pass of a curriculum."""
    DURATION = "dur"
    """The length of the whole run; a Time in this unit is a fraction of it."""

    # Units are looked up after each step of a training, and Enum's own hash is Python code.
    __hash__ = object.__hash__

    def read_progress(self, now: Timestamp) -> int | float | None:
        """Return the progress `now` in this unit; None when the training loop does not count it.

        Raises:
            UsageError: the unit is the length of the run, which a Timestamp does not know.
        """
        if self is Unit.DURATION:
            raise UsageError(
                "a fraction of the run cannot be read off a counter; resolve() it first"
            )
        count: int | float | None = getattr(now, _ARGUMENTS[self])
        return count


ALL_UNITS = frozenset(Unit)
PLAIN_UNITS = ALL_UNITS - {Unit.CYCLE, Unit.DURATION}
"""Units with the same meaning in every run."""


_COUNTS = {
    **dict.fromkeys(("step", "steps", "ba", "batch", "batches"), Unit.STEP),
    **dict.fromkeys(("ep", "epoch", "epochs"), Unit.EPOCH),
    **dict.fromkeys(("sp", "sample", "samples"), Unit.SAMPLE),
    **dict.fromkeys(("tok", "token", "tokens"), Unit.TOKEN),
    **dict.fromkeys(("cycle", "cycles"), Unit.CYCLE),
}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_ITERATIONS = ("iter", "iters", "iteration", "iterations")
_SPELLINGS = {
    Unit.STEP: "step (ba)",
    Unit.EPOCH: "ep",
    Unit.SAMPLE: "sp",
    Unit.TOKEN: "tok",
    Unit.CYCLE: "cycle",
    Unit.DURATION: "dur",
    Unit.SECOND: "s, min, h, d",
}
_PART = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,4})?)\s*([a-z]+)\s*", re.ASCII)

_ARGUMENTS = {
    Unit.STEP: "step",
    Unit.EPOCH: "epoch",
    Unit.SAMPLE: "samples",
    Unit.TOKEN: "tokens",
    Unit.SECOND: "wall_s",
    Unit.CYCLE: "cycle",
    Unit.DURATION: "max_duration",
}
_UNITS = {**_COUNTS, **dict.fromkeys(_SECONDS, Unit.SECOND), "dur": Unit.DURATION}


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Time:
    """A duration above zero: a count of its unit, seconds, or a fraction of the run.

    Counts are whole, but for epochs: an interval may be a part of one.

    Times of one unit can be compared, added, subtracted and divided. Anything else, also a bare
    number, is a `UsageError`: no unit is an obvious default.

    >>> Time.parse("1h30m") / Time.parse("10min")
    Fraction(9, 1)
    """

    value: int | float
    unit: Unit

    def __post_init__(self) -> None:
        may_be_float = self.unit in (Unit.SECOND, Unit.DURATION, Unit.EPOCH)
        allowed: tuple[type, ...] = (int, float) if may_be_float else (int,)
        most = 1 if self.unit is Unit.DURATION else MAX_COUNT
        if isinstance(self.value, bool) or not isinstance(self.value, allowed):
            kind = "number" if may_be_float else "whole number"
            raise UsageError(f"{self.value!r} {self.unit.value}: must be a {kind}")
        if not (math.isfinite(self.value) and 0 < self.value <= most):
            raise UsageError(
                f"{self.value!r} {self.unit.value}: must be above zero and at most {most}"
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
        self._same_unit(other, "divided by")
        return self.exact / other.exact

    def __mul__(self, times: int) -> Time:
        if isinstance(times, bool) or not isinstance(times, int):
            raise UsageError(f"{self} can be multiplied by a whole number, not by {times!r}")
        return Time(self.value * times, self.unit)

    __rmul__ = __mul__

    @classmethod
    def parse(
        cls,
        value: str | Time,
        *,
        what: str = "time",
        units: Collection[Unit] = PLAIN_UNITS,
        parts: bool = False,
    ) -> Time:
        """Parse a `Time` from text: `500step`, `2ep`, `1e9tok`, `90min`, `1h30m`, `0.1dur`.

        Letter case, blanks and underscores in numbers do not matter. `what` names the argument in
        the error. `units` are those that the caller supports: `cycle` only where the loop counts
        cycles, `dur` only where the length of the run will be known. `Unit` has all of them.
        With `parts` a number of epochs may have a fraction: the caller will know their length.

        Raises:
            UsageError: no unit, an unknown one, one that is not in `units`, a fraction of something
                that is counted, or a value that is not above zero.
        """
        if not isinstance(value, str | Time):
            raise UsageError(
                f"{what}={value!r}: must be text with a unit, like '500step' or '30min'"
            )
        try:
            time = value if isinstance(value, Time) else _parse_time(value, units)
        except UsageError as error:
            raise UsageError(f"{what}={value!r}: {error}") from None
        if time.unit not in units:
            raise UsageError(
                f"{what}={str(value)!r}: {time.unit.value} cannot be used here; "
                f"{_list_known_units(units)}"
            )
        if time.is_part_of_epoch and not parts:
            raise UsageError(f"{what}={str(value)!r}: must be a whole number of epochs")
        return time

    def resolve(self, max_duration: Time | None) -> Time:
        """Convert a fraction of the run into the unit of `max_duration`; other times stay.

        Counts are rounded up, to the first step, say, at which that much of the run is done.

        >>> str(Time.parse("0.1dur", units=Unit).resolve(Time.parse("1005step")))
        '101step'

        Raises:
            UsageError: it is a fraction of the run, whose length is not known.
        """
        if self.unit is not Unit.DURATION:
            return self
        if max_duration is None or max_duration.unit is Unit.DURATION:
            raise UsageError(
                f"{self} is a fraction of the run: give the run's length (max_duration) in another "
                "unit"
            )
        exact = self.exact * max_duration.exact
        if max_duration.unit is Unit.SECOND:
            return Time(float(exact), Unit.SECOND)
        return Time(math.ceil(exact), max_duration.unit)

    @property
    def is_part_of_epoch(self) -> bool:
        """Whether it is a number of epochs with a fraction, such as "0.5ep"."""
        return self.unit is Unit.EPOCH and self.value % 1 != 0

    def in_steps(self, epoch: Time) -> Fraction:
        """Return the exact number of steps of a duration in epochs, each as long as `epoch`.

        >>> Time.parse("0.5ep", parts=True).in_steps(Time.parse("7step"))
        Fraction(7, 2)
        """
        return self.exact * epoch.exact

    @property
    def exact(self) -> Fraction:
        """The value as an exact fraction: 0.1 is one tenth."""
        return Fraction(str(self.value))

    def _same_unit(self, other: object, verb: str) -> int | float:
        if not isinstance(other, Time):
            raise UsageError(f"{self} cannot be {verb} {other!r}: give it a unit")
        if other.unit is not self.unit:
            raise UsageError(f"{self} cannot be {verb} {other}: the units differ")
        return other.value


parse = Time.parse


def parse_goal(until: str | Time) -> Time:
    """Parse the argument `until`, the goal of a training."""
    goal = parse(until, what="until")
    if goal.unit is Unit.SECOND:
        raise UsageError(
            f"until={until!r}: a goal is counted, such as '10_000step' or '2ep'; "
            "to end by the clock, give max_time"
        )
    return goal


def parse_limit_s(max_time: str | Time) -> float:
    """Parse the argument `max_time`, a duration, into seconds."""
    duration = parse(max_time, what="max_time")
    if duration.unit is not Unit.SECOND:
        raise UsageError(f"max_time={str(max_time)!r}: must be a time, such as '3h50min'")
    return float(duration.value)


def get_counter(now: Timestamp, unit: Unit, asker: object) -> int | float:
    """Return a counter that `asker` needs, or raise if the loop does not count it."""
    if unit is Unit.DURATION:
        raise UsageError(f"'{asker}' is a fraction of the run, whose length is not known")
    value = unit.read_progress(now)
    if value is None:
        raise UsageError(f"'{asker}' can never fire: {argument_name(unit)} was not given")
    return value


def argument_name(unit: Unit) -> str:
    """Return the name of the argument that passes the counter of `unit`."""
    return _ARGUMENTS[unit]


def _list_known_units(units: Collection[Unit]) -> str:
    return "known: " + ", ".join(text for unit, text in _SPELLINGS.items() if unit in units)


def _parse_time(text: str, units: Collection[Unit]) -> Time:
    parts = _split(text, units)
    unit = _UNITS[parts[0][1]]
    if unit is Unit.SECOND:
        return _clock_time(parts)
    if len(parts) > 1:
        raise UsageError("only units of time can be combined, as in 1h30m")
    return _fraction(parts[0][0]) if unit is Unit.DURATION else _parse_count(*parts[0])


def _split(text: str, units: Collection[Unit]) -> list[tuple[Decimal, str]]:
    """Split `text` into (number, unit) pairs; raises `UsageError` for an unknown unit."""
    parts: list[tuple[Decimal, str]] = []
    rest = text.strip().lower()
    while match := _PART.match(rest):
        parts.append((Decimal(match[1]), match[2]))
        rest = rest[match.end() :]
    if rest or not parts:
        raise UsageError(f"must be a number and a unit; {_list_known_units(units)}")
    for _, unit in parts:
        if unit in _ITERATIONS:
            raise UsageError(
                f"unit {unit!r} is a step for most and a round of several epochs for others: "
                "write step, ep or cycle instead"
            )
        if unit not in _UNITS:
            raise UsageError(f"unknown unit {unit!r}; {_list_known_units(units)}")
    return parts


def _fraction(number: Decimal) -> Time:
    if not 0 < number <= 1:
        raise UsageError("a fraction of the run must be above zero and at most 1")
    return Time(1 if number == 1 else float(number), Unit.DURATION)


def _parse_count(number: Decimal, unit: str) -> Time:
    # Compared before it becomes an int: an int of 1e9999 costs, of 1e999999999 it costs all memory.
    is_whole = number <= MAX_COUNT and number == number.to_integral_value()
    if _COUNTS[unit] is Unit.EPOCH and not is_whole and number <= MAX_COUNT:
        return Time(float(number), Unit.EPOCH)
    if not is_whole:
        raise UsageError(f"{unit} must be a whole number, at most {MAX_COUNT}")
    return Time(int(number), _COUNTS[unit])


def _clock_time(parts: list[tuple[Decimal, str]]) -> Time:
    sizes = [_SECONDS.get(unit, 0) for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True) or 0 in sizes:
        raise UsageError("list units from large to small, each once, as in 1h30m")
    if any(number < 0 for number, _ in parts):
        raise UsageError("must be above zero")
    seconds = sum(
        (number * size for (number, _), size in zip(parts, sizes, strict=True)), Decimal()
    )
    if seconds > MAX_COUNT:
        raise UsageError(f"at most {MAX_COUNT} seconds")
    is_whole = seconds == seconds.to_integral_value()
    return Time(int(seconds) if is_whole else float(seconds), Unit.SECOND)


@dataclass(slots=True)
class _Round:
    """Number and start of the current epoch, or of the current cycle."""

    number: int | None = 0
    """Number of epochs or cycles that ended before it; None: not known."""
    began: Timestamp | None = _START
    """Timestamp at which it began; None: not known."""
    is_counted: bool = False
    """Whether a number was passed before, so that a different one means a new epoch or cycle."""

    def look(self, number: int | None, now: Timestamp) -> Timestamp | None:
        """Update the number; returns when the current epoch or cycle began, None if unknown."""
        if number is None:
            return None
        if number != self.number:
            self.number, self.began = number, now if self.is_counted else None
        self.is_counted = True
        return self.began


class Odometer:
    """Adds counts within the current epoch and cycle to timestamps.

    An epoch begins at the call that counts the one before as ended. After a resume it continues
    from what the checkpoint recorded. Where the first call is in a later epoch than the first, the
    counts within that epoch stay unknown.
    """

    def __init__(self) -> None:
        self._last: Timestamp | None = None
        self._epoch = _Round()
        self._cycle = _Round()
        self._step_wall_s: float | None = None

    def restore_counts(self, stored: Timestamp) -> None:
        """Continue counting from the timestamp of a checkpoint."""
        self._last = stored
        self._epoch = _Round(stored.epoch, None, is_counted=stored.epoch is not None)
        if stored.step_in_epoch is not None:
            self._epoch.began = Timestamp(
                step=stored.step - stored.step_in_epoch,
                samples=_difference(stored.samples, stored.samples_in_epoch),
                tokens=_difference(stored.tokens, stored.tokens_in_epoch),
                wall_s=stored.wall_s - (stored.epoch_wall_s or 0.0),
            )
        self._cycle = _Round(stored.cycle, None, is_counted=stored.cycle is not None)
        if stored.step_in_cycle is not None:
            self._cycle.began = Timestamp(step=stored.step - stored.step_in_cycle)
        self._step_wall_s = stored.step_wall_s

    def count_within_rounds(self, now: Timestamp) -> Timestamp:
        """Return `now` with counts within its epoch and cycle. Call in the order of time."""
        self._time_the_step(now)
        epoch, cycle = self._epoch.look(now.epoch, now), self._cycle.look(now.cycle, now)
        return Timestamp(
            step=now.step,
            epoch=now.epoch,
            samples=now.samples,
            tokens=now.tokens,
            wall_s=now.wall_s,
            step_in_epoch=None if epoch is None else max(now.step - epoch.step, 0),
            samples_in_epoch=None if epoch is None else _difference(now.samples, epoch.samples),
            tokens_in_epoch=None if epoch is None else _difference(now.tokens, epoch.tokens),
            epoch_wall_s=None if epoch is None else max(now.wall_s - epoch.wall_s, 0.0),
            step_wall_s=self._step_wall_s,
            cycle=now.cycle,
            step_in_cycle=None if cycle is None else max(now.step - cycle.step, 0),
        )

    def _time_the_step(self, now: Timestamp) -> None:
        """Update the time of a step: the mean of the steps since the last call."""
        last = self._last if self._last is not None else Timestamp(step=0)
        if now.step > last.step:
            self._step_wall_s = max(now.wall_s - last.wall_s, 0.0) / (now.step - last.step)
            self._last = now


def _difference(total: int | None, part: int | None) -> int | None:
    return None if total is None or part is None else max(total - part, 0)


def span(seconds: float) -> str:
    """Format a duration for display.

    >>> span(0.25), span(90), span(5400), span(400_000)
    ('0.25 s', '90 s', '1.5 h', '4.63 d')
    """
    for size, unit, least in ((86_400, "d", 2 * 86_400), (3600, "h", 3600), (60, "min", 120)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
