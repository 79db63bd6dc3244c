"""Steps that are not trained on: their batches are taken and counted, and that is all."""

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
    """An update that leaves some steps out, such as those whose data made the loss jump."""

    update: Update
    training: Training
    ranges: tuple[range, ...]

    @staticmethod
    def of(given: Iterable[range], update: Update, training: Training) -> Train:
        """The update itself where there is nothing to leave out.

        Raises:
            UsageError: something else than ranges of steps.
        """
        ranges = tuple(given)
        for item in ranges:
            if not isinstance(item, range) or item.step != 1 or not 1 <= item.start < item.stop:
                raise UsageError(f"skip_steps: {item!r} must be a range such as range(100, 110)")
        if not ranges:
            return update
        return WithoutSteps(update=update, training=training, ranges=ranges)

    def __call__(self, window: Sequence[Any]) -> LazyMetrics:
        """Train on the batches, or leave them out."""
        step = self.training.present_step
        if any(step in item for item in self.ranges):
            return self.update.leave_out()
        return self.update(window)
