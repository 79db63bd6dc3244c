"""Callbacks: every hook reaches everybody in order, and what is no hook is found at once."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.train import Callback, HookFailed, Logger, Training
from holdfast.train.callbacks.hooks import HOOKS
from holdfast.train.callbacks.registry import Callbacks


class Nobody:
    """A training that nothing is asked of."""


TRAINING: Any = Nobody()


def together(*callbacks: Any) -> Callbacks:
    return Callbacks(callbacks, TRAINING)


def made(kind: type[Callback], class_name: str, **members: Any) -> Callback:
    return type(class_name, (kind,), members)()


class WithState(Callback):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(
    ("members", "keyword"),
    [
        ({"state_dict": lambda self: {}}, "no load_state_dict"),
        ({"load_state_dict": lambda self, state: None}, "no state_dict"),
        ({"priority": "high"}, "priority='high'"),
        ({"watches": "val/loss"}, "watches='val/loss'"),
    ],
)
def test_half_a_state_and_wrong_attributes_are_refused(members: Any, keyword: str) -> None:
    with pytest.raises(UsageError, match=keyword):
        together(made(Callback, "Mine", **members))


def test_a_result_that_a_hook_gives_in_vain_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = together(made(Callback, "Mine", fit_start=lambda self, training: True))
    for _ in range(2):
        every.call_hook(Callback.fit_start)
    (text,) = [one.getMessage() for one in caplog.records]
    assert "Mine.fit_start" in text
    assert "request_stop" in text


def test_every_method_of_a_callback_is_a_hook_with_a_place_in_the_order() -> None:
    methods = [name for name, member in vars(Callback).items() if inspect.isfunction(member)]
    assert tuple(methods) == HOOKS


@pytest.mark.parametrize("hook", [name for name in HOOKS if name not in ("exception", "close")])
def test_every_hook_reaches_every_callback_in_order_with_loggers_last(hook: str) -> None:
    """A30."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def recording(kind: type[Callback], name: str, **members: Any) -> Callback:
        def record(self: Callback, *arguments: Any) -> None:
            calls.append((name, arguments))

        return made(kind, name, **members, **{hook: record})

    every = together(
        recording(Logger, "log", priority=9),
        recording(Callback, "a"),
        recording(Callback, "b"),
        recording(Callback, "early", priority=1),
        recording(Callback, "late", priority=-1),
    )
    arguments = tuple(
        object() for _ in list(inspect.signature(getattr(Callback, hook)).parameters)[2:]
    )
    every.call_hook(getattr(Callback, hook), *arguments)
    expected = (TRAINING, *arguments)
    others = ("early", "a", "b", "late")
    order = ("log", *others) if hook == "fit_start" else (*others, "log")
    assert calls == [(name, expected) for name in order]


def test_a_failing_hook_is_named_and_its_error_is_the_cause() -> None:
    error = RuntimeError("mine")

    class Fails(Callback):
        def fit_start(self, training: Training) -> None:
            raise error

    failing = Fails()
    with pytest.raises(
        HookFailed, match=r"Fails\.fit_start failed: RuntimeError\('mine'\)"
    ) as raised:
        together(failing).call_hook(Callback.fit_start)
    assert raised.value.__cause__ is error
    assert (raised.value.callback, raised.value.hook) == (failing, "fit_start")


def test_a_hook_that_fails_inside_a_hook_is_the_one_that_is_named() -> None:
    class Inner(Callback):
        def epoch_end(self, training: Training) -> None:
            raise ValueError

    class Outer(Callback):
        def fit_start(self, training: Training) -> None:
            both.call_hook(Callback.epoch_end)

    both = together(Inner(), Outer())
    with pytest.raises(HookFailed, match=r"Inner\.epoch_end"):
        both.call_hook(Callback.fit_start)


def test_an_interrupt_in_a_hook_stays_what_it_is() -> None:
    class Interrupted(Callback):
        def fit_start(self, training: Training) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together(Interrupted()).call_hook(Callback.fit_start)


def test_close_reaches_everybody_and_the_first_failure_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []

    class Closes(Callback):
        def close(self, training: Training) -> None:
            closed.append(str(self.name))
            if self.name != "fine":
                raise OSError(self.name)

    several = [Closes(), Closes(), Closes()]
    for callback, name in zip(several, ("first", "second", "fine"), strict=True):
        callback.name = name
    with (
        caplog.at_level(logging.ERROR, logger="holdfast"),
        pytest.raises(HookFailed, match="'first'"),
        together(*several).closing(),
    ):
        pass
    assert closed == ["first", "second", "fine"]
    assert "'second'" in caplog.text


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("on_step_end", "step_end"),
        ("on_anything", "looks like a hook"),
        ("step_ends", "step_end"),
        ("before_optimiser_step", "before_optimizer_step"),
        ("checkpoint_save", "checkpoint_saved"),
    ],
)
def test_what_looks_like_a_hook_and_is_none_is_refused(method: str, meant: str) -> None:
    """D62: when it is registered, before any hook has run."""
    with pytest.raises(UsageError, match=meant):
        together(made(Callback, "Misspelt", **{method: lambda self, training: None}))


def test_methods_of_ones_own_are_no_hooks() -> None:
    together(made(Callback, "Own", report=lambda self: None, _on_step=lambda self: None))


def test_a_hook_with_other_arguments_is_refused() -> None:
    def step_end(self: Callback, training: Training) -> None:
        pass

    short = made(Callback, "Short", step_end=step_end)
    with pytest.raises(UsageError, match=r"Short.step_end: must take \(self, training, metrics\)"):
        together(short)


def test_everything_wrong_is_told_at_once() -> None:
    wrong = made(Callback, "Misspelt", on_fit=lambda self: None)
    with pytest.raises(UsageError) as raised:
        together(print, wrong, wrong)
    for part in ("not a holdfast", "passed twice", "Misspelt.on_fit"):
        assert part in str(raised.value)


def test_states_have_names_of_their_own() -> None:
    """D55: after the class, also when another callback comes before them."""

    class WithÜmlautState(WithState):
        pass

    one = WithÜmlautState()
    assert list(together(one).components) == ["callback-with_mlautstate"]
    found = together(Callback(), Callback(), WithState(), one).components
    assert list(found) == ["callback-withstate", "callback-with_mlautstate"]


def test_two_states_of_one_class_need_names() -> None:
    """D55; issue 20, line 10: numbered by their places, they swapped their states when they changed
    places between two runs."""
    with pytest.raises(UsageError) as raised:
        together(WithState(), Callback(), WithState(), Callback())
    assert "name='withstate'" in str(raised.value)
    assert "name='withstate_2'" in str(raised.value)
    first, second, third = WithState(), WithState(), WithState()
    first.name, second.name = "withstate", "withstate_2"
    both = {"callback-withstate": first, "callback-withstate_2": second}
    assert together(first, second).components == both == together(second, first).components
    assert "callback-withstate_3" in together(third, second, first).components


def test_a_name_that_was_given_is_the_states_name() -> None:
    """D55."""
    first, second = WithState(), WithState()
    second.name = "withstate"
    assert together(first, second).components == {
        "callback-withstate": second,
        "callback-withstate_2": first,
    }


@pytest.mark.parametrize("name", ["", "Upper", "a b", "x" * 41, 5])
def test_names_that_cannot_be_stored_are_refused(name: Any) -> None:
    callback = WithState()
    callback.name = name
    with pytest.raises(UsageError, match="name"):
        together(callback)


def test_one_name_twice_is_refused() -> None:
    """D55."""
    first, second = WithState(), WithState()
    first.name = second.name = "same"
    with pytest.raises(UsageError, match="two are named 'same'"):
        together(first, second)


def test_one_object_twice_is_refused() -> None:
    """D62: it would run twice."""
    callback = Callback()
    with pytest.raises(UsageError, match="twice"):
        together(callback, callback)


def test_metrics_go_to_the_loggers_that_are_named() -> None:
    seen: list[str] = []

    class Records(Logger):
        def log(self, training: Training, metrics: Any) -> None:
            seen.append(str(self.name))

    loggers = [Records(), Records()]
    loggers[0].name, loggers[1].name = "one", "two"
    every = together(*loggers)
    every.call_hook_of(None, Callback.log, {})
    every.call_hook_of(["two"], Callback.log, {})
    assert seen == ["one", "two", "two"]
    for unknown in (["three"], "one"):
        with pytest.raises(UsageError, match="'one', 'two'"):
            every.call_hook_of(unknown, Callback.log, {})
