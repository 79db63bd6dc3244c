"""Skipping of steps: their batches are taken and counted, but not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import UsageError
from holdfast.train.training import Training
from holdfast.train.window.loop import Update
from holdfast.train.window.metrics import LazyMetrics

Train = Callable[[Sequence[Any]], LazyMetrics]
"""Trains on the batches of a step; gives its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutSteps:
    """An update that skips some steps, such as those whose data made the loss jump."""

    update: Update
    training: Training
    ranges: tuple[range, ...]

    @staticmethod
    def of(given: Iterable[range], update: Update, training: Training) -> Train:
        """Wrap `update`; returns it unchanged if no steps are to be skipped.

        Raises:
            UsageError: an item is not a range of steps.
        """
        ranges = tuple(given)
        for item in ranges:
            if not isinstance(item, range) or item.step != 1 or not 1 <= item.start < item.stop:
                raise UsageError(f"skip_steps: {item!r} must be a range such as range(100, 110)")
        if not ranges:
            return update
        return WithoutSteps(update=update, training=training, ranges=ranges)

    def __call__(self, window: Sequence[Any]) -> LazyMetrics:
        """Train on the batches, or skip them."""
        step = self.training.present_step
        if any(step in item for item in self.ranges):
            return self.update.leave_out()
        return self.update(window)
