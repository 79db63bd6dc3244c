"""The store of a local or mounted file system, and what it is made of."""

from holdfast.store.local.store import LocalStore

__all__ = ["LocalStore"]
