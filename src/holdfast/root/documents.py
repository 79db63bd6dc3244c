"""Reads of small documents from a store, with size limits checked before the download."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

from holdfast.errors import CorruptData, FormatError, NotFound, SealError, StoreError
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.store.base import Buffer, Store

T = TypeVar("T")


def read_document(store: Store, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
    """Read all bytes of an object of at most `max_nbytes`.

    With `afresh`, from the medium itself rather than from a cache, if the store can do that.

    Raises:
        NotFound: there is no such object.
        LimitExceeded: it is larger; nothing was read.
        CorruptData: it is not a file, or the storage cannot read it.
    """
    try:
        return store.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)
    except StoreError as error:
        if type(error) is StoreError:
            raise CorruptData(str(error)) from error
        raise


_OWN_JSON = re.compile(rb'\s*\{\s*"holdfast"\s*:\s*1\b')


def is_own_json(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a JSON document of Holdfast."""
    return _OWN_JSON.match(head) is not None


def is_of_others(store: Store, key: str) -> bool:
    """Whether something is at this key that does not begin as a JSON document of Holdfast."""
    try:
        return not is_own_json(read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES))
    except NotFound:
        return False
    except FormatError:
        return True


_OWN_MARKS: WeakKeyDictionary[Store, set[str]] = WeakKeyDictionary()


def is_own_mark(store: Store, key: str) -> bool:
    """Whether a file with the name of a mark was written by Holdfast; sealed ones were.

    A process reads each mark once.
    """
    try:
        known = _OWN_MARKS.setdefault(store, set())
    except TypeError:  # a user's own store that allows no weak references
        known = set()
    with suppress(SealError):
        if key not in known and is_of_others(store, key):
            return False
        known.add(key)
    return True


def is_there(store: Store, key: str) -> bool:
    """Whether an object with this key exists now."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def read_if_there(
    store: Store, key: str, decode: Callable[..., T], *, max_nbytes: int = 65536
) -> T | None:
    """Read and decode a document; None if it does not exist. `decode(data, what=…)` may raise."""
    try:
        data: Buffer = read_document(store, key, max_nbytes=max_nbytes)
    except NotFound:
        return None
    return decode(data, what=f"{store.url}/{key}")
