"""Registry of a training's callbacks, which checks them and calls their hooks in order.

Checkpoints contain the names of `_name_callbacks` (tests/train/callbacks/test_callbacks.py).
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from holdfast.errors import HoldfastError, UsageError, listing
from holdfast.events import Sink
from holdfast.train.callbacks.hooks import HOOKS, Callback, Logger
from holdfast.train.callbacks.measuring import read_numbers
from holdfast.train.group import Group
from holdfast.train.training import Training

logger = logging.getLogger("holdfast")

P = ParamSpec("P")
T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,39}")
_STATE = ("state_dict", "load_state_dict")


class HookFailed(HoldfastError):
    """Error raised when a callback's hook fails; its cause is the error that the hook raised."""

    def __init__(self, callback: Callback, hook: str, error: Exception) -> None:
        self.callback = callback
        self.hook = hook
        super().__init__(f"{type(callback).__name__}.{hook} failed: {error!r}")


class Callbacks:
    """Calls hooks by priority, then in order, loggers last; those only on the leader."""

    def __init__(
        self, callbacks: Iterable[Callback], training: Training, *, is_leader: bool = True
    ) -> None:
        given = list(callbacks)
        _check_callbacks(given)
        self._training = training
        self._names = _name_callbacks(given)
        self._all = sorted(given, key=lambda item: (isinstance(item, Logger), -item.priority))
        called = [item for item in self._all if is_leader or not isinstance(item, Logger)]
        self._by_hook = {
            hook: [item for item in called if _overrides(item, hook)] for hook in HOOKS
        }
        # Loggers start first, to be ready for what other callbacks log as they start.
        self._by_hook["fit_start"].sort(key=lambda item: not isinstance(item, Logger))
        self._is_leader = is_leader
        self._warned_of: set[str] = set()
        self._logged: dict[bool, set[str]] = {True: set(), False: set()}
        """Names of the metrics that the Trainer logs itself (True), and that others log."""

    @property
    def all(self) -> tuple[Callback, ...]:
        """All callbacks, in the order of their calls."""
        return tuple(self._all)

    @property
    def components(self) -> dict[str, Any]:
        """Callbacks with a state to save, by component name."""
        return {
            f"callback-{name}": callback
            for name, callback in self._names.items()
            if _is_stateful(callback)
        }

    @property
    def step_numbers(self) -> dict[str, dict[str, float]]:
        """Numbers that callbacks recorded for the log of this step, by callback; reads tensors."""
        return {
            name: read_numbers(item.step_numbers)
            for name, item in self._names.items()
            if item.step_numbers
        }

    def pass_step_numbers(self, numbers: Mapping[str, Mapping[str, float]]) -> None:
        """Set the numbers that callbacks record for a step; none for callbacks not in `numbers`."""
        for name, item in self._names.items():
            item.step_numbers = numbers.get(name, {})

    @property
    def recording(self) -> list[Any]:
        """Loggers with a state to save, such as the id of the run to which they log."""
        return [item for item in self._all if isinstance(item, Logger) and _is_stateful(item)]

    @property
    def sinks(self) -> list[Sink]:
        """Receivers of events of the loggers that have one."""
        loggers = (item for item in self._all if isinstance(item, Logger))
        return [item.sink for item in loggers if item.sink is not None]

    def copy_logger_state(self, group: Group) -> None:
        """Copy the state of the leader's loggers, which alone are called, to those of all ranks."""
        recording = self.recording
        if not recording:
            return
        states = group.gather_values([item.state_dict() for item in recording])[0]
        if not group.is_leader:
            for item, state in zip(recording, states, strict=True):
                item.load_state_dict(state)

    @property
    def vetoes(self) -> list[str]:
        """Names of callbacks that currently veto ephemeral checkpoints."""
        return [name for name, callback in self._names.items() if callback.vetoes_ephemeral]

    @property
    def watched(self) -> dict[str, Sequence[str]]:
        """Metrics that callbacks watch, by the callbacks' names."""
        return {name: item.watches for name, item in self._names.items() if item.watches}

    def listens(self, hook: Callable[..., None]) -> bool:
        """Whether any callback overrides this hook."""
        return bool(self._by_hook[hook.__name__])

    def overrides(self, *hooks: str) -> bool:
        """Whether any callback that is not a logger overrides one of these hooks."""
        listeners = (callback for hook in hooks for callback in self._by_hook[hook])
        return any(not isinstance(callback, Logger) for callback in listeners)

    def call_hook(
        self,
        hook: Callable[Concatenate[Any, Training, P], None],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call a hook, such as `Callback.step_end`, of all callbacks that override it."""
        name = hook.__name__
        if hook is Callback.log and isinstance(metrics := arguments[0], Mapping):
            self._note_logged(metrics, is_of_trainer=True)
        for callback in self._by_hook[name]:
            if self._run_hook(callback, name, *arguments, **named) is not None:
                self._warn_of_result(callback, name)

    def transformed(self, hook: Callable[[Any, Training, T], T | None], value: T) -> T:
        """Pass a value through a hook of all callbacks; what a callback returns replaces it."""
        name = hook.__name__
        for callback in self._by_hook[name]:
            replaced = self._run_hook(callback, name, value)
            value = value if replaced is None else replaced
        return value

    def call_hook_of(
        self,
        to: Collection[str] | None,
        hook: Callable[Concatenate[Any, Training, P], None],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call a hook like `call_hook`; unless `to` is None, only of the callbacks named in it."""
        unknown = [name for name in to or () if name not in self._names]
        if unknown or isinstance(to, str):
            raise UsageError(f"to={to!r}: give a list of some of {list(self._names)}")
        if hook is Callback.log and isinstance(metrics := arguments[0], Mapping):
            self._note_logged(metrics, is_of_trainer=False)
        chosen = None if to is None else [self._names[name] for name in to]
        for callback in self._by_hook[hook.__name__]:
            if chosen is None or callback in chosen:
                self._run_hook(callback, hook.__name__, *arguments, **named)

    def _note_logged(self, names: Iterable[str], *, is_of_trainer: bool) -> None:
        """Warn, once for each name, that both the Trainer and a caller of `log` log a metric."""
        self._logged[is_of_trainer].update(names)
        both = (self._logged[True] & self._logged[False]) - self._warned_of
        self._warned_of |= both
        if both and self._is_leader:  # other ranks call no logger
            shown = ", ".join(map(repr, sorted(both)))
            logger.warning(
                "training.log: the Trainer logs %s, too, and loggers may keep one value a step: "
                "use another name, such as %r",
                shown,
                f"own/{min(both)}",
            )

    def _warn_of_result(self, callback: Callback, hook: str) -> None:
        """Warn, once for each hook, that its result is ignored, such as True to stop."""
        key = f"{type(callback).__name__}.{hook}"
        if key not in self._warned_of:
            self._warned_of.add(key)
            logger.warning(
                "%s returned a value, which is ignored. To end training, call "
                "training.request_stop(reason); only before_forward may return a batch; a hook "
                "cannot be async",
                key,
            )

    def warn_if_unrecorded(self, hook: Callable[..., None], names: Collection[str]) -> None:
        """Warn, once for each hook, that no logger records entries that other callbacks log."""
        kind = hook.__name__
        if not self._is_leader or not names or kind in self._warned_of:
            return  # other ranks call no logger
        if any(item.records_log for item in self._by_hook[kind]):
            return
        self._warned_of.add(kind)
        logger.warning(
            "training.log: no logger records %s (hook %r). Give the Trainer a logger, such as "
            "log='train.jsonl' or one in callbacks=[…]",
            ", ".join(map(repr, list(names)[:10])),
            kind,
        )

    def call_exception_hooks(self, error: BaseException) -> None:
        """Call the `exception` hook of all callbacks; errors that it raises are only logged."""
        for callback in self._by_hook["exception"]:
            try:
                callback.exception(self._training, error)
            except Exception:
                logger.exception("%s failed in its exception hook", type(callback).__name__)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Call all `close` hooks after the block; raise the first error at the end."""
        try:
            yield
        except BaseException:
            self._call_close_hooks(may_raise=False)
            raise
        self._call_close_hooks(may_raise=True)

    def _call_close_hooks(self, *, may_raise: bool) -> None:
        failures: list[HookFailed] = []
        for callback in self._by_hook["close"]:
            try:
                self._run_hook(callback, "close")
            except HookFailed as error:
                failures.append(error)
        for failure in failures[may_raise:]:
            logger.error("%s", failure)
        if may_raise and failures:
            raise failures[0]

    def without_any(self) -> Callbacks:
        """Return a registry of no callbacks, for the same training."""
        return Callbacks([], self._training)

    def _run_hook(self, callback: Callback, hook: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(callback, hook)(self._training, *arguments, **named)
        except HookFailed:
            raise  # already wrapped, by a hook called from this one
        except Exception as error:
            raise HookFailed(callback, hook, error) from error


def _overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback has its own method for a hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback)


def _check_callbacks(given: list[Callback]) -> None:
    wrong = [
        f"{item!r} is not a holdfast.train.Callback" for item in given if not _is_callback(item)
    ]
    if any(count > 1 for count in Counter(map(id, given)).values()):
        wrong.append("the same object is passed twice; it would run twice")
    for callback in filter(_is_callback, given):
        wrong += [f"{type(callback).__name__}.{problem}" for problem in _find_wrong_hooks(callback)]
        wrong += [
            f"{type(callback).__name__}: {problem}" for problem in _find_wrong_attributes(callback)
        ]
    if wrong:
        raise UsageError("callbacks:\n" + listing(wrong))


def _is_stateful(callback: Callback) -> bool:
    return all(hasattr(callback, method) for method in _STATE)


def _is_callback(item: object) -> bool:
    return isinstance(item, Callback)


def _find_wrong_hooks(callback: Callback) -> list[str]:
    """Describe hooks with other parameters, and methods that look like hooks."""
    found = []
    for name, method in inspect.getmembers(type(callback), inspect.isfunction):
        if name in HOOKS:
            if not _accepts(inspect.signature(method), name):
                expected = ", ".join(_list_parameters(name))
                found.append(f"{name}: must take ({expected})")
        elif not name.startswith("_"):
            meant = difflib.get_close_matches(name.removeprefix("on_"), HOOKS, 1, 0.8)
            if name.startswith("on_") or meant:
                hint = f"; is {meant[0]} meant" if meant else ""
                found.append(f"{name} looks like a hook, but is not one{hint}? (see docs/hooks.md)")
    return found


def _find_wrong_attributes(callback: Callback) -> list[str]:
    """Describe wrong attributes, and a state that is only saved or only loaded."""
    found, (save, load) = [], _STATE
    if hasattr(callback, save) != hasattr(callback, load):
        has, lacks = (save, load) if hasattr(callback, save) else (load, save)
        found.append(f"has {has} and no {lacks}: a state needs both, else it is not saved")
    priority: object = callback.priority
    if not isinstance(priority, int | float):
        found.append(f"priority={priority!r}: must be a number")
    if isinstance(callback.watches, str):
        found.append(f"watches={callback.watches!r}: must be a list of names")
    return found


def _list_parameters(hook: str) -> list[str]:
    return list(inspect.signature(getattr(Callback, hook)).parameters)


def _accepts(signature: inspect.Signature, hook: str) -> bool:
    try:
        signature.bind(*_list_parameters(hook))
    except TypeError:
        return False
    return True


def _name_callbacks(given: list[Callback]) -> dict[str, Callback]:
    """Map names to callbacks: a callback's own name, or one derived from its class."""
    names: dict[str, Callback] = {}
    for callback in given:
        if callback.name is None:
            continue
        if not isinstance(callback.name, str) or not _NAME.fullmatch(callback.name):
            raise UsageError(f"callbacks: name={callback.name!r} must match {_NAME.pattern}")
        if callback.name in names:
            raise UsageError(f"callbacks: two are named {callback.name!r}")
        names[callback.name] = callback
    unnamed: dict[str, list[str]] = {}
    for callback in given:
        if callback.name is None:
            name = _free_name(type(callback).__name__, names)
            names[name] = callback
            if _is_stateful(callback):
                unnamed.setdefault(type(callback).__name__, []).append(name)
    for class_name, found in unnamed.items():
        if len(found) > 1:
            former = ", ".join(f"name={name!r}" for name in found)
            raise UsageError(
                f"callbacks: {len(found)} of the class {class_name} have a state and no name; when "
                "they change places, each would get the state of another. Give each a name of its "
                f"own. In checkpoints made before they are called {former}"
            )
    return names


def _free_name(class_name: str, taken: Collection[str]) -> str:
    base = re.sub(r"[^a-z0-9_]", "_", class_name.lower()).strip("_")[:36] or "callback"
    names = (base, *(f"{base}_{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
