"""Reads of a store by requests, in exact ranges of bounded length; and web servers, which only
can be read."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from typing_extensions import override

from holdfast.errors import UnsupportedStore, UsageError
from holdfast.events import url_without_secrets
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    ObjectInfo,
    Seen,
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
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
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

    def _read_by_pieces(self, key: str, start: int, buffer: memoryview, seen: Seen) -> None:
        for at in range(0, len(buffer), READ_NBYTES):
            piece = buffer[at : at + READ_NBYTES]
            found = memoryview(self._api.read_range(key, start + at, start + at + len(piece)))
            for part in range(0, len(piece), _SEEN_NBYTES):
                target = piece[part : part + _SEEN_NBYTES]
                copy_bytes(target, found[part : part + _SEEN_NBYTES])
                seen(target)


class HttpStore(ReadByRequests):
    """Store of the files below `http(s)://host/path`, which can only be read, by their keys.

    A user and a password in the URL are sent as basic authentication, and its query with each
    request; neither is in `url` or in messages. From https nothing leads to an address that is
    not encrypted. Thread-safe; no request is sent until an operation is called. Forks and pickles
    are as for `RemoteStore`.
    """

    reads_only = True
    writes_in_place = False

    def __init__(self, url: str, *, options: RemoteOptions | None = None) -> None:
        self._given = (url, options)
        super().__init__(parse_web(url), options)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments: another process opens its own connections."""
        url, options = self._given
        return partial(HttpStore, url, options=options), ()

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._raise_read_only("put", key)

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        self._raise_read_only("create", key)

    @override
    def delete(self, key: str) -> None:
        self._raise_read_only("delete", key)

    @override
    def probe(self) -> str:
        self._raise_read_only("probe", "")

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._refuse_list(prefix)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        self._refuse_list(folder)

    def _raise_read_only(self, operation: str, key: str) -> NoReturn:
        raise UnsupportedStore(
            f"{operation} {self._api.url(key)}: a web address can only be read. Save to a folder, "
            "or to the bucket behind it: s3://… (with endpoint=… of RemoteStore), gs://… or az://…"
        )

    def _refuse_list(self, key: str) -> NoReturn:
        raise UnsupportedStore(
            f"list {self._api.url(key)}: a web server lists no files, so it cannot be looked up "
            "which checkpoints there are. Name the folder of one, which `holdfast ls` shows where "
            "the root is: https://HOST/…/step-7.0001-000001-0123abcd"
        )


def parse_web(url: str) -> BucketLocation:
    """Parse the URL of a folder or a file on a web server; a fragment is dropped."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("no host")
    except ValueError:
        # A password that is not percent-encoded may be anywhere before the last @.
        scheme, _, rest = url.partition("://")
        shown = url_without_secrets(f"{scheme}://{rest.rpartition('@')[2]}")
        raise UsageError(
            f"{shown!r}: must be https://HOST/… or https://USER:PASSWORD@HOST/…, with a port that "
            "is a number; write / ? # and @ in a password as %2F %3F %23 and %40"
        ) from None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return BucketLocation(
        scheme="https" if parts.scheme == "https" else "http",
        bucket=host,
        prefix=parts.path.strip("/"),
        endpoint=None,
        query=parts.query,
        login=f"{user}:{password}" if user or password else "",
    )
