"""The stores in a cloud's bucket and on a web server, and their parts.

They are imported when they are first used: commands that need only the options do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.store.remote.opening import RemoteOptions

if TYPE_CHECKING:
    from holdfast.store.remote.store import HttpStore, RemoteStore

__all__ = ["HttpStore", "RemoteOptions", "RemoteStore"]


def __getattr__(name: str) -> Any:
    if name == "RemoteStore":
        from holdfast.store.remote.store import RemoteStore

        return RemoteStore
    if name == "HttpStore":
        from holdfast.store.remote.store import HttpStore

        return HttpStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
