"""What stores that wrap another one have in common: they offer what it offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handing_on(protocol: Any) -> type:
    """A class that hands the operations of a protocol to `inner`."""

    def passed(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            return getattr(self.inner, name)(*args, **options)

        return method

    names = [name for name in vars(protocol) if not name.startswith("_")]
    return type(protocol.__name__, (), {name: passed(name) for name in names})
