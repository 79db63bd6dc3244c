"""Reads of a store by requests: exact ranges, each of bounded length."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable

from typing_extensions import override

from holdfast.store.base import (
    ObjectInfo,
    Store,
    check_key,
    expect_at_least,
    expect_positive,
    ignore,
)
from holdfast.store.remote.api import Api
from holdfast.store.remote.opening import BucketLocation, RemoteOptions
from holdfast.store.remote.writes import copy_bytes

READ_NBYTES = 8 * 1024 * 1024
"""Most bytes that one request reads."""
_SEEN_NBYTES = 1024 * 1024


class ReadByRequests(Store, ABC):
    """Store whose objects are read by requests to the service at `place`."""

    reads_origin = True

    def __init__(self, place: BucketLocation, options: RemoteOptions | None) -> None:
        self._place = place
        self._api = Api(place, options if options is not None else RemoteOptions())

    @property
    @override
    def url(self) -> str:
        """The store's URL, without a slash at its end."""
        return self._place.url

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Read bytes of an object; its length is checked before memory is allocated."""
        check_key(key)
        expect_positive("get", key, start=start, nbytes=nbytes)
        if start == 0 and nbytes is None:
            return self._api.read_object(key)
        if nbytes and nbytes <= READ_NBYTES:
            return bytes(memoryview(self._api.read_range(key, start, start + nbytes)))
        rest = self._rest(key, start, nbytes or 0)
        data = bytearray(rest if nbytes is None else nbytes)
        self._read_by_pieces(key, start, memoryview(data), ignore)
        return bytes(data)

    @override
    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        """Read a whole object in one request; there is no cache, so `afresh` changes nothing."""
        check_key(key)
        return self._api.read_object(key, max_nbytes=max_nbytes)

    @override
    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        """Fill `buffer` by requests of at most 8 MiB; `afresh` changes nothing, without a cache."""
        check_key(key)
        expect_positive("read_into", key, start=start)
        if buffer.nbytes > READ_NBYTES or not buffer.nbytes:
            self._rest(key, start, buffer.nbytes)
        if buffer.nbytes:
            self._read_by_pieces(key, start, buffer.cast("B"), seen)

    @override
    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return ObjectInfo(key=key, nbytes=self._api.nbytes(key))

    def _rest(self, key: str, start: int, nbytes: int) -> int:
        """Return the number of bytes from `start` on; raise `CorruptData` if below `nbytes`."""
        found = self._api.nbytes(key)
        expect_at_least(found, start + nbytes, what=f"get {self._api.url(key)}")
        return found - start

    def _read_by_pieces(
        self, key: str, start: int, buffer: memoryview, seen: Callable[[memoryview], object]
    ) -> None:
        for at in range(0, len(buffer), READ_NBYTES):
            piece = buffer[at : at + READ_NBYTES]
            found = memoryview(self._api.read_range(key, start + at, start + at + len(piece)))
            for part in range(0, len(piece), _SEEN_NBYTES):
                target = piece[part : part + _SEEN_NBYTES]
                copy_bytes(target, found[part : part + _SEEN_NBYTES])
                seen(target)
