"""Shipped for users and for us: store contract, faulty store, resume equivalence.

Resolved when first used: the stores' tools need no torch, and the contract needs pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.faulty import Fault, FaultyStore, Stopped
    from holdfast.testing.resume import StepReporter, assert_resume_equivalent
    from holdfast.testing.store_contract import StoreContract

__all__ = [
    "Fault",
    "FaultyStore",
    "StepReporter",
    "Stopped",
    "StoreContract",
    "assert_resume_equivalent",
]

_NAMES = {
    "Fault": "faulty",
    "FaultyStore": "faulty",
    "StepReporter": "resume",
    "Stopped": "faulty",
    "StoreContract": "store_contract",
    "assert_resume_equivalent": "resume",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"holdfast.testing.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
