"""Holdfast: checkpoints for PyTorch training that can be trusted.

The public names are resolved when they are first used, so that importing the package, and the
command line, cost nothing and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import data, errors, events, testing, train
    from holdfast.engine.checkpoint import Checkpoint, PendingSave
    from holdfast.manager import CheckpointManager
    from holdfast.policy.clock import Time
    from holdfast.policy.retention import All, Best, EveryNth, Last
    from holdfast.policy.triggers import Every
    from holdfast.weights import load_weights

    __version__: str

__all__ = [
    "All",
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "Every",
    "EveryNth",
    "Last",
    "PendingSave",
    "Time",
    "__version__",
    "data",
    "errors",
    "events",
    "load_weights",
    "testing",
    "train",
]

_MODULES = frozenset({"data", "errors", "events", "testing", "train"})
_NAMES = {
    "All": "holdfast.policy.retention",
    "Best": "holdfast.policy.retention",
    "Checkpoint": "holdfast.engine.checkpoint",
    "CheckpointManager": "holdfast.manager",
    "Every": "holdfast.policy.triggers",
    "EveryNth": "holdfast.policy.retention",
    "Last": "holdfast.policy.retention",
    "PendingSave": "holdfast.engine.checkpoint",
    "Time": "holdfast.policy.clock",
    "load_weights": "holdfast.weights",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"holdfast.{name}")
    if name == "__version__":
        value = import_module("importlib.metadata").version("holdfast")
    elif name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
