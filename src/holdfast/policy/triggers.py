"""Triggers: when to save, as pure functions of the last call, the last save and the present.

A trigger returns a reason or None; it does not decide what is saved, and how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Literal, NoReturn, TypeAlias, get_args

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, Unit, get_counter, parse

Event: TypeAlias = Literal[
    "start", "step", "epoch", "cycle", "evaluation", "exception", "signal", "demand", "end"
]
"""Event at which a trigger is evaluated; `step` after each completed step."""
Metrics: TypeAlias = Mapping[str, float]
SaveFunction: TypeAlias = Callable[[Timestamp, Metrics, Event], bool]

NO_METRICS: Metrics = MappingProxyType({})


class Trigger(ABC):
    """Decides when to save. `a | b` saves when either of them fires."""

    __slots__ = ()

    @property
    def is_pure(self) -> bool:
        """Whether `due` follows from counters and events alone, which are alike on all ranks."""
        return False

    @abstractmethod
    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Return the reason to save at `now`, or None.

        `previous` is the progress at the trigger's last call (after a resume: that of the
        checkpoint), `last_saved` that of the last save; None stands for the start of training,
        with nothing loaded. `metrics` are those known at `event`.

        Raises:
            UsageError: the training loop does not pass the counter that the trigger needs.
        """

    def progress(
        self, unit: Unit, previous: Timestamp | None, now: Timestamp
    ) -> tuple[float, float]:
        """Return the progress in `unit` at the trigger's last evaluation, and now.

        Raises:
            UsageError: the training loop does not count that unit.
        """
        here = get_counter(now, unit, self)
        return (unit.read_progress(previous) if previous else None) or 0, here

    def resolve(self, max_duration: Time | None) -> Trigger:
        """Return the trigger with fractions of the run converted by the run's length.

        Raises:
            UsageError: there are fractions, and the length is not known.
        """
        return self

    @property
    def needs_epoch(self) -> bool:
        """Whether a part of an epoch is in it, whose length `with_epoch` has to give."""
        return False

    def with_epoch(self, epoch: Time) -> Trigger:
        """Return the trigger with parts of an epoch converted to steps; `epoch` has so many."""
        return self

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            return NotImplemented
        return AnyTrigger((*parts_of(self), *parts_of(other)))


@dataclass(frozen=True, slots=True, init=False)
class Every(Trigger):
    """Save each time that training has covered another `interval`.

    Counted units fire when a multiple of the interval was reached or passed since the last
    call: the same as `step % interval == 0` while the counter grows by one, and right when it
    jumps. Seconds are training time since the last save. A fraction of the run ("0.1dur") is
    exact: of 1,005 steps a tenth is 100.5, so that ten saves are made and the last is at the end.
    So is a part of an epoch: of 7 steps half an epoch is 3.5, and step 4, 7, 11, 14 are due.

    >>> Every("500step")
    Every(interval='500step')
    >>> Every("0.5ep", epoch="28step").size
    14
    """

    interval: Time
    """Distance from one save to the next."""
    max_duration: Time | None
    """Length of the run, for an interval that is a fraction of it."""
    epoch: Time | None
    """Steps of an epoch, for an interval such as "0.5ep", which is then counted in steps."""
    unit: Unit
    """Unit of the counter that decides."""
    size: Fraction | float
    """The interval in that unit: exact for counts."""

    def __init__(
        self,
        interval: str | Time,
        *,
        max_duration: str | Time | None = None,
        epoch: str | Time | None = None,
    ) -> None:
        time = parse(interval, what="Every: interval", units=ALL_UNITS, parts=True)
        steps = None if epoch is None else parse(epoch, what="epoch", units={Unit.STEP})
        if steps is not None and time.unit is not Unit.EPOCH:
            raise UsageError(f"every='{time}': only an interval in epochs needs epoch")
        whole = None
        if max_duration is not None:
            whole = parse(max_duration, what="max_duration", units=ALL_UNITS - {Unit.DURATION})
            if time.unit is not Unit.DURATION:
                raise UsageError(f"every='{time}': only a fraction of the run needs max_duration")
        unit = whole.unit if whole else Unit.STEP if steps else time.unit
        size = time.exact * whole.exact if whole else time.in_steps(steps) if steps else time.exact
        object.__setattr__(self, "interval", time)
        object.__setattr__(self, "max_duration", whole)
        object.__setattr__(self, "epoch", steps)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(
            self, "size", float(size) if unit is Unit.SECOND else _simplify_size(size)
        )

    @property
    def is_pure(self) -> bool:
        """Whether the interval is counted, and not measured by the clock."""
        return self.unit is not Unit.SECOND

    def __repr__(self) -> str:
        lengths = {"max_duration": self.max_duration, "epoch": self.epoch}
        more = "".join(f", {name}='{time}'" for name, time in lengths.items() if time)
        return f"Every(interval='{self.interval}'{more})"

    def __str__(self) -> str:
        return f"every {self.interval}"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire when another interval is complete; seconds count from the last save."""
        if self.needs_epoch:
            _raise_unknown_epoch(self.interval)
        before, current = self.progress(self.unit, previous, now)
        if self.unit is Unit.SECOND:
            is_due = current - (last_saved.wall_s if last_saved else 0.0) >= self.size
        else:
            is_due = current // self.size > before // self.size
        return str(self) if is_due else None

    def resolve(self, max_duration: Time | None) -> Every:
        """Return the trigger with a fraction of the run taken of `max_duration`."""
        if self.needs_epoch:
            _raise_unknown_epoch(self.interval)
        if self.unit is not Unit.DURATION:
            return self
        self.interval.resolve(max_duration)  # raises when the length is not known
        return Every(self.interval, max_duration=max_duration)

    @property
    def needs_epoch(self) -> bool:
        """Whether the interval is a part of an epoch whose length is not known."""
        return self.epoch is None and self.interval.is_part_of_epoch

    def with_epoch(self, epoch: Time) -> Every:
        """Return the trigger with a part of an epoch counted in steps."""
        return Every(self.interval, epoch=epoch) if self.needs_epoch else self


@dataclass(frozen=True, slots=True, init=False)
class At(Trigger):
    """Save at fixed points of training: `At("100step", "2ep", "0.5dur")` or `At(steps=[100, 250])`.

    A point that a counter jumps over fires at the first call after it. Seconds are training time.
    """

    times: tuple[Time, ...]

    @check_arguments(but=["times"])
    def __init__(self, *times: str | Time, steps: Iterable[int] = ()) -> None:
        given = [parse(time, what="At: times", units=ALL_UNITS, parts=True) for time in times]
        given += map(_at_step, steps)
        twice = sorted({str(time) for time in given if given.count(time) > 1})
        if not given or twice:
            wrong = f"{', '.join(twice)} is given twice" if twice else "must name a place"
            raise UsageError(f"At: {wrong}")
        object.__setattr__(self, "times", tuple(given))

    @property
    def is_pure(self) -> bool:
        """Whether no point is by the clock."""
        return all(time.unit is not Unit.SECOND for time in self.times)

    def __str__(self) -> str:
        return f"at {', '.join(map(str, self.times))}"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire at the points that were reached or passed since the last call."""
        reached = []
        for time in self.times:
            if time.is_part_of_epoch:
                _raise_unknown_epoch(time)
            before, current = self.progress(time.unit, previous, now)
            if before < time.value <= current:
                reached.append(str(time))
        return f"at {', '.join(reached)}" if reached else None

    def resolve(self, max_duration: Time | None) -> At:
        """Return the trigger with fractions of the run as points in the unit of `max_duration`."""
        for time in self.times:
            if time.is_part_of_epoch:
                _raise_unknown_epoch(time)
        return At(*{time.resolve(max_duration): None for time in self.times})

    @property
    def needs_epoch(self) -> bool:
        """Whether a point is within an epoch."""
        return any(time.is_part_of_epoch for time in self.times)

    def with_epoch(self, epoch: Time) -> At:
        """Return the trigger with points within an epoch as the first step that reaches them."""
        return At(
            *{
                Time(ceil(time.in_steps(epoch)), Unit.STEP) if time.is_part_of_epoch else time: None
                for time in self.times
            }
        )


@dataclass(frozen=True, slots=True, init=False)
class WallClock(Trigger):
    """Save at each multiple of `interval` in training time: after 10 min, 20 min, 30 min, …

    Unlike `Every("10min")` it does not wait longer after a save for another reason.
    """

    interval: Time

    def __init__(self, interval: str | Time) -> None:
        time = parse(interval, what="WallClock: interval", units={Unit.SECOND})
        object.__setattr__(self, "interval", time)

    def __str__(self) -> str:
        return f"every {self.interval} of training"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire when a multiple of the interval was reached or passed."""
        before = previous.wall_s if previous else 0.0
        size = self.interval.value
        return str(self) if now.wall_s // size > before // size else None


@check_arguments(but=["function"])
@dataclass(frozen=True, slots=True)
class When(Trigger):
    """Save when a function of (timestamp, metrics, event) returns True."""

    function: SaveFunction
    name: str = ""
    """Reason to record; by default the name of the function."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UsageError(f"When: function={self.function!r} cannot be called")
        if not self.name:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            object.__setattr__(self, "name", name)

    def __str__(self) -> str:
        return self.name

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Call the function; its errors are raised to the caller."""
        answer: object = self.function(now, metrics, event)
        if answer is None:  # a forgotten `return` would mean that nothing is ever saved
            raise UsageError(f"{self.name}() returned None; it must return True or False")
        return self.name if answer else None


@dataclass(frozen=True, slots=True, init=False)
class On(Trigger):
    """Save at events other than steps: `On("exception", "signal")`, `On("epoch")`."""

    events: tuple[Event, ...]

    def __init__(self, *events: Event) -> None:
        known = [event for event in get_args(Event) if event not in ("start", "step", "end")]
        wrong = [event for event in events if event not in known]
        if wrong or not events:
            raise UsageError(
                f"On: events: {', '.join(map(repr, wrong)) or 'nothing'} is unknown; choose from "
                f"{', '.join(known)}; for the others there are AtStart(), "
                'Every("1step") and AtEnd()'
            )
        object.__setattr__(self, "events", tuple(dict.fromkeys(events)))

    @property
    def is_pure(self) -> bool:
        """True: all ranks pass the same events."""
        return True

    def __str__(self) -> str:
        return f"on {', '.join(self.events)}"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire at one of the events if a step was completed since the last save."""
        return event if event in self.events and _is_new(last_saved, now) else None


@check_arguments()
@dataclass(frozen=True, slots=True)
class AtStart(Trigger):
    """Save before the first step of a run for which nothing was loaded."""

    always: bool = False
    """Whether to save also if weights or another run's checkpoint were loaded; only at step 0."""

    @property
    def is_pure(self) -> bool:
        """True: all ranks pass the same events."""
        return True

    def __str__(self) -> str:
        return "at the start"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire at the event `start` of step 0."""
        is_fresh = last_saved is None and (self.always or previous is None)
        return "initial" if event == "start" and now.step == 0 and is_fresh else None


@dataclass(frozen=True, slots=True)
class AtEnd(Trigger):
    """Save when training ends, unless the last save was made at that very step."""

    @property
    def is_pure(self) -> bool:
        """True: all ranks pass the same events."""
        return True

    def __str__(self) -> str:
        return "at the end"

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Fire at the event `end` if a step was completed since the last save."""
        return "final" if event == "end" and _is_new(last_saved, now) else None


@dataclass(frozen=True, slots=True)
class AnyTrigger(Trigger):
    """Save when any of `triggers` fires, with all their reasons."""

    triggers: tuple[Trigger, ...]

    @property
    def is_pure(self) -> bool:
        """Whether all parts are."""
        return all(part.is_pure for part in self.triggers)

    def __str__(self) -> str:
        return " | ".join(map(str, self.triggers))

    def due(
        self,
        previous: Timestamp | None,
        last_saved: Timestamp | None,
        now: Timestamp,
        metrics: Metrics = NO_METRICS,
        event: Event = "step",
    ) -> str | None:
        """Evaluate each trigger; join the reasons of those that fire."""
        answers = [part.due(previous, last_saved, now, metrics, event) for part in self.triggers]
        return ", ".join(answer for answer in answers if answer) or None

    def resolve(self, max_duration: Time | None) -> AnyTrigger:
        """Return the trigger with each part resolved."""
        return AnyTrigger(tuple(part.resolve(max_duration) for part in self.triggers))

    @property
    def needs_epoch(self) -> bool:
        """Whether any part does."""
        return any(part.needs_epoch for part in self.triggers)

    def with_epoch(self, epoch: Time) -> AnyTrigger:
        """Return the trigger with the parts of an epoch of each converted."""
        return AnyTrigger(tuple(part.with_epoch(epoch) for part in self.triggers))


def parts_of(trigger: Trigger) -> tuple[Trigger, ...]:
    """Return the triggers that `|` combined; a single trigger is its only part."""
    return trigger.triggers if isinstance(trigger, AnyTrigger) else (trigger,)


def is_other_step(last: Timestamp | None, now: Timestamp) -> bool:
    """Whether `last`, the last save, is of another step than `now`, or None."""
    return last is None or last.step != now.step


def _raise_unknown_epoch(time: Time) -> NoReturn:
    """Raise `UsageError` for a part of an epoch whose length is not known."""
    raise UsageError(
        f"'{time}' is a part of an epoch, and only a Trainer knows the steps of an epoch: write "
        f"Every('{time}', epoch='100step') with their number, or the interval in steps"
    )


def _at_step(step: int) -> Time:
    try:
        return Time(step, Unit.STEP)
    except UsageError as error:
        raise UsageError(f"At: steps: {error}") from None


def _is_new(last_saved: Timestamp | None, now: Timestamp) -> bool:
    """Whether a step was completed since the last save, or since step 0."""
    return now.step > 0 and is_other_step(last_saved, now)


def _simplify_size(size: Fraction) -> Fraction | int:
    return size.numerator if size.denominator == 1 else size
