"""The stores in a cloud's bucket, such as S3, Google Cloud Storage and Azure, and on the web.

obstore moves the bytes. This adds what a commit needs and obstore does not do: puts of which
exactly one wins and whose lost reply is never taken for a refusal, exact ranges, errors by what can
be done about them, bounded memory, and the removal of incomplete uploads. Web servers are only
read, in exact ranges of bounded length.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

from typing_extensions import override

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    HoldfastError,
    NotFound,
    StoreError,
    UnsupportedStore,
    UsageError,
)
from holdfast.events import url_without_secrets
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    ObjectInfo,
    Seen,
    Store,
    check_folder,
    check_key,
    expect_at_least,
    expect_positive,
    flatten_buffer,
    ignore,
)
from holdfast.store.remote.api import Api
from holdfast.store.remote.errors import as_store_error, read_failure_of_python
from holdfast.store.remote.opening import (
    BucketLocation,
    Clients,
    GcsUploads,
    RemoteOptions,
    parse_place,
)
from holdfast.store.remote.writes import PART_NBYTES, UploadResources, copy_bytes

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
            f"list {self._api.url(key)}: a web server lists no files, so its checkpoints cannot be "
            "looked up. Name the folder of one, which `holdfast ls` shows where the root is: "
            "https://HOST/…/step-7.0001-000001-0123abcd"
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


_DELETED_AT_ONCE = 1000


class RemoteStore(ReadByRequests):
    """Store of objects in a cloud's bucket, below a prefix.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or
            `oci://bucket@namespace/prefix`.
        endpoint: the address of a service that is not the cloud's own; by default what the
            cloud's own settings say (`AWS_ENDPOINT_URL`, `GOOGLE_BASE_URL`,
            `AZURE_STORAGE_ENDPOINT`). Connections to `http://` addresses are not encrypted.
        options: limits, timeouts and retries.

    Thread-safe. No request is sent until an operation is called. A process that was forked from
    one which had used a remote store cannot use any, and gets an error at once: start it with spawn
    or forkserver. A store may be pickled for it.
    """

    writes_in_place = False

    def __init__(
        self, url: str, *, endpoint: str | None = None, options: RemoteOptions | None = None
    ) -> None:
        self._given = (url, endpoint, options)
        super().__init__(parse_place(url, endpoint), options)
        self._uploads = UploadResources(self._api, self._api.options, self._api.upload_pace)

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments: another process opens its own connections."""
        url, endpoint, options = self._given
        return partial(RemoteStore, url, endpoint=endpoint, options=options), ()

    @override
    def outer(self) -> Iterator[Store]:
        """Yield stores of the shorter prefixes, without the bucket itself."""
        url, endpoint, options = self._given
        scheme, _, path = url.rstrip("/").partition("://")
        parts = path.split("/")
        for number in range(len(parts) - 1, 1, -1):
            outer = "/".join(parts[:number])
            yield RemoteStore(f"{scheme}://{outer}", endpoint=endpoint, options=options)

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Put an object in one request.

        A plain put is retried after a failure. One with `if_absent` is retried only after a reply
        which says that it had no effect; any other failure raises `OutcomeUnknown`, and
        `AlreadyExists` may be about this same put.
        """
        check_key(key)
        (self._api.put_new if if_absent else self._api.put_object)(key, flatten_buffer(data))

    def modified(self, key: str) -> datetime:
        """Return when an object was put, by the clock of the service."""
        check_key(key)
        return self._api.modified(key)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield objects in order of keys; Azure's are sorted here, as it lists them unordered."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        if self._place.scheme == "az":
            return iter(sorted(self._list_matching(prefix), key=lambda info: info.key))
        return self._in_order(prefix)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        check_folder(folder)
        return tuple(sorted(name for name in self._api.list_names(folder) if name not in ("", "/")))

    @override
    def delete(self, key: str) -> None:
        """Remove an object, or the incomplete uploads in a folder without objects."""
        check_key(key.removesuffix("/"))
        if not key.endswith("/"):
            self._api.delete_objects([key])
            return
        left = next(iter(self._list_matching(key)), None)
        if left is not None:
            raise StoreError(f"delete {self._api.url(key)}: {left.key} is still in it")
        with suppress(AccessDenied, UnsupportedStore):
            self.abort_uploads(key.removesuffix("/"))

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand per request if the service supports that."""
        for key in keys:
            check_key(key)
        self._delete_all(iter(keys))

    def _delete_all(self, keys: Iterator[str]) -> None:
        while some := [*islice(keys, _DELETED_AT_ONCE)]:
            self._api.delete_objects(some)

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Return a writer of a new object: one request, or a multipart upload if it is long."""
        check_key(key)
        expect_positive("create", key, nbytes=nbytes)
        with suppress(NotFound):
            self._api.nbytes(key)
            raise AlreadyExists(f"create {self._api.url(key)}: the key is taken")
        return self._uploads.create_writer(key, nbytes, at_most=at_most)

    @override
    def uploads(self, folder: str = "") -> Iterator[str]:
        """Yield the keys of incomplete multipart uploads; Azure has none."""
        check_folder(folder)
        inside = f"{folder}/" if folder else ""
        found = list_incomplete_uploads(self._place, self._api.clients(), inside)
        return (upload.key for upload in found)

    @override
    def abort_uploads(self, folder: str) -> int:
        check_key(folder)
        clients = self._api.clients()
        found = tuple(list_incomplete_uploads(self._place, clients, f"{folder}/"))
        for upload in found:
            abort_upload(self._place, clients, upload)
        return len(found)

    @override
    def probe(self) -> str:
        """Check whether incomplete uploads can be listed; writes nothing."""
        self._api.expect_own_process()
        options = self._api.options
        size = f"{PART_NBYTES >> 20} MiB"
        text = (
            f"in one request up to {size}, longer ones as multipart uploads in parts of {size}, "
            f"up to {options.concurrency} at once"
        )
        try:
            next(self.uploads(), None)
        except StoreError as error:
            return f"{text}; broken uploads cannot be listed, so set a lifecycle rule: {error}"
        return text

    def _list_matching(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._api.list(prefix.rpartition("/")[0])
        return (info for info in found if info.key.startswith(prefix))

    def _in_order(self, prefix: str) -> Iterator[ObjectInfo]:
        last = ""
        for info in self._list_matching(prefix):
            if info.key <= last:
                raise UnsupportedStore(
                    f"list {self._api.url(prefix)}: {info.key} came after {last}; this service "
                    "does not list in order"
                )
            last = info.key
            yield info


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload that was begun and not completed."""

    key: str
    upload_id: str


def list_incomplete_uploads(
    place: BucketLocation, clients: Clients, folder: str
) -> Iterator[Upload]:
    """Yield the incomplete uploads under `folder`, which ends with a slash ("" is the root)."""
    prefix = place.make_object_key(folder)
    cut = len(place.make_object_key(""))
    try:
        if clients.s3 is not None:
            found = _list_s3(clients.s3, place.bucket, prefix)
        elif clients.gcs is not None:
            found = _list_gcs(clients.gcs, prefix)
        else:
            return
        for key, upload_id in found:
            yield Upload(key=key[cut:], upload_id=upload_id)
    except Exception as error:
        raise _as_error(place, clients, folder, error) from error


def abort_upload(place: BucketLocation, clients: Clients, upload: Upload) -> None:
    """Abort an upload; no-op if it has already ended."""
    key = place.make_object_key(upload.key)
    try:
        if clients.s3 is not None:
            clients.s3.abort_multipart_upload(
                Bucket=place.bucket, Key=key, UploadId=upload.upload_id
            )
        elif clients.gcs is not None:
            url = f"{clients.gcs.bucket_url}/{quote(key)}"
            _call_gcs(clients.gcs, "DELETE", url, {"uploadId": upload.upload_id})
    except Exception as error:
        failure = read_failure_of_python(error)
        if failure.code != "NoSuchUpload":
            raise _as_error(place, clients, upload.key, error) from error


def _list_s3(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    pages = client.get_paginator("list_multipart_uploads")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Uploads", ()):
            yield found["Key"], found["UploadId"]


def _list_gcs(gcs: GcsUploads, prefix: str) -> Iterator[tuple[str, str]]:
    markers: dict[str, str] = {}
    while True:
        answer = _call_gcs(gcs, "GET", gcs.bucket_url, {"uploads": "", "prefix": prefix, **markers})
        page = ElementTree.fromstring(answer)
        for found in page.findall("{*}Upload"):
            yield found.findtext("{*}Key", ""), found.findtext("{*}UploadId", "")
        if page.findtext("{*}IsTruncated") != "true":
            return
        markers = {
            "key-marker": page.findtext("{*}NextKeyMarker", ""),
            "upload-id-marker": page.findtext("{*}NextUploadIdMarker", ""),
        }


def _call_gcs(gcs: GcsUploads, method: str, url: str, params: dict[str, str]) -> bytes:
    reply = gcs.session.request(method, url, params=params, timeout=gcs.timeout_s)
    reply.raise_for_status()
    content: bytes = reply.content
    return content


def _as_error(place: BucketLocation, clients: Clients, key: str, error: Exception) -> HoldfastError:
    failure = read_failure_of_python(error)
    url = f"{place.url}/{key}"
    return as_store_error(failure, "uploads", url, who=clients.who)
