"""Test tools for users: contract of stores, faulty store, test of exact resumes, ranks as threads.

Names are imported at first use: those for stores and ranks need no torch, the contract needs
pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.faulty import Fault as Fault
    from holdfast.testing.faulty import FaultyStore as FaultyStore
    from holdfast.testing.faulty import Stopped as Stopped
    from holdfast.testing.ranks import ThreadCoordinator as ThreadCoordinator
    from holdfast.testing.resume import StepReporter as StepReporter
    from holdfast.testing.resume import assert_resume_equivalent as assert_resume_equivalent
    from holdfast.testing.store_contract import StoreContract as StoreContract

_HOMES = {
    "Fault": "holdfast.testing.faulty",
    "FaultyStore": "holdfast.testing.faulty",
    "StepReporter": "holdfast.testing.resume",
    "Stopped": "holdfast.testing.faulty",
    "StoreContract": "holdfast.testing.store_contract",
    "ThreadCoordinator": "holdfast.testing.ranks",
    "assert_resume_equivalent": "holdfast.testing.resume",
}
"""Public name → the module that defines it."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
