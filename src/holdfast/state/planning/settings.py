"""Settings of optimizers and schedulers: finding replaced ones after a load, restoring rates.

A script that is run again with another learning rate does not get it, so a warning is logged.
The rates that new schedulers have set, which a loaded checkpoint lacks, are restored.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.state.planning.overrides import is_number
from holdfast.state.planning.schedulesettings import NO_SETTINGS, schedule_settings

_PLAIN = (bool, int, float, str, tuple, list, Counter, type(None))


class Settings:
    """Current settings of a state, to be compared after a load."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._made = [
            (path, how, owner, name, value)
            for path, how, owner, name in _iterate_all_settings(state)
            if isinstance(value := _current_setting(owner, name), _PLAIN)
        ]

    def replaced(self) -> tuple[str, ...]:
        """List a message for each setting whose value has changed since construction."""
        return tuple(
            f"{path}: using {now!r} from the checkpoint, not {made!r} from the script; {how}"
            for path, how, owner, name, made in self._made
            if (now := _current_setting(owner, name)) != made
        )


def made_with(scheduler: LRScheduler, *, only_required: bool = False) -> frozenset[str]:
    """List a scheduler's constructor arguments that it keeps as attributes."""
    arguments = inspect.signature(type(scheduler).__init__).parameters.values()
    names = {a.name for a in arguments if not only_required or a.default is a.empty}
    return frozenset(names.intersection(vars(scheduler)) - NO_SETTINGS)


def _iterate_all_settings(
    state: Mapping[str, Any],
) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield (path, how, owner, name) of each setting: `owner[name]` is its value.

    `how` says how the script's value can be taken.
    """
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
    return copy(value) if isinstance(value, list | Counter) else value


# What torch's schedulers set in the groups of the optimizer when they are made. They compute each
# rate from the one before: with the rates of a run without them, a warm-up would leave its range.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


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
    options = {key: group[key] for key in _RATES if key in group}
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
