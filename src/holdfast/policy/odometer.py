"""Counts within the present epoch and cycle, out of the totals that a loop tells."""

from __future__ import annotations

from holdfast.format.manifest import Timestamp


class Odometer:
    """Completes timestamps: knows where the present epoch and the present cycle began.

    An epoch begins at the look that counts the one before as ended. After a resume it goes on
    from what the checkpoint recorded.
    """

    def __init__(self) -> None:
        self._last: Timestamp | None = None
        self._epoch = Timestamp(step=0)
        self._cycle = Timestamp(step=0)
        self._step_wall_s: float | None = None

    def stand_on(self, stored: Timestamp) -> None:
        """Go on from a checkpoint."""
        self._last = stored
        self._epoch = Timestamp(
            step=stored.step - (stored.step_in_epoch or 0),
            epoch=stored.epoch,
            samples=_before(stored.samples, stored.samples_in_epoch),
            tokens=_before(stored.tokens, stored.tokens_in_epoch),
            wall_s=stored.wall_s - (stored.epoch_wall_s or 0.0),
        )
        self._cycle = Timestamp(step=stored.step - (stored.step_in_cycle or 0), cycle=stored.cycle)
        self._step_wall_s = stored.step_wall_s

    def look(self, now: Timestamp) -> Timestamp:
        """`now`, no earlier than at the look before, with the counts that follow from all looks."""
        self._time_the_step(now)
        if now.epoch is not None and now.epoch != (self._epoch.epoch or 0):
            self._epoch = now
        if now.cycle is not None and now.cycle != (self._cycle.cycle or 0):
            self._cycle = now
        began = self._epoch
        counts = now.epoch is not None
        return Timestamp(
            step=now.step,
            epoch=now.epoch,
            samples=now.samples,
            tokens=now.tokens,
            wall_s=now.wall_s,
            step_in_epoch=max(now.step - began.step, 0) if counts else None,
            samples_in_epoch=_within(now.samples, began.samples) if counts else None,
            tokens_in_epoch=_within(now.tokens, began.tokens) if counts else None,
            epoch_wall_s=max(now.wall_s - began.wall_s, 0.0) if counts else None,
            step_wall_s=self._step_wall_s,
            cycle=now.cycle,
            step_in_cycle=None if now.cycle is None else max(now.step - self._cycle.step, 0),
        )

    def _time_the_step(self, now: Timestamp) -> None:
        """Where several steps lie between two looks, their mean."""
        last = self._last if self._last is not None else Timestamp(step=0)
        if now.step > last.step:
            self._step_wall_s = max(now.wall_s - last.wall_s, 0.0) / (now.step - last.step)
            self._last = now


def _before(total: int | None, within: int | None) -> int | None:
    return None if total is None else total - (within or 0)


def _within(total: int | None, began: int | None) -> int | None:
    return None if total is None else max(total - (began or 0), 0)
