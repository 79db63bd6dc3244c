"""Read-only store of the files below an address of a web server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from typing_extensions import override

from holdfast.errors import UnsupportedStore
from holdfast.store.base import BlockWriter, Buffer, ObjectInfo
from holdfast.store.remote.address import parse_web
from holdfast.store.remote.opening import RemoteOptions
from holdfast.store.remote.reading import ReadByRequests


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
