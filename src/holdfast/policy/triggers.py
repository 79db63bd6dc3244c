"""When to save: pure functions of where training was, when it last saved, and where it is."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, Unit, argument_name, parse, reading


@dataclass(frozen=True, slots=True, init=False)
class Every:
    """Save each time that training has covered another `interval`.

    Counted units fire when a multiple of the interval was reached or passed since the look
    before: the same as `step % interval == 0` while the counter grows by one, and right when it
    jumps. Seconds are training time since the last save.

    >>> Every("500step")
    Every(interval='500step')
    """

    interval: Time
    """How far from one save to the next."""

    def __init__(self, interval: str | Time) -> None:
        object.__setattr__(self, "interval", parse(interval, what="every"))

    def __repr__(self) -> str:
        return f"Every(interval='{self.interval}')"

    def due(self, previous: Timestamp | None, last_saved: Timestamp | None, now: Timestamp) -> bool:
        """Whether to save at `now`.

        `previous` is where the trigger was last asked (after a resume: where the checkpoint
        stood), `last_saved` where the last save was begun; None stands for the start of training.

        Raises:
            UsageError: the training loop does not tell the counter that the interval is about.
        """
        unit, size = self.interval.unit, self.interval.value
        current = reading(now, unit)
        if current is None:
            name = argument_name(unit)
            raise UsageError(f"every='{self.interval}' can never fire: {name} was not given")
        if unit is Unit.SECOND:
            return current - (last_saved.wall_s if last_saved else 0.0) >= size
        before = (reading(previous, unit) if previous else None) or 0
        return current // size > before // size
