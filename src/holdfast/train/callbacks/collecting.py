"""Ready-made callback that collects garbage at fixed steps instead of at any moment."""

from __future__ import annotations

import gc

from holdfast.arguments import checked
from holdfast.policy.clock import Time, Unit
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.training import Metrics, Training


class CollectGarbage(Callback):
    """Collects Python's garbage at the same steps on all ranks, and at no other time in `fit`.

    Automatic collection starts at different moments on different ranks, and each rank then waits
    for the slowest one. It is off while `fit` runs. Its former state is restored when `fit` ends,
    also by an error.

    Args:
        every: number of steps between collections, such as "100step".

    Raises:
        UsageError: `every` is not a number of steps.
    """

    @checked(but=("every",))
    def __init__(self, every: str | Time = "100step") -> None:
        self._every = int(Time.parse(every, what="CollectGarbage: every", units=(Unit.STEP,)).value)
        self._must_enable = False

    def fit_start(self, training: Training) -> None:
        """Turn automatic collection off, and collect once."""
        self._must_enable = gc.isenabled()
        gc.disable()
        gc.collect()

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Collect if the step is due."""
        if training.counters.step % self._every == 0:
            gc.collect()

    def close(self, training: Training) -> None:
        """Turn automatic collection on again if it was on."""
        if self._must_enable:
            self._must_enable = False
            gc.enable()
