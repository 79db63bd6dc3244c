"""Reads, imports and exports checkpoints of other libraries.

Public names are resolved when they are used, so that readers of formats need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.interop.exporting.export import Exported as Exported
    from holdfast.interop.exporting.export import export_checkpoint as export_checkpoint
    from holdfast.interop.importing import import_checkpoint as import_checkpoint

_HOMES = {
    "Exported": "holdfast.interop.exporting.export",
    "export_checkpoint": "holdfast.interop.exporting.export",
    "import_checkpoint": "holdfast.interop.importing",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
