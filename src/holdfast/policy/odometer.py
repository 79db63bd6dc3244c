"""Counts within the current epoch and cycle, computed from the totals of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.format.manifest import Timestamp

_START = Timestamp(step=0, samples=0, tokens=0)


@dataclass(slots=True)
class _Round:
    """The current epoch, or the current cycle."""

    number: int | None = 0
    """Number of rounds that ended before it; None: not known."""
    began: Timestamp | None = _START
    """Timestamp at which it began; None: not known."""
    is_told: bool = False
    """Whether a number was passed before, so that a different one means a new round."""

    def look(self, number: int | None, now: Timestamp) -> Timestamp | None:
        """Return where the current round began; None if that is unknown or not counted."""
        if number is None:
            return None
        if number != self.number:
            self.number, self.began = number, now if self.is_told else None
        self.is_told = True
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

    def stand_on(self, stored: Timestamp) -> None:
        """Continue from the timestamp of a checkpoint."""
        self._last = stored
        self._epoch = _Round(stored.epoch, None, is_told=stored.epoch is not None)
        if stored.step_in_epoch is not None:
            self._epoch.began = Timestamp(
                step=stored.step - stored.step_in_epoch,
                samples=_difference(stored.samples, stored.samples_in_epoch),
                tokens=_difference(stored.tokens, stored.tokens_in_epoch),
                wall_s=stored.wall_s - (stored.epoch_wall_s or 0.0),
            )
        self._cycle = _Round(stored.cycle, None, is_told=stored.cycle is not None)
        if stored.step_in_cycle is not None:
            self._cycle.began = Timestamp(step=stored.step - stored.step_in_cycle)
        self._step_wall_s = stored.step_wall_s

    def look(self, now: Timestamp) -> Timestamp:
        """Add the counts to `now`, which is no earlier than in the last call."""
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
