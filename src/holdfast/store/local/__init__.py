"""The store on a local or mounted file system, and its parts."""

from holdfast.store.local.store import LocalStore

__all__ = ["LocalStore"]
