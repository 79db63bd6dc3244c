"""Rows of zeros only, counted in pieces that cut rows anywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.numbers import numbers_of_element


class Rows:
    """Counts the rows of zeros in a run of a tensor's numbers.

    The first row counts only once the run before is known, if that has its beginning: see `extend`.
    """

    def __init__(self, spec: TensorSpec, first: int) -> None:
        """Count from number `first` of the tensor on."""
        self._length = math.prod(spec.shape[1:]) * numbers_of_element(spec.dtype)
        self.num_dead: int | None = 0 if len(spec.shape) > 1 else None
        """Rows of zeros that begin and end in the run; None where there are no rows."""
        self._filled = first % self._length if self._length else 0
        """Numbers of the row in progress that were added, or came before the run."""
        self._is_alive = False
        """Whether one of them that was added is not zero."""
        self._is_continued = self._filled > 0
        self._first: bool | None = None
        """Whether the end of a row that began before the run has a number that is not zero."""

    @property
    def are_counted(self) -> bool:
        """Whether the tensor has rows of numbers."""
        return self.num_dead is not None and self._length > 0

    def add_nonzero(self, num: int) -> None:
        """Add numbers of which none is zero."""
        if not self.are_counted:
            return
        end = self._filled + num
        if self._is_continued and self._first is None and end >= self._length:
            self._first = True
        self._filled = end % self._length
        self._is_alive = self._filled > 0

    def add_numbers(self, is_nonzero: Any) -> None:
        """Add numbers, given as which of them are not zero."""
        if self.num_dead is None or not self._length:
            return
        starts = np.arange(-self._filled % self._length, len(is_nonzero), self._length)
        if self._filled:
            starts = np.concatenate([[0], starts])
        alive = np.logical_or.reduceat(is_nonzero, starts)
        alive[0] |= self._is_alive
        num_ended, self._filled = divmod(self._filled + len(is_nonzero), self._length)
        ended = alive[:num_ended]
        if num_ended and self._is_continued and self._first is None:
            self._first, ended = bool(ended[0]), ended[1:]
        self.num_dead += int(np.count_nonzero(~ended))
        self._is_alive = bool(alive[-1]) if self._filled else False

    def extend(self, later: Rows) -> None:
        """Add the rows of the run that follows this one; this one begins with the tensor."""
        if self.num_dead is None or later.num_dead is None:
            return
        is_open = later._is_continued and later._first is None
        if later._first is not None:
            self.num_dead += not (self._is_alive or later._first)
        self.num_dead += later.num_dead
        self._is_alive = later._is_alive or (is_open and self._is_alive)
        self._filled = later._filled
