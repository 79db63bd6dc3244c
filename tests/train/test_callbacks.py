"""Callbacks: every hook reaches everybody in order, and names of states are unique."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.train import Callback, Logger
from holdfast.train.callbacks import Callbacks


def hooks() -> list[str]:
    return [
        name
        for name, member in inspect.getmembers(Callback, inspect.isfunction)
        if not name.startswith("_")
    ]


@pytest.mark.parametrize("hook", hooks())
def test_every_hook_reaches_every_callback_in_order_with_loggers_last(hook: str) -> None:
    """A30."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def recording(kind: type[Callback], name: str) -> Callback:
        def record(self: Callback, *arguments: Any) -> None:
            calls.append((name, arguments))

        return type(name, (kind,), {hook: record})()

    both = Callbacks([recording(Logger, "log"), recording(Callback, "a"), recording(Callback, "b")])
    arguments = tuple(
        object() for _ in list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
    )
    getattr(both, hook)(*arguments)
    assert calls == [("a", arguments), ("b", arguments), ("log", arguments)]


def test_states_have_names_of_their_own() -> None:
    """D55: by place and class, in the order that was given."""

    class WithÜmlautState(Callback):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    found = Callbacks([Callback(), WithÜmlautState(), WithÜmlautState()]).components
    assert list(found) == ["callback-1-with_mlautstate", "callback-2-with_mlautstate"]


def test_one_object_twice_is_refused() -> None:
    """D62: it would run twice."""
    callback = Callback()
    with pytest.raises(UsageError, match="twice"):
        Callbacks([callback, callback])


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(UsageError, match="not a holdfast"):
        Callbacks([print])  # type: ignore[list-item]
