"""Reading small documents from a store, with their limits checked before they are fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import CorruptData, NotFound, StoreError
from holdfast.store.base import Buffer, Store, expect_at_most, get_whole, read_into

T = TypeVar("T")


def read_document(store: Store, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
    """All bytes of an object that may have at most `max_nbytes`; with `afresh` from the medium
    itself, not from a cache on the way, which costs an object store a second request.

    Raises:
        NotFound: there is no such object.
        LimitExceeded: it is larger; nothing was read.
        CorruptData: what is there is no file, or the storage cannot read it.
    """
    try:
        if not afresh:
            return get_whole(store, key, max_nbytes=max_nbytes)
        nbytes = store.head(key).nbytes
        expect_at_most(nbytes, max_nbytes, what=f"{store.url}/{key}")
        data = bytearray(nbytes)
        read_into(store, key, 0, memoryview(data), afresh=True)
        return bytes(data)
    except StoreError as error:
        if type(error) is StoreError:
            raise CorruptData(str(error)) from error
        raise


def read_if_there(
    store: Store, key: str, decode: Callable[..., T], *, max_nbytes: int = 65536
) -> T | None:
    """The decoded document, or None where there is none. `decode(data, what=…)` may raise."""
    try:
        data: Buffer = read_document(store, key, max_nbytes=max_nbytes)
    except NotFound:
        return None
    return decode(data, what=f"{store.url}/{key}")
