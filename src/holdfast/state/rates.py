"""Preservation of the learning rates of new schedulers, which a loaded checkpoint lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

# What torch's schedulers set in the groups of the optimizer when they are made. They compute each
# rate from the one before: with the rates of a run without them, a warm-up would leave its range.
_OPTIONS = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


class Rates:
    """Current options of parameter groups that the schedulers of a state have set."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._schedulers = {
            name: value
            for name, value in state.items()
            if isinstance(value, LRScheduler) and not isinstance(value, ReduceLROnPlateau)
        }
        self._kept = {
            name: [_options(group) for group in scheduler.optimizer.param_groups]
            for name, scheduler in self._schedulers.items()
        }

    def put_back(self, new: Collection[str]) -> None:
        """Restore the groups that only the schedulers named in `new` drive, after a load."""
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: group[key] for key in _OPTIONS if key in group}
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
