"""Modules that got their weights from a checkpoint, for who begins a training with them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

_loaded: WeakSet[nn.Module] = WeakSet()


def note_loaded(components: Iterable[object]) -> None:
    """Remember those that are modules."""
    _loaded.update(item for item in components if isinstance(item, nn.Module))


def is_loaded(module: nn.Module) -> bool:
    """Whether `load_weights`, or `load` or `resume` of a manager, has filled this module."""
    return module in _loaded
