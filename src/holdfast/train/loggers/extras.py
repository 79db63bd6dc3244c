"""Optional libraries: imported when they are needed, with an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from holdfast.errors import UsageError


def import_extra(module: str, extra: str) -> Any:
    """The module, which the extra of Holdfast installs.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported ({error}): pip install 'holdfast[{extra}]'"
        ) from error
