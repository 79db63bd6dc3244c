"""Pause of Python's garbage collector while very many objects are created at once.

With twenty thousand tensors its repeated passes take a quarter of the time of a load.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable automatic garbage collection inside the block; restore the setting after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
