"""Holdfast: checkpoints for PyTorch training that can be trusted.

The public names are resolved when they are first used, so that importing the package, and the
command line, cost nothing and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# `_HOMES` once more, for type checkers; tests/test_public.py compares the two.
if TYPE_CHECKING:
    from holdfast import data as data
    from holdfast import errors as errors
    from holdfast import keys as keys
    from holdfast import sinks as sinks
    from holdfast import train as train
    from holdfast.checkpoints import Checkpoints as Checkpoints
    from holdfast.checkpoints import StateHooks as StateHooks
    from holdfast.control.stop import Stop as Stop
    from holdfast.interop.lazy import load_file as load_file
    from holdfast.keys import Encryption as Encryption
    from holdfast.loading.cached_store import CachedStore as CachedStore
    from holdfast.manager import CheckpointManager as CheckpointManager
    from holdfast.ownership.access import add_metrics as add_metrics
    from holdfast.ownership.access import reading as reading
    from holdfast.ownership.tiered_options import HostTiers as HostTiers
    from holdfast.ownership.tiered_options import Tiered as Tiered
    from holdfast.policy.auto import Auto as Auto
    from holdfast.policy.clock import Time as Time
    from holdfast.policy.rules import Best as Best
    from holdfast.policy.rules import Budget as Budget
    from holdfast.policy.rules import ByClass as ByClass
    from holdfast.policy.rules import Daily as Daily
    from holdfast.policy.rules import EveryNth as EveryNth
    from holdfast.policy.rules import Hourly as Hourly
    from holdfast.policy.rules import Last as Last
    from holdfast.policy.rules import Within as Within
    from holdfast.policy.savers import SavePolicy as SavePolicy
    from holdfast.policy.savers import SideSaver as SideSaver
    from holdfast.policy.triggers import At as At
    from holdfast.policy.triggers import AtEnd as AtEnd
    from holdfast.policy.triggers import AtStart as AtStart
    from holdfast.policy.triggers import Every as Every
    from holdfast.policy.triggers import On as On
    from holdfast.policy.triggers import WallClock as WallClock
    from holdfast.policy.triggers import When as When
    from holdfast.results import Checkpoint as Checkpoint
    from holdfast.state.attributes import Attributes as Attributes
    from holdfast.state.components import PerRank as PerRank
    from holdfast.store import open_store as open_store
    from holdfast.store.local.store import LocalStore as LocalStore
    from holdfast.store.memory import MemoryStore as MemoryStore
    from holdfast.store.remote.opening import RemoteOptions as RemoteOptions
    from holdfast.store.remote.store import RemoteStore as RemoteStore
    from holdfast.threads.progress import progress as progress
    from holdfast.version import __version__ as __version__
    from holdfast.weights import load_weights as load_weights


_HOMES = {
    "At": "holdfast.policy.triggers",
    "AtEnd": "holdfast.policy.triggers",
    "AtStart": "holdfast.policy.triggers",
    "Attributes": "holdfast.state.attributes",
    "Auto": "holdfast.policy.auto",
    "Best": "holdfast.policy.rules",
    "Budget": "holdfast.policy.rules",
    "ByClass": "holdfast.policy.rules",
    "CachedStore": "holdfast.loading.cached_store",
    "Checkpoint": "holdfast.results",
    "CheckpointManager": "holdfast.manager",
    "Checkpoints": "holdfast.checkpoints",
    "Daily": "holdfast.policy.rules",
    "Encryption": "holdfast.keys",
    "Every": "holdfast.policy.triggers",
    "EveryNth": "holdfast.policy.rules",
    "HostTiers": "holdfast.ownership.tiered_options",
    "Hourly": "holdfast.policy.rules",
    "Last": "holdfast.policy.rules",
    "LocalStore": "holdfast.store.local.store",
    "MemoryStore": "holdfast.store.memory",
    "On": "holdfast.policy.triggers",
    "PerRank": "holdfast.state.components",
    "RemoteOptions": "holdfast.store.remote.opening",
    "RemoteStore": "holdfast.store.remote.store",
    "SavePolicy": "holdfast.policy.savers",
    "SideSaver": "holdfast.policy.savers",
    "StateHooks": "holdfast.checkpoints",
    "Stop": "holdfast.control.stop",
    "Tiered": "holdfast.ownership.tiered_options",
    "Time": "holdfast.policy.clock",
    "WallClock": "holdfast.policy.triggers",
    "When": "holdfast.policy.triggers",
    "Within": "holdfast.policy.rules",
    "__version__": "holdfast.version",
    "add_metrics": "holdfast.ownership.access",
    "data": "holdfast",
    "errors": "holdfast",
    "keys": "holdfast",
    "load_file": "holdfast.interop.lazy",
    "load_weights": "holdfast.weights",
    "open_store": "holdfast.store",
    "progress": "holdfast.threads.progress",
    "reading": "holdfast.ownership.access",
    "sinks": "holdfast",
    "train": "holdfast",
}
"""Public name → the module that defines it."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any
    if _HOMES[name] == __name__:
        value = import_module(f"holdfast.{name}")
    else:
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
