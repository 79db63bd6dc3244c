"""Calls of a manager that all ranks make alike, also where one of them raises before it says so.

Saves, loads and calls of `maybe_save` are counted by each rank for itself (decision 0035). A call
that raises on one rank alone, for instance because of a wrong argument, must count there as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from holdfast.control.external_events import ExternalEvents
from holdfast.errors import ManagerUnusable
from holdfast.loading.apply import CheckpointApplier
from holdfast.ranks.coordinator import Coordinator
from holdfast.saving.distributed import DistributedSaves
from holdfast.saving.settings_history import as_text

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["save", "maybe_save", "load"]
_ALIKE = frozenset(
    {
        "which",
        "unhealthy",
        "components",
        "strict",
        "rename",
        "in_place",
        "new",
        "without",
        "override",
        "required",
    }
)
"""Arguments of loads that must be equal on all ranks."""


def count_calls(kind: Kind) -> Callable[[F], F]:
    """Decorator of a manager's method: its calls count on this rank, also if they raise at once.

    A call while another thread is in one raises `ManagerUnusable`: both would claim the run.
    """

    def decorated(method: F) -> F:
        @wraps(method)
        def call(manager: Any, *args: Any, **named: Any) -> Any:
            calls: Calls | None = manager.calls
            if not manager.one_thread.acquire(blocking=False):
                raise ManagerUnusable(
                    f"{method.__name__}(): another thread is in a call of this manager. A manager "
                    "is for one thread at a time: put a lock around the calls, or save in one "
                    "thread"
                )
            try:
                if calls is None:
                    return method(manager, *args, **named)
                if kind != "load":
                    with calls.one(kind):
                        return method(manager, *args, **named)
                with calls.one_load(method, manager, *args, **named):
                    return method(manager, *args, **named)
            finally:
                manager.one_thread.release()

        return cast(F, call)

    return decorated


class Calls:
    """Counter of the calls of one manager with several ranks."""

    def __init__(
        self, together: DistributedSaves, outside: ExternalEvents, applying: CheckpointApplier
    ) -> None:
        self._together = together
        self._outside = outside
        self._applying = applying

    @classmethod
    def make_counter(
        cls,
        ranks: Coordinator,
        together: DistributedSaves,
        outside: ExternalEvents,
        applying: CheckpointApplier,
    ) -> Calls | None:
        """Make a counter; None for one rank, whose calls need none."""
        return None if ranks.world_size == 1 else cls(together, outside, applying)

    @contextmanager
    def one(self, kind: Kind) -> Iterator[None]:
        """Count the call in the `with` block."""
        if kind == "save":
            with self._together.one_save():
                yield
        else:
            with self._outside.one_call(), self._together.one_call():
                yield

    @contextmanager
    def one_load(self, method: Callable[..., Any], *args: Any, **named: Any) -> Iterator[None]:
        """Count the call of a method that loads, with these arguments, in the `with` block."""
        self._together.count_anew()
        with self._applying.one_load(method.__name__, _arguments(method, *args, **named)):
            yield


def _arguments(method: Callable[..., Any], *args: Any, **named: Any) -> dict[str, str]:
    """Return, as text, the arguments of a load that must be equal on all ranks.

    Ranks may choose different leaves, as each may have its own.
    """
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*args, **named)
    except TypeError:
        return {}  # the call raises it
    bound.apply_defaults()
    return {
        name: _format_argument(value) for name, value in bound.arguments.items() if name in _ALIKE
    }


def _format_argument(value: object) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return repr(sorted(map(str, value)))
    if isinstance(value, Mapping):  # in any order, as of a comprehension over a set
        return repr(dict(sorted(value.items(), key=str)))
    return as_text(value) if callable(value) else repr(value)
