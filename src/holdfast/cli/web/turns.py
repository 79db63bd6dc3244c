"""Turns of threads that read local roots, so that requests are answered meanwhile.

Reading takes the interpreter's lock: the threads of 50 runs would keep it from the one that answers
requests, and from each other. In roots that are remote, they wait for the network instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 2.0
"""How long a thread waits for its turn at most, as the one before it may hang."""


class Turns:
    """Turns of threads, one at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._num_pages = 0

    @contextmanager
    def take_turn(self, root: str) -> Iterator[None]:
        """Wait until no other thread reads, and no page is being made."""
        has_turn = "://" not in root and self._turn.acquire(timeout=WAIT_S)
        try:
            if has_turn:
                self._is_idle.wait(WAIT_S)
            yield
        finally:
            if has_turn:
                self._turn.release()

    @contextmanager
    def hold_turns(self) -> Iterator[None]:
        """Begin no turn during the block, which is in the thread of the event loop."""
        self._num_pages += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_pages -= 1
            if not self._num_pages:
                self._is_idle.set()


LOOKING, READING = Turns(), Turns()
"""Turns of what a page of all runs waits for, and of the curves, which come later."""
