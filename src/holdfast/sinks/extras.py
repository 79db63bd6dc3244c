"""Import of optional libraries, with an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from holdfast.errors import UsageError


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, which `extra` of Holdfast installs.

    Raises:
        UsageError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported ({error}): pip install 'holdfast-torch[{extra}]'"
        ) from error
