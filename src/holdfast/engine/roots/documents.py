"""Reading small documents from a store, with their limits checked before they are fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import CorruptData, NotFound, StoreError
from holdfast.store.base import Buffer, Store

T = TypeVar("T")


def read_document(store: Store, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
    """All bytes of an object that may have at most `max_nbytes`; with `afresh` from the medium
    itself, not from a cache on the way, where that can be had.

    Raises:
        NotFound: there is no such object.
        LimitExceeded: it is larger; nothing was read.
        CorruptData: what is there is no file, or the storage cannot read it.
    """
    try:
        return store.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)
    except StoreError as error:
        if type(error) is StoreError:
            raise CorruptData(str(error)) from error
        raise


def is_there(store: Store, key: str) -> bool:
    """Whether an object has this key now."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def read_if_there(
    store: Store, key: str, decode: Callable[..., T], *, max_nbytes: int = 65536
) -> T | None:
    """The decoded document, or None where there is none. `decode(data, what=…)` may raise."""
    try:
        data: Buffer = read_document(store, key, max_nbytes=max_nbytes)
    except NotFound:
        return None
    return decode(data, what=f"{store.url}/{key}")
