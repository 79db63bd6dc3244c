"""Skipping of steps: their batches are taken and counted, but not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.errors import UsageError
from holdfast.train.training import Training
from holdfast.train.window.loop import Update
from holdfast.train.window.metrics import LazyMetrics

Train = Callable[[Sequence[Any]], LazyMetrics]
"""Function that trains on the batches of a step and returns its metrics."""


def without_steps(given: Iterable[range], update: Update, training: Training) -> Train:
    """Wrap an update to skip some steps, such as those whose data made the loss jump.

    Returns `update` itself if no steps are to be skipped.

    Raises:
        UsageError: an item is not a range of steps.
    """
    ranges = tuple(given)
    for item in ranges:
        if not isinstance(item, range) or item.step != 1 or not 1 <= item.start < item.stop:
            raise UsageError(f"skip_steps: {item!r} must be a range such as range(100, 110)")
    if not ranges:
        return update

    def train(window: Sequence[Any]) -> LazyMetrics:
        step = training.present_step
        if any(step in item for item in ranges):
            return update.leave_out()
        return update(window)

    return train
