"""Optimizer options that a script changes between two sessions: the checkpoint's or the script's.

The checkpoint's values are used unless `override` names them. An option's origin is the value that
a script gave it: schedulers and callbacks may have changed it since.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import UsageError

_BASE = "initial_lr"
_OF_SCHEDULES = ("max_lr", "min_lr", "base_momentum", "max_momentum")
"""Options that torch's schedulers compute rates and momenta from."""
_CYCLED = frozenset({"momentum", "betas"})
"""Options that schedulers change where they cycle momenta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    component: str
    path: str
    group: dict[str, Any]
    name: str
    value: Any
    """Value that the script has given it."""
    beside: Mapping[str, Any]
    """What the script's schedulers have set in the group."""

    def is_named(self, names: Collection[str]) -> bool:
        return self.name in names or self.path in names


class OptimizerOptions:
    """Options of a state's optimizers as the script has set them, to be compared after a load."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Record the options that are numbers; call it before the load."""
        self._options = [*_options(state)]
        self._schedulers = [*_schedulers(state.values())]
        self._has_plateau = any(isinstance(value, ReduceLROnPlateau) for value in state.values())

    def origins(self, *, is_start: bool) -> dict[str, str]:
        """The options as text; unless a run starts here, without those that schedules change."""
        return {
            option.path: _format_value(option.value)
            for option in self._options
            if is_start or not self._is_moved(option)
        }

    def check_overrides(self, override: Collection[str], schedules: Collection[str]) -> None:
        """Raise `UsageError` if one of `override` is no option of any optimizer or schedule."""
        known = list(dict.fromkeys(option.name for option in self._options))
        paths = [option.path for option in self._options]
        also = {part for path in schedules for part in (path, *path.split(".", 1)[:1])}
        also |= {path.rpartition(".")[2] for path in schedules}
        wrong = [name for name in override if name not in (*known, *paths, *also)]
        if wrong:
            example = f"; of one group, as in {paths[0]!r}" if paths else ""
            others = f"; of schedulers {', '.join(schedules)}" if schedules else ""
            raise UsageError(
                f"override: no optimizer has {', '.join(map(repr, wrong))} to be set; "
                f"there are {', '.join(known) or 'none'}{example}{others}"
            )

    def apply_overrides(
        self, override: Collection[str], origins: Mapping[str, str], *, loaded: Collection[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Set, after a load, what is overridden; returns notes, and the origins from now on.

        Optimizers that are not among the `loaded` components have the script's options anyway.
        `origins` are those of the checkpoint. What descends from this very value of the script is
        left alone, so that a resume with the same `override` is exact.
        """
        notes, settled = [], {}
        for option in self._options:
            stored, given = _base(option.group, option.name), _format_value(option.value)
            if option.component not in loaded:
                settled[option.path] = given
                continue
            unknown = given if self._is_moved(option) else _format_value(stored)
            origin = origins.get(option.path, unknown)
            settled[option.path] = origin
            if given == origin:
                continue
            if given == _format_value(stored):  # such as after a load that has left options out
                settled[option.path] = given
                continue
            if option.is_named(override):
                self._set(option, stored)
                settled[option.path] = given
                notes.append(
                    f"{option.path}: the script's {given} replaces the checkpoint's "
                    f"{_format_value(stored)}"
                )
            else:
                notes.append(
                    f"{option.path}: using {_format_value(stored)} from the checkpoint, not "
                    f"{given} from the script; pass override=[{option.name!r}] to use the script's"
                )
        return notes, settled

    def _is_moved(self, option: _Option) -> bool:
        """Whether schedules change the option itself, so that it does not show where it began."""
        if option.name == "lr":
            return self._has_plateau and _BASE not in option.group
        return option.name in _CYCLED and "max_momentum" in option.group

    def _set(self, option: _Option, stored: Any) -> None:
        group, name = option.group, option.name
        for key, value in option.beside.items():
            if key in group and (name == "lr") == key.endswith("lr"):
                set_option(group, key, value)
        if name != "lr" or _BASE not in group:
            if not (name in _CYCLED and "max_momentum" in group):
                set_option(group, name, option.value)
            return
        # The schedule goes on as it was, at another height.
        base = float(stored)
        rate = float(group["lr"]) / base * float(option.value) if base else option.value
        set_option(group, "lr", rate)
        set_option(group, _BASE, option.value)
        for scheduler, max_lrs in self._schedulers:
            for number, of in enumerate(scheduler.optimizer.param_groups):
                if of is group:
                    scheduler.base_lrs[number] = option.value
                    scheduler._last_lr[number] = rate
                    if max_lrs is not None:
                        scheduler.max_lrs[number] = max_lrs[number]


def _options(state: Mapping[str, Any]) -> Iterator[_Option]:
    for component, optimizer in state.items():
        if not isinstance(optimizer, Optimizer):
            continue
        # Other keys of a group are counters of the optimizer.
        names = optimizer.defaults.keys() & inspect.signature(type(optimizer).__init__).parameters
        for number, group in enumerate(optimizer.param_groups):
            beside = {key: copied(group[key]) for key in _OF_SCHEDULES if key in group}
            for name in sorted(names & group.keys()):
                value = copied(_base(group, name))
                if is_number(value):
                    yield _Option(
                        component=component,
                        path=f"{component}.param_groups.{number}.{name}",
                        group=group,
                        name=name,
                        value=value,
                        beside=beside,
                    )


def _schedulers(values: Collection[Any]) -> Iterator[tuple[Any, list[Any] | None]]:
    """Yield each scheduler with base rates, also inner ones, and its highest rates, if any."""
    for value in values:
        if isinstance(value, LRScheduler):
            yield from _schedulers(getattr(value, "_schedulers", ()))
            if hasattr(value, "base_lrs") and hasattr(value, "_last_lr"):
                highest = getattr(value, "max_lrs", None)
                yield value, None if highest is None else [*highest]


def _base(group: Mapping[str, Any], name: str) -> Any:
    """Return an option; of the learning rate, what schedulers compute it from."""
    return group.get(_BASE, group.get("lr")) if name == "lr" else group.get(name)


def is_number(value: Any) -> bool:
    """Whether an option is a number, or a list or tuple of numbers."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(is_number, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def copied(value: Any) -> Any:
    """Return the number of a tensor that holds one, which a load may change; else the value."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _format_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_format_value, value))})"
    return repr(value.item() if isinstance(value, Tensor) else value)


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option; a tensor stays the same tensor."""
    live = group.get(name)
    if isinstance(live, Tensor):
        live.fill_(value)
    else:
        group[name] = value
