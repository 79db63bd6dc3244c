"""Search for the live objects of a class in this process."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """List the live objects of a class and of its subclasses, in any thread.

    `gc.get_objects()` must not be used for this: it also returns tuples that other threads are
    still building, and CPython fails there with a SystemError or a crash if somebody holds one.
    """
    kinds, new = {kind}, [kind]
    while new:
        found: list[type[Any]] = new.pop().__subclasses__()
        kinds.update(found)
        new += found
    # By type, as `isinstance` would call proxies.
    return [item for item in gc.get_referrers(*kinds) if type(item) in kinds]
