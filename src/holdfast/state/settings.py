"""Settings of optimizers and schedulers, which a load replaces by those of the checkpoint.

A script that is run again with another learning rate does not get it; a user must be told.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_NO_SETTINGS = frozenset({"params", "param_names"})
_CYCLED = frozenset({"momentum", "betas"})
"""Options that a scheduler moves where its groups have a `max_momentum`."""
_PLAIN = (bool, int, float, str, tuple, list, Counter, type(None))


class Settings:
    """The settings that a script has made."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._made = dict(_settings(state))

    def replaced(self) -> tuple[str, ...]:
        """A sentence for each setting that is another one now, after a load."""
        return tuple(
            f"{path}: {self._made[path]!r} here, {now!r} in the checkpoint, which is used"
            for path, now in _settings(self._state)
            if path in self._made and self._made[path] != now
        )


def made_with(scheduler: LRScheduler) -> frozenset[str]:
    """Names of what a scheduler was made with and keeps under the same name."""
    arguments = inspect.signature(type(scheduler).__init__).parameters
    return frozenset(arguments).intersection(vars(scheduler)) - {
        "self",
        "optimizer",
        "last_epoch",
        "verbose",
    }


def _settings(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for component, value in state.items():
        if isinstance(value, Optimizer):
            for number, group in enumerate(value.param_groups):
                for name in _options(group):
                    yield from _plain(f"{component}.param_groups.{number}.{name}", group[name])
        elif isinstance(value, LRScheduler):
            for name in sorted(made_with(value)):
                yield from _plain(f"{component}.{name}", getattr(value, name))


def _options(group: Mapping[str, Any]) -> list[str]:
    """Options of a group that are not moved by a scheduler."""
    moved = set(_NO_SETTINGS)
    if "initial_lr" in group:
        moved.add("lr")
    if "max_momentum" in group:
        moved |= _CYCLED
    return [name for name in group if name not in moved]


def _plain(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, _PLAIN):
        # A copy, as a load may change it in place.
        yield path, type(value)(value) if isinstance(value, list | Counter) else value
