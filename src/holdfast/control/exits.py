"""Completion of saves under way when the interpreter exits (docs/decisions/0002).

Managers that were not closed are closed at exit, with a deadline. The outcome of a save under way
is written to standard error. If a save failed and its error was never raised, the process ends
with status 1: a scheduler must not take the run for complete.
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
    """Interface of a manager whose save under way is finished at exit."""

    def finish_at_exit(self) -> str | None:
        """Finish the save under way; return its outcome as text. Raises an error not yet raised."""
        ...


_open: weakref.WeakSet[Finishes] = weakref.WeakSet()
_failed: set[Finishes] = set()


def register(manager: Finishes) -> None:
    """Register a manager to be closed at exit."""
    _open.add(manager)


def unregister(manager: Finishes) -> None:
    """Unregister a manager that was closed."""
    _open.discard(manager)
    _failed.discard(manager)


def record_raised(manager: Finishes) -> None:
    """Record that the error of a manager's failed save was raised."""
    _failed.discard(manager)


def hold(manager: Finishes) -> None:
    """Keep a manager whose save failed alive until its error is raised."""
    _failed.add(manager)


def _finish_all() -> None:
    failed = False
    for manager in _failed.union(_open):
        try:
            outcome = manager.finish_at_exit()
        except HoldfastError as error:
            failed = True
            outcome = f"at exit: {error}"
        if outcome is not None:
            print(f"holdfast: {outcome}", file=sys.stderr)  # noqa: T201 - nobody else can be told
    if failed:
        globals()["_at_the_very_end"] = _EndWithStatus1()


class _EndWithStatus1:
    """Ends the process with status 1 when the interpreter clears its modules.

    An exit handler cannot change the status, and exiting inside one would skip the others. When
    modules are cleared, all handlers have run and the streams are flushed.
    """

    def __del__(self, end: Callable[[int], NoReturn] = os._exit) -> None:
        end(1)


# Finalizers of `weakref` are called by an exit handler that is registered with the first of them,
# and the last registered handler is called first. Coordinators end by one: after the last saves.
weakref.finalize(_EndWithStatus1, int).detach()
atexit.register(_finish_all)
