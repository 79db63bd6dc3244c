"""Record of modules that a checkpoint was loaded into, so that training does not reset them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

_loaded: WeakSet[nn.Module] = WeakSet()


def note_loaded(components: Iterable[object]) -> None:
    """Record the modules among these components as loaded."""
    _loaded.update(item for item in components if isinstance(item, nn.Module))


def is_loaded(module: nn.Module) -> bool:
    """Whether a checkpoint was loaded into this module: by `load_weights`, `load` or `resume`."""
    return module in _loaded
