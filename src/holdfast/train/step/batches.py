"""Batches of consecutive epochs, and detection of the end of an epoch.

A checkpoint after an epoch's last step must record that the epoch is over, so its end must be
detected as soon as its last batch was taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from holdfast.data.randomness import preserved
from holdfast.saving.positions import READ_AHEAD, TakenBatches, loaders
from holdfast.train.step.undo import Boundary

logger = logging.getLogger("holdfast")

_END = object()


class Batches:
    """Takes the batches of steps from data whose iteration gives the rest of an epoch."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._rest: Iterator[Any] = iter(())
        self.own: list[Any] = []
        """Batches of the last window without those that are a neighbor's (`Loader.own_samples`),
        which count for that rank alone."""
        self._is_trusted = True
        self._is_warned = False
        self._loader = next((loader for _, loader in loaders({"data": data})), None)
        self._num_used, self._held = 0, [0, 0]
        """Batches that windows got, and those that a wrapper held after an epoch's first windows"""

    def start_iterating(self) -> None:
        """Begin an iteration of the rest of the current epoch, or of the next one."""
        if self._loader is not None:
            self._num_used, self._held = self._loader.batches_taken.num_taken, []
        with preserved():
            # Starting an iteration of torch's own loaders draws from the global generator.
            self._rest = iter(self._data)

    def drop_iteration(self) -> None:
        """Drop the iteration and its data workers, which may take long to end."""
        self._rest = iter(())

    def window(self, size: int) -> list[Any]:
        """Take the next `size` batches: fewer at the end of an epoch, none after it.

        All are taken before the first one is trained on, so that between steps the position of the
        data is at the end of a step's batches.
        """
        taken, self.own = [], []
        for batch in islice(self._rest, size):
            taken.append(batch)
            if getattr(self._data, "own_samples", None) != 0:
                self.own.append(batch)
        if self._loader is not None and len(self._held) < 2:
            self._warn_if_held(self._loader.batches_taken, len(taken))
        return taken

    def _warn_if_held(self, taking: TakenBatches, num_taken: int) -> None:
        """Log a warning if a wrapper holds batches after the first two windows of an iteration.

        Later ones could lack batches that the wrapper has dropped.
        """
        self._num_used += num_taken
        self._held.append(taking.num_taken - self._num_used)
        is_constant = len({*self._held}) == 1 or taking.is_by_other_thread
        if len(self._held) == 2 and min(self._held) > 0 and is_constant:
            self._loader = None
            logger.warning(
                "data: %d more batches were taken from the loader than were trained on%s",
                self._held[1],
                READ_AHEAD,
            )

    def are_over(self, num_taken: int) -> bool:
        """Whether the last batch of the epoch was taken.

        Judged by `at_epoch_end` of the data, or else by its length and the `num_taken` batches that
        were taken. If so, another batch is requested, so that the data ends the epoch. If there is
        one after all, the data's position is restored, a warning is logged, and neither sign is
        trusted again.
        """
        if not self._is_trusted or not self._says_end(num_taken):
            return False
        kept = Boundary(data=self._data, components={})
        if next(self._rest, _END) is _END:
            return True
        kept.restore_snapshot()
        self.start_iterating()
        self._is_trusted = False
        logger.warning(
            "data: after %d batches there was no end of the epoch, though %s says so. What is "
            "counted in epochs may come a step late: len() must give the batches of a whole epoch",
            num_taken,
            type(self._data).__name__,
        )
        return False

    def ended_late(self, num_taken: int, step: int) -> None:
        """Log a warning, once, if an epoch's end is detected only after its last step.

        `num_taken` batches of the epoch were taken."""
        if not self._is_warned and not self._was_detectable(num_taken):
            self._is_warned = True
            logger.warning(
                "data: only now is it known that step %d was the last of its epoch, so what is "
                "counted in epochs (saves, validations) comes a step late: %s has neither "
                "at_epoch_end nor the length of an epoch in batches (docs/trainer.md)",
                step,
                type(self._data).__name__,
            )

    def _says_end(self, num_taken: int) -> bool:
        declared = getattr(self._data, "at_epoch_end", None)
        return bool(num_taken == self._length() if declared is None else declared)

    def _was_detectable(self, num_taken: int) -> bool:
        if not self._is_trusted:
            return True  # a warning was logged
        return hasattr(self._data, "at_epoch_end") or self._length() == num_taken

    def _length(self) -> int | None:
        try:
            return len(self._data)
        except (TypeError, NotImplementedError):
            return None
