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
from typing import Protocol

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
        _end_with_status_1()


def _end_with_status_1() -> None:
    """An exit handler cannot change the status, so end here, after everybody else's handlers."""
    atexit.unregister(_finish_all)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)


atexit.register(_finish_all)
