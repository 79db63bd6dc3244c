"""Import of optional libraries, with an error that names the extra, and checks of their objects."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from holdfast.arguments import shown
from holdfast.errors import UsageError


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, which `extra` of Holdfast installs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported ({error}): pip install 'holdfast-torch[{extra}]'"
        ) from error


def expect_methods(name: str, value: object, methods: Sequence[str], what: str) -> None:
    """Raise `UsageError` unless an argument has the methods of what it must be; None has none."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise UsageError(f"{name}={shown(value)}: must be {what} ({missing[0]} is missing)")
