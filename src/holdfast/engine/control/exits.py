"""What happens to saves under way when the interpreter exits (docs/decisions/0002).

Managers that were not closed are closed here, with a deadline. What became of a save under way is
said on standard error. When a save failed and nobody was told, the process ends with status 1:
a scheduler must not take the run for complete.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

from holdfast.errors import HoldfastError


class Finishes(Protocol):
    """A manager, as far as this module knows it."""

    def finish_at_exit(self) -> str | None:
        """End what is under way; says what became of it. Raises what nobody was told."""
        ...


_open: weakref.WeakSet[Finishes] = weakref.WeakSet()
_failed: set[Finishes] = set()


def register(manager: Finishes) -> None:
    """Close this manager at exit unless it is closed before."""
    _open.add(manager)


def forget(manager: Finishes) -> None:
    """This manager was closed."""
    _open.discard(manager)
    _failed.discard(manager)


def told(manager: Finishes) -> None:
    """Somebody was told of this manager's failure."""
    _failed.discard(manager)


def hold(manager: Finishes) -> None:
    """A save of this manager failed: keep it until somebody is told, also when nobody has it."""
    _failed.add(manager)


def _finish_all() -> None:
    failed = False
    for manager in _failed.union(_open):
        try:
            said = manager.finish_at_exit()
        except HoldfastError as error:
            failed = True
            said = f"at exit: {error}"
        if said is not None:
            print(f"holdfast: {said}", file=sys.stderr)  # noqa: T201 - nobody else can be told
    if failed:
        globals()["_at_the_very_end"] = _EndWithStatus1()


class _EndWithStatus1:
    """Ends the process when the interpreter takes its modules apart.

    An exit handler cannot change the status, and ending inside one would rob the others of their
    turn. By the time that modules go, all handlers have run and the streams are flushed.
    """

    def __del__(self, end: Callable[[int], NoReturn] = os._exit) -> None:
        end(1)


atexit.register(_finish_all)
