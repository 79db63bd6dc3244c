"""Checks of the Trainer's arguments: ranges of numbers, counted units, and events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.policy.clock import Time, Unit, argument_name, parse
from holdfast.policy.savers import SavePolicy, as_trigger
from holdfast.policy.triggers import At, Event, Every, On, SaveFunction, Trigger, parts_of

EVENTS = ("start", "step", "epoch", "cycle", "evaluation", "exception", "signal", "demand")
"""Events at which the Trainer evaluates triggers; `signal` only if it handles signals, `cycle`
only if it has cycles."""


def check_range(name: str, value: Any, lowest: int, beyond: int) -> None:
    """Raise `UsageError` unless `value` is a whole number, at least `lowest`, below `beyond`."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < beyond:
        raise UsageError(f"{name}={value!r}: must be a whole number, at least {lowest}")


def check_counted(unit: Unit, what: str, extra: Collection[Unit]) -> None:
    """Check that a Trainer counts a unit; `extra`: counted units besides steps and epochs."""
    if unit is Unit.CYCLE and unit not in extra:
        raise UsageError(f"{what}: the Trainer has no cycles; give counts=Counts(cycle=…)")
    if unit in (Unit.SAMPLE, Unit.TOKEN) and unit not in extra:
        name = argument_name(unit)
        raise UsageError(f"{what}: {name} are not counted; give counts=Counts({name}=…)")


@check_arguments(but=("cycle",))
@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Settings of what a run counts besides steps and epochs, for goals, intervals and triggers.

    Counts(samples=len, cycle="2ep")
    """

    samples: Callable[[Any], int] | None = None
    """Function that counts the samples of a batch. None: samples are not counted."""
    tokens: Callable[[Any], int] | None = None
    """Function that counts the tokens of a batch. None: tokens are not counted."""
    cycle: str | Time | None = None
    """Length of a cycle, such as "2ep". None: there are no cycles."""

    def __post_init__(self) -> None:
        time = self.cycle_length
        if time is None:
            return
        if time.unit is Unit.SECOND:
            raise UsageError(
                f"cycle={self.cycle!r}: by the clock it would not be the same after a resume"
            )
        check_counted(time.unit, f"cycle={str(time)!r}", self.units - {Unit.CYCLE})

    @property
    def cycle_length(self) -> Time | None:
        """Length of a cycle, parsed; None if there are no cycles."""
        return None if self.cycle is None else parse(self.cycle, what="cycle")

    def totals(self, batches: Sequence[Any]) -> tuple[int | None, int | None]:
        """Count the samples and the tokens in batches; None for each that is not counted."""
        samples, tokens = (
            None if count is None else sum(map(count, batches))
            for count in (self.samples, self.tokens)
        )
        return samples, tokens

    @property
    def units(self) -> frozenset[Unit]:
        """Units that are counted besides steps and epochs."""
        given = {Unit.SAMPLE: self.samples, Unit.TOKEN: self.tokens, Unit.CYCLE: self.cycle}
        return frozenset(unit for unit, value in given.items() if value is not None)


def checked_every(
    every: str | Time | Trigger | SaveFunction | SavePolicy | None,
    extra: Collection[Unit],
    *,
    handles_signals: bool = True,
    validates: bool = True,
    what: str = "every",
) -> Trigger | SavePolicy | None:
    """Convert `every` to a trigger or policy that can fire; `what` is its name in errors."""
    if every is None:
        return None
    wanted = every if isinstance(every, SavePolicy) else as_trigger(every)
    for part in _list_triggers(wanted):
        _check_trigger_units(part, extra, what)
        if asks_for(part, "signal") and not handles_signals:
            raise UsageError(f"{what}: {part}: the Trainer handles no signals with stop=None")
        if asks_for(part, "evaluation") and not validates:
            raise UsageError(f"{what}: {part}: there is nothing to validate on; give validate=…")
    if isinstance(wanted, SavePolicy) and wanted.cooldown is not None:
        check_counted(wanted.cooldown.unit, f"{what}: cooldown='{wanted.cooldown}'", extra)
    return wanted


def asks_for(wanted: Trigger | SavePolicy | None, event: Event) -> bool:
    """Whether a trigger `On` the event is among the parts of `wanted`."""
    parts = () if wanted is None else _list_triggers(wanted)
    return any(isinstance(part, On) and event in part.events for part in parts)


def _list_triggers(wanted: Trigger | SavePolicy) -> Iterator[Trigger]:
    if isinstance(wanted, SavePolicy):
        for trigger in (wanted.permanent, wanted.ephemeral):
            yield from () if trigger is None else parts_of(trigger)
    else:
        yield from parts_of(wanted)


def _check_trigger_units(part: Trigger, extra: Collection[Unit], what: str) -> None:
    if isinstance(part, Every):
        check_counted(part.unit, f"{what}='{part.interval}'", extra)
    elif isinstance(part, At):
        for time in part.times:
            check_counted(time.unit, f"{what}: {part}", extra)
    elif isinstance(part, On):
        never = [event for event in part.events if event not in EVENTS]
        if Unit.CYCLE not in extra:
            never += [event for event in part.events if event == "cycle"]
        if never:
            raise UsageError(
                f"{what}: {part}: the Trainer has no event {', '.join(map(repr, never))}; the "
                "last step is always saved"
            )
