"""Holdfast: checkpoints for PyTorch training that can be trusted.

The public names are resolved when they are first used, so that importing the package, and the
command line, cost nothing and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import data, errors, events, keys, testing, train
    from holdfast.engine.access.reading import reading
    from holdfast.engine.checkpoint import Checkpoint, PendingSave
    from holdfast.engine.control.stop import Stop
    from holdfast.engine.hooks import StateHooks
    from holdfast.engine.loading.caching import CachedStore
    from holdfast.engine.options import Checkpoints
    from holdfast.engine.tiers.tiered import Tiered
    from holdfast.format.codec import Compression
    from holdfast.keys import Encryption
    from holdfast.manager import CheckpointManager
    from holdfast.policy.auto import Auto
    from holdfast.policy.classes import SavePolicy
    from holdfast.policy.clock import Time
    from holdfast.policy.retention import (
        All,
        Best,
        Budget,
        ByClass,
        BySaver,
        Daily,
        EveryNth,
        Hourly,
        Last,
        Within,
    )
    from holdfast.policy.savers import SideSaver
    from holdfast.policy.triggers import At, AtEnd, AtStart, Every, On, WallClock, When
    from holdfast.weights import load_weights

    __version__: str

__all__ = [
    "All",
    "At",
    "AtEnd",
    "AtStart",
    "Auto",
    "Best",
    "Budget",
    "ByClass",
    "BySaver",
    "CachedStore",
    "Checkpoint",
    "CheckpointManager",
    "Checkpoints",
    "Compression",
    "Daily",
    "Encryption",
    "Every",
    "EveryNth",
    "Hourly",
    "Last",
    "On",
    "PendingSave",
    "SavePolicy",
    "SideSaver",
    "StateHooks",
    "Stop",
    "Tiered",
    "Time",
    "WallClock",
    "When",
    "Within",
    "__version__",
    "data",
    "errors",
    "events",
    "keys",
    "load_weights",
    "reading",
    "testing",
    "train",
]

_MODULES = frozenset({"data", "errors", "events", "keys", "testing", "train"})
_NAMES = {
    "All": "holdfast.policy.retention",
    "At": "holdfast.policy.triggers",
    "AtEnd": "holdfast.policy.triggers",
    "AtStart": "holdfast.policy.triggers",
    "Auto": "holdfast.policy.auto",
    "Best": "holdfast.policy.retention",
    "Budget": "holdfast.policy.retention",
    "ByClass": "holdfast.policy.retention",
    "BySaver": "holdfast.policy.retention",
    "CachedStore": "holdfast.engine.loading.caching",
    "Checkpoint": "holdfast.engine.checkpoint",
    "CheckpointManager": "holdfast.manager",
    "Checkpoints": "holdfast.engine.options",
    "Compression": "holdfast.format.codec",
    "Daily": "holdfast.policy.retention",
    "Every": "holdfast.policy.triggers",
    "Encryption": "holdfast.keys",
    "EveryNth": "holdfast.policy.retention",
    "Hourly": "holdfast.policy.retention",
    "Last": "holdfast.policy.retention",
    "On": "holdfast.policy.triggers",
    "PendingSave": "holdfast.engine.checkpoint",
    "SavePolicy": "holdfast.policy.classes",
    "SideSaver": "holdfast.policy.savers",
    "StateHooks": "holdfast.engine.hooks",
    "Stop": "holdfast.engine.control.stop",
    "Tiered": "holdfast.engine.tiers.tiered",
    "Time": "holdfast.policy.clock",
    "WallClock": "holdfast.policy.triggers",
    "When": "holdfast.policy.triggers",
    "Within": "holdfast.policy.retention",
    "load_weights": "holdfast.weights",
    "reading": "holdfast.engine.access.reading",
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
