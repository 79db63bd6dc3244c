"""Counts of the batches taken from a Loader or Stream, to detect read-ahead and evaluations.

The position counts batches that were taken. A wrapper that holds one in hand has taken it too soon,
and an evaluation takes batches on which nothing is trained.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch


class Taking:
    """Counts the batches that were taken since the position was loaded, and records the caller."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.num_evaluated = 0
        """Batches taken with gradients switched off, after others with them."""
        self.is_interrupted = False
        """Whether an iterator was left before its end."""
        self.has_begun = False
        """Whether any batch was asked for."""
        self._is_open = False
        self._caller: tuple[int, object] | None = None
        """Id and code of the frame that has asked for the last batch."""
        self._thread: int | None = None
        """Thread of that frame."""

    def start_iteration(self) -> None:
        """Record that a new iterator starts."""
        self.has_begun = True
        self.is_interrupted = self.is_interrupted or self._is_open
        self._is_open = False

    def count_batch(self) -> None:
        """Count a batch and record its caller; call it from the generator that yields the batch."""
        self._is_open = True
        if torch.is_grad_enabled():
            self.num_taken += 1
        elif self.num_taken:
            self.num_evaluated += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_of_data(frame):
            frame = frame.f_back
        self._caller, self._thread = (id(frame), frame.f_code), threading.get_ident()

    def finish_iteration(self) -> None:
        """Record that an iterator is exhausted."""
        self._is_open = False

    @property
    def is_by_other_thread(self) -> bool:
        """Whether the last batch was taken in another thread than the current one."""
        return self._thread not in (None, threading.get_ident())

    @property
    def is_by_loop(self) -> bool:
        """Whether the loop, on the current stack, took the last batch itself, and no wrapper."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if (id(frame), frame.f_code) == self._caller:
                return True
            frame = frame.f_back
        return False


def _is_of_data(frame: FrameType) -> bool:
    """Whether a frame runs code of `holdfast.data`; code run by `exec` may have no `__name__`."""
    return str(frame.f_globals.get("__name__", "")).startswith(__package__)
