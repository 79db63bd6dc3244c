"""Settings of optimizers and schedulers that a script changes between two sessions.

The checkpoint's values are used unless they are overridden; a replaced value is noted. A scheduler
that takes a setting of the script is stepped again from its beginning, because most rates are
computed from the one before. Rates that new schedulers have set, which a checkpoint lacks, are
restored.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from holdfast.errors import UsageError
from holdfast.state.planning.overrides import OptimizerOptions, copied, is_number, set_option
from holdfast.state.probing import undisturbed_generators

NO_SETTINGS = frozenset(
    {"params", "param_names", "self", "optimizer", "last_epoch", "verbose", "schedulers"}
)
_STORED_AS = {"_milestones": "milestones", "max_lrs": "max_lr", "min_lrs": "min_lr"}
"""Attributes of torch's schedulers that keep an argument of another name."""
_COMPUTED = frozenset({"total_size", "step_ratio"})
"""Attributes that `CyclicLR` computes from its arguments."""
_INNER, _FUNCTIONS = "_schedulers", "lr_lambdas"
_BASE = "initial_lr"
_RATES = ("lr", _BASE, "max_lr", "min_lr")
_CYCLED = ("momentum", "betas", "base_momentum", "max_momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSetting:
    """A setting of a scheduler, or of one inside it: `owner[key]` is its value."""

    component: str
    path: str
    name: str
    owner: dict[str, Any]
    key: str

    def is_named(self, names: Collection[str]) -> bool:
        """Whether `override` names the setting, by itself, by path, or with its component."""
        return not {self.name, self.path, self.component}.isdisjoint(names)


def schedule_settings(state: Mapping[str, Any]) -> Iterator[ScheduleSetting]:
    """Yield the settings of all schedulers of a state, also of inner ones."""
    for component, value in state.items():
        if _is_scheduler(value):
            yield from _iterate_settings(component, component, value)


def _is_scheduler(value: Any) -> bool:
    """Whether a value is a scheduler, also one of another library, which has no base class."""
    if isinstance(value, LRScheduler):
        return True
    names = (kind.__name__.lower() for kind in type(value).__mro__)
    return isinstance(getattr(value, "optimizer", None), Optimizer) and any(
        "scheduler" in name for name in names
    )


def _iterate_settings(
    component: str, where: str, scheduler: LRScheduler
) -> Iterator[ScheduleSetting]:
    arguments = inspect.signature(type(scheduler).__init__).parameters.keys() - NO_SETTINGS
    owner = vars(scheduler)
    for key in sorted(owner):
        name = _STORED_AS.get(key, key)
        if name in arguments or key in _COMPUTED:
            yield ScheduleSetting(
                component=component, path=f"{where}.{name}", name=name, owner=owner, key=key
            )
    for number, function in enumerate(_callable_objects(scheduler)):
        for key in sorted(vars(function)):
            path = f"{where}.{_FUNCTIONS}.{number}.{key}"
            yield ScheduleSetting(
                component=component, path=path, name=key, owner=vars(function), key=key
            )
    for number, inner in enumerate(owner.get(_INNER, ())):
        yield from _iterate_settings(component, f"{where}.{number}", inner)


def _callable_objects(scheduler: LRScheduler) -> list[Any]:
    """List the objects that a scheduler calls and saves the attributes of, each once."""
    functions = vars(scheduler).get(_FUNCTIONS, ())
    objects = {id(one): one for one in functions if not isinstance(one, FunctionType)}
    return [one for one in objects.values() if hasattr(one, "__dict__")]


def check_override(state: Mapping[str, Any], override: Collection[str]) -> None:
    """Raise `UsageError` if no optimizer and no scheduler has what `override` names."""
    paths = [setting.path for setting in schedule_settings(state)]
    OptimizerOptions(state).check_overrides(override, paths)


class ScriptSchedules:
    """Schedulers as the script has made them, for settings that `override` names."""

    def __init__(self, state: Mapping[str, Any], override: Collection[str]) -> None:
        """Copy the schedulers that have a named setting; call it before the load."""
        self._state, self._override = state, override
        named = [one for one in schedule_settings(state) if one.is_named(override)]
        self._made = {
            name: _Copy(state[name]) for name in dict.fromkeys(one.component for one in named)
        }

    def apply_overrides(self, loaded: Collection[str]) -> list[str]:
        """Set, after a load, what is overridden; returns notes."""
        notes: list[str] = []
        for name, made in self._made.items():
            if name in loaded:
                notes += self._settle_one(name, self._state[name], made)
        return notes

    def _settle_one(self, name: str, live: LRScheduler, made: _Copy) -> list[str]:
        pairs = [*zip(_iterate_settings(name, name, live), made.settings(name), strict=True)]
        taken = [
            (now, script)
            for now, script in pairs
            if now.is_named(self._override) and now.owner[now.key] != script.owner[script.key]
        ]
        notes = [
            f"{now.path}: the script's {script.owner[script.key]!r} replaces the checkpoint's "
            f"{now.owner[now.key]!r}"
            for now, script in taken
        ]
        if isinstance(live, ReduceLROnPlateau) or not isinstance(live, LRScheduler):
            # Rates follow from metrics, or from the number of the step that its caller gives.
            for now, script in taken:
                now.owner[now.key] = script.owner[script.key]
        elif taken:
            self._expect_alone(name, live)
            for now, script in pairs:
                if not now.is_named(self._override):
                    script.owner[script.key] = copy.copy(now.owner[now.key])
            made.replay(name, live)
        return notes

    def _expect_alone(self, name: str, live: LRScheduler) -> None:
        """Raise `UsageError` if another scheduler sets the rates of the same groups."""
        own = {id(group) for group in live.optimizer.param_groups}
        others = [
            other
            for other, value in self._state.items()
            if isinstance(value, LRScheduler)
            and value is not live
            and own.intersection(map(id, value.optimizer.param_groups))
        ]
        if others:
            raise UsageError(
                f"override: {name} shares its groups of parameters with {', '.join(others)}, so "
                "their rates cannot be computed again. Load the run with without="
                f"{[name, *others]!r} and set the schedules by hand"
            )


class _Copy:
    """Copy of a scheduler that was just made, with groups of its own, to be stepped again."""

    def __init__(self, live: LRScheduler) -> None:
        self._groups = [
            {key: copied(value) for key, value in group.items() if key in (*_RATES, *_CYCLED)}
            for group in live.optimizer.param_groups
        ]
        self._optimizer = SimpleNamespace(param_groups=self._groups, step=lambda: None)
        self._scheduler = self._copy_scheduler(live)
        self._begun_at = _steps(live)

    def _copy_scheduler(self, live: LRScheduler) -> LRScheduler:
        made = copy.copy(live)
        for key, value in vars(live).items():
            if key == "optimizer":
                made.optimizer = self._optimizer  # type: ignore[assignment]
            elif key == _INNER:
                vars(made)[key] = [self._copy_scheduler(inner) for inner in value]
            elif key == _FUNCTIONS:
                copies = {id(one): copy.copy(one) for one in value}
                vars(made)[key] = [copies[id(one)] for one in value]
            elif isinstance(value, list | dict):
                vars(made)[key] = copy.copy(value)
        return made

    def settings(self, name: str) -> Iterator[ScheduleSetting]:
        """Yield the settings of the copy, in the order of those of the live scheduler."""
        return _iterate_settings(name, name, self._scheduler)

    def replay(self, name: str, live: LRScheduler) -> None:
        """Step the copy as often as the live scheduler was stepped, and take its state over."""
        num_steps = _steps(live)
        if self._begun_at:
            raise UsageError(
                f"override: {name} was stepped before the load; make a new one and load right after"
            )
        self._scale(live)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the order of calls, which was right when it ran
            try:
                for _ in range(num_steps):
                    self._scheduler.step()
            except ValueError as error:
                raise UsageError(
                    f"override: {name}: the script's schedule ends before the {num_steps} steps "
                    f"that the run has made: {error}"
                ) from error
        _take_over(live, self._scheduler)
        for group, own in zip(live.optimizer.param_groups, self._groups, strict=True):
            for key, value in own.items():
                if key in _RATES or "max_momentum" in own:
                    set_option(group, key, value)

    def _scale(self, live: LRScheduler) -> None:
        """Begin at the base rates of the live groups, which `override` may have set as well."""
        factors = []
        for group, own in zip(live.optimizer.param_groups, self._groups, strict=True):
            old = float(own.get(_BASE, 0.0))
            factors.append(float(group.get(_BASE, old)) / old if old else 1.0)
        for factor, own in zip(factors, self._groups, strict=True):
            for key in _RATES:
                if key in own and factor != 1.0:
                    own[key] *= factor
        self._scale_bases(self._scheduler, factors)

    def _scale_bases(self, scheduler: LRScheduler, factors: list[float]) -> None:
        for inner in getattr(scheduler, _INNER, ()):
            self._scale_bases(inner, factors)
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [
                base if factor == 1.0 else base * factor
                for base, factor in zip(scheduler.base_lrs, factors, strict=True)
            ]


def _steps(scheduler: LRScheduler) -> int:
    inner = getattr(scheduler, _INNER, None)
    return (
        int(getattr(scheduler, "last_epoch", 0))
        if not inner or hasattr(scheduler, "last_epoch")
        else _steps(inner[0])
    )


def _take_over(live: LRScheduler, made: LRScheduler) -> None:
    for inner, own in zip(getattr(live, _INNER, ()), getattr(made, _INNER, ()), strict=True):
        _take_over(inner, own)
    for function, own in zip(_callable_objects(live), _callable_objects(made), strict=True):
        vars(function).update(vars(own))
    kept = ("optimizer", _INNER, _FUNCTIONS)
    vars(live).update((key, value) for key, value in vars(made).items() if key not in kept)


_PLAIN = (bool, int, float, str, tuple, list, Counter, type(None))


class Settings:
    """Current settings of a state, to be compared after a load."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._made = [
            (path, how, owner, name, value)
            for path, how, owner, name in _iterate_all_settings(state)
            if isinstance(value := _current_setting(owner, name), _PLAIN)
        ]

    def replaced(self) -> tuple[str, ...]:
        """List a message for each setting whose value has changed since construction."""
        settings = (
            f"{path}: using {now!r} from the checkpoint, not {made!r} from the script; {how}"
            for path, how, owner, name, made in self._made
            if (now := _current_setting(owner, name)) != made
        )
        return (*settings, *_changed_functions(self._state))


def _changed_functions(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each schedule whose function gives another rate than the run had."""
    for component, value in state.items():
        if type(value) is not LambdaLR:
            continue
        pairs = zip(value.lr_lambdas, value.base_lrs, value._last_lr, strict=False)
        with suppress(Exception), undisturbed_generators():  # code of the user
            for function, base, rate in pairs:
                own = float(base * function(value.last_epoch))
                if not math.isclose(own, float(rate), rel_tol=1e-6, abs_tol=1e-12):
                    yield (
                        f"{component}: the script's function gives the rate {own:g} at step "
                        f"{value.last_epoch}, where the run had {float(rate):g}. Functions are not "
                        "saved: the script's is used from here on"
                    )
                    break


def required_settings(scheduler: LRScheduler) -> frozenset[str]:
    """List a scheduler's required constructor arguments that it keeps as attributes."""
    arguments = inspect.signature(type(scheduler).__init__).parameters.values()
    names = {a.name for a in arguments if a.default is a.empty}
    return frozenset(names.intersection(vars(scheduler)) - NO_SETTINGS)


def _iterate_all_settings(
    state: Mapping[str, Any],
) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield (path, how it is taken, owner, name) of each setting: `owner[name]` is its value."""
    for component, value in state.items():
        if isinstance(value, Optimizer):
            # Other options are counters of the optimizer, and numbers those of `overrides`.
            arguments = inspect.signature(type(value).__init__).parameters
            options = value.defaults.keys() & arguments
            for number, group in enumerate(value.param_groups):
                for name in sorted(options & group.keys() - NO_SETTINGS):
                    if not is_number(group[name]):
                        path = f"{component}.param_groups.{number}.{name}"
                        how = "to change it, set it in optimizer.param_groups after the load"
                        yield path, how, group, name
    for setting in schedule_settings(state):
        how = f"pass override=[{setting.path!r}] to use the script's"
        yield setting.path, how, setting.owner, setting.key


def _current_setting(owner: Mapping[str, Any], name: str) -> Any:
    """Return the current value of a setting; a copy if a load may change it in place."""
    value = owner.get(name)
    if isinstance(value, Tensor):
        return value.tolist()
    return copy.copy(value) if isinstance(value, list | Counter) else value


# What torch's schedulers set in the groups of the optimizer when they are made. They compute each
# rate from the one before: with the rates of a run without them, a warm-up would leave its range.
_SET_BY_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


class Rates:
    """Snapshot of the rates and momenta that the schedulers of a state have set."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._schedulers = {
            name: value
            for name, value in state.items()
            if isinstance(value, LRScheduler) and not isinstance(value, ReduceLROnPlateau)
        }
        self._kept = {
            name: [_rates_of(group) for group in scheduler.optimizer.param_groups]
            for name, scheduler in self._schedulers.items()
        }

    def restore_rates(self, new: Collection[str]) -> None:
        """Restore, after a load, the groups that only the schedulers named in `new` change."""
        driven = {
            id(group)
            for name, scheduler in self._schedulers.items()
            if name not in new
            for group in scheduler.optimizer.param_groups
        }
        for name, scheduler in self._schedulers.items():
            if name in new:
                groups = scheduler.optimizer.param_groups
                for group, options in zip(groups, self._kept[name], strict=False):
                    if id(group) not in driven:
                        _restore(group, options)


def _rates_of(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: group[key] for key in _SET_BY_SCHEDULERS if key in group}
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in options.items()
    }


def _restore(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        live = group.get(key)
        if isinstance(live, Tensor):
            live.copy_(value) if isinstance(value, Tensor) else live.fill_(value)
        else:
            group[key] = value
