"""The store in a cloud's bucket, and its parts.

`RemoteStore` is imported when it is first used: commands that need only the options do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.store.remote.opening import RemoteOptions

if TYPE_CHECKING:
    from holdfast.store.remote.store import RemoteStore

__all__ = ["RemoteOptions", "RemoteStore"]


def __getattr__(name: str) -> Any:
    if name != "RemoteStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.store.remote.store import RemoteStore

    return RemoteStore
