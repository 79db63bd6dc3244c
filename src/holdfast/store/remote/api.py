"""Requests to an object store by obstore, one method each, with retries and `StoreError`s.

This module knows nothing of the `Store` class. The clients are made when they are first needed,
and belong to the process that made them.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import Any, TypeVar

from holdfast.errors import (
    CorruptData,
    HoldfastError,
    NotFound,
    OutcomeUnknown,
    StoreError,
    TransientStoreError,
    UnsupportedStore,
)
from holdfast.events import logger
from holdfast.store.base import ObjectInfo, expect_at_least, expect_at_most
from holdfast.store.remote.errors import RemoteFailure, as_store_error, read_failure
from holdfast.store.remote.opening import (
    BucketLocation,
    Clients,
    RemoteOptions,
    needed,
    open_clients,
)


class RateLimit:
    """Computes waits that limit the bytes per second of all threads of a process.

    Pieces get time slots one after the other, as long as each takes at this rate; unused time is
    not saved up. The first piece after a pause waits `offset_s`, so that the ranks of a host, each
    with its own offset, do not begin at the same moment.

    Args:
        nbytes_per_s: the rate; None is without limit.
        offset_s: how long the first piece after a pause waits.
        clock: gives seconds that only go up.
    """

    def __init__(
        self,
        nbytes_per_s: float | None,
        *,
        offset_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._offset_s = offset_s
        self._clock = clock
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def compute_seconds(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take at this rate."""
        return nbytes / self._nbytes_per_s if self._nbytes_per_s else 0.0

    def reserve(self, nbytes: int) -> float:
        """Reserve the next time slot for a piece; return the seconds to wait until it begins."""
        if not self._nbytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            begin = self._free_at if self._free_at > now else now + self._offset_s
            self._free_at = begin + self.compute_seconds(nbytes)
            return begin - now


T = TypeVar("T")

_CLOUDS = ("s3", "gs", "az")
_PAGE = 1000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 15.0
_STAGGER_NBYTES = 8 * 1024 * 1024
# Not the module's own generator: training scripts seed that one, and ranks would pause alike.
_JITTER = random.Random()

_runtime_pid: int | None = None
"""Id of the process that has obstore's network threads; None before they are started."""


def is_own_process() -> bool:
    """Whether obstore's network threads, if there are any, are in this process."""
    return _runtime_pid in (None, os.getpid())


class Api:
    """Requests to one bucket. Thread-safe; all but `stream` translate obstore's errors."""

    def __init__(self, place: BucketLocation, options: RemoteOptions) -> None:
        self.place = place
        self.options = options
        self.upload_pace = _pace(options, options.max_upload_mb_s)
        self._download_pace = _pace(options, options.max_download_mb_s)
        self._obs = needed("obstore", place.scheme)
        self._clients: Clients | None = None
        self._has_answered = False
        self._has_warned = False
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(options.concurrency)

    def url(self, key: str) -> str:
        """Return the URL of a key, for messages."""
        return f"{self.place.url}/{key}".rstrip("/")

    def clients(self) -> Clients:
        """Return the clients, which are made at the first call."""
        global _runtime_pid
        self.expect_own_process()
        with self._lock:
            if self._clients is None:
                # Set before the clients exist: another thread may fork in between.
                _runtime_pid = os.getpid()
                self._clients = open_clients(self.place, self.options)
            return self._clients

    def expect_own_process(self) -> None:
        """Raise `UnsupportedStore` in a process that was forked from one that had used a store.

        Called before any lock or slot is taken: a thread of the parent may hold it for ever.
        """
        if not is_own_process():
            raise UnsupportedStore(
                f"{self.place.url}: this process was forked from one ({_runtime_pid}) that had "
                "used a remote store, whose network threads a fork does not copy; start "
                "it with spawn or forkserver"
            )

    def put_object(self, key: str, content: memoryview) -> None:
        """Put an object in one request, which is retried after a failure."""
        self.expect_own_process()
        _wait_for_rate(self.upload_pace, len(content))
        with self._slot(f"put {self.url(key)}"), self._request("put", key):
            self._send_request(
                lambda store: self._obs.put(store, key, content, use_multipart=False)
            )

    def put_new(self, key: str, content: memoryview) -> None:
        """Put an object under an absent key; retried only if a reply says it had no effect."""
        patience = Patience(self.options)
        store = self.clients().once
        while True:
            try:
                self._obs.put(store, key, content, mode="create", use_multipart=False)
                self._has_answered = True
                return
            except Exception as error:
                failure = read_failure(error)
                refused = self.translate_error("put", key, error)
                if not failure.was_refused:
                    unclear = failure.is_unclear and isinstance(refused, TransientStoreError)
                    raise (OutcomeUnknown(str(refused)) if unclear else refused) from error
                if patience.is_used_up():
                    raise refused from error
            patience.pause()

    async def stream(self, key: str, pieces: AsyncIterator[memoryview], part_nbytes: int) -> None:
        """Upload an object in parts; aborts if `pieces` raises. Raises obstore's errors."""
        await self._obs.put_async(
            self.clients().plain,
            key,
            pieces,
            use_multipart=True,
            chunk_size=part_nbytes,
            max_concurrency=self.options.concurrency,
        )

    def nbytes(self, key: str) -> int:
        """Return the length of an object in bytes."""
        with self._request("head", key):
            found: int = self._send_request(lambda store: self._obs.head(store, key)["size"])
        return found

    def modified(self, key: str) -> datetime:
        """Return when an object was put, by the clock of the service."""
        with self._request("head", key):
            found: datetime = self._send_request(
                lambda store: self._obs.head(store, key)["last_modified"]
            )
        return found

    def read_object(self, key: str, *, max_nbytes: int | None = None) -> bytes:
        """Read all bytes of one version of an object."""
        self.expect_own_process()
        nbytes, data = self._retry("get", key, lambda store: self._get(store, key, max_nbytes))
        if len(data) != nbytes:
            raise CorruptData(f"get {self.url(key)}: has {nbytes} bytes, {len(data)} came")
        # Paced afterwards: before, the length is unknown; in between, the service would not wait.
        _wait_for_rate(self._download_pace, len(data))
        return data

    def _get(self, store: Any, key: str, max_nbytes: int | None) -> tuple[int, bytes]:
        """Get an object; return its stated length and the received bytes."""
        result = self._obs.get(store, key)
        self._expect_plain(key, result)
        nbytes: int = result.meta["size"]
        if max_nbytes is not None:
            expect_at_most(nbytes, max_nbytes, what=self.url(key))
        return nbytes, bytes(memoryview(result.bytes()))

    def read_range(self, key: str, start: int, stop: int) -> Any:
        """Read a range that is not empty; return a buffer with exactly its bytes."""
        return self.read_up_to(key, start, stop, least=stop)[0]

    def read_up_to(self, key: str, start: int, stop: int, *, least: int) -> tuple[Any, Any]:
        """Read a range, or less of it if the object ends at `least` or later.

        Returns the bytes, and what the service says of the object: its `size`, `e_tag` and
        `last_modified`. Raises as `read_range`.
        """
        self.expect_own_process()
        _wait_for_rate(self._download_pace, stop - start)
        data, meta = self._retry(
            "get", key, lambda store: self._get_range(store, key, start, stop, least)
        )
        expected = min(stop, meta["size"]) - start
        if len(data) != expected:
            raise CorruptData(
                f"get {self.url(key)}: requested bytes {start} to {start + expected}, but "
                f"received {len(data)}"
            )
        return data, meta

    def _get_range(
        self, store: Any, key: str, start: int, stop: int, least: int
    ) -> tuple[Any, Any]:
        result = self._obs.get(store, key, options={"range": (start, stop)})
        self._expect_plain(key, result)
        expect_at_least(result.meta["size"], least, what=f"get {self.url(key)}")
        if self.place.scheme in _CLOUDS:
            return result.bytes(), result.meta
        return self._bounded(key, result, stop - start), result.meta

    def _expect_plain(self, key: str, result: Any) -> None:
        """Raise `UnsupportedStore` for a web server's reply that has other bytes than the file."""
        if self.place.scheme in _CLOUDS:  # some store "aws-chunked", and send the bytes as they are
            return
        coding = str(result.attributes.get("Content-Encoding", "identity")).strip().lower()
        if coding not in ("identity", ""):
            raise UnsupportedStore(
                f"get {self.url(key)}: is sent with Content-Encoding: {coding}, so these are not "
                "the bytes that were saved. Let the server send the files of checkpoints without "
                "compression"
            )

    def _bounded(self, key: str, result: Any, max_nbytes: int) -> bytes:
        """Read a reply's bytes, at most `max_nbytes`: a web server may send more than it says."""
        data = bytearray()
        for piece in result:
            data += memoryview(piece)
            if len(data) > max_nbytes:
                raise CorruptData(f"get {self.url(key)}: more than {max_nbytes} bytes came")
        return bytes(data)

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the objects in a folder ("" is the root) and below, in the service's order."""
        patience = Patience(self.options)
        last: str | None = None
        while True:
            unordered: list[ObjectInfo] = []
            try:
                for page in self._pages(folder, last):
                    found = [ObjectInfo(key=item["path"], nbytes=item["size"]) for item in page]
                    if self.place.scheme == "az":
                        unordered += found  # so a broken list cannot be resumed
                        continue
                    for info in found:
                        yield info
                        last = info.key
                yield from unordered
                return
            except TransientStoreError:
                # Until the first answer `_send_request` has retried already.
                if not self._has_answered or patience.is_used_up():
                    raise
            patience.pause()

    def _pages(self, folder: str, after: str | None) -> Iterator[Any]:
        """Yield the pages of a list; obstore does not retry a page with a truncated reply."""

        def begin(store: Any) -> tuple[Iterator[Any], Any]:
            pages = self._obs.list(store, folder or None, offset=after, chunk_size=_PAGE)
            return pages, next(pages, None)

        with self._request("list", folder):
            pages, page = self._send_request(begin)
        while page is not None:
            yield page
            with self._request("list", folder):
                page = next(pages, None)

    def list_names(self, folder: str) -> set[str]:
        """Return the names directly in a folder ("" is the root); folders end with a slash."""
        found = self._retry(
            "list", folder, lambda store: self._obs.list_with_delimiter(store, folder or None)
        )
        names = {path.rpartition("/")[2] + "/" for path in found["common_prefixes"]}
        inside = f"{folder}/" if folder else ""
        keys = (item["path"] for item in found["objects"])
        return names | {key[len(inside) :] for key in keys if key.startswith(inside)}

    def delete_objects(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error."""
        asked = [*keys] if len(keys) > 1 else keys[0]
        try:
            self._retry("delete", keys[0], lambda store: self._obs.delete(store, asked))
        except NotFound:
            # One of them was missing, and the reply does not say what became of the others.
            for key in keys if len(keys) > 1 else ():
                self.delete_objects([key])

    def delete_quietly(self, key: str) -> None:
        """Delete an object; ignores a failure, which leaves the object as junk."""
        with suppress(StoreError):
            self.delete_objects([key])

    def has(self, key: str, nbytes: int) -> bool:
        """Whether an object of that length exists."""
        try:
            return self.nbytes(key) == nbytes
        except NotFound:
            return False

    def _retry(self, operation: str, key: str, request: Callable[[Any], T]) -> T:
        """Send a request, and retry it also after a truncated reply, unlike obstore."""
        patience, what = Patience(self.options), f"{operation} {self.url(key)}"
        while True:
            try:
                slot = self._slot(what) if operation == "get" else nullcontext()
                with slot, self._request(operation, key):
                    return self._send_request(request)
            except TransientStoreError:
                # Until the first answer `_send_request` has retried already.
                if not self._has_answered or patience.is_used_up():
                    raise
            patience.pause()

    def _send_request(self, request: Callable[[Any], T]) -> T:
        """Send a request, by calling it with a client; retry here until the first answer ever.

        obstore retries without a message and ignores Ctrl-C. That is fine if the service has
        answered before. Until it has, the address may be wrong: then the request is retried here,
        and a warning is logged after the first failure.
        """
        clients, patience = self.clients(), Patience(self.options)
        while not self._has_answered:
            try:
                found = request(clients.once)
            except HoldfastError:
                self._has_answered = True  # such an error is about a reply
                raise
            except Exception as error:
                failure = read_failure(error)
                if failure.is_silence and not patience.is_used_up():
                    self._warn_of_no_answer(failure)
                    patience.pause()
                    continue
                if failure.is_silence or failure.is_final:
                    raise
                self._note_answer(failure)
                break
            else:
                self._has_answered = True
                return found
        return request(clients.plain)

    def _note_answer(self, failure: RemoteFailure) -> None:
        """Record that the service has answered: a refusal counts, missing credentials do not."""
        if failure.is_answer:
            self._has_answered = True

    def _warn_of_no_answer(self, failure: RemoteFailure) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: no answer yet: %s. Retrying for up to %g s. %s",
                self.place.url,
                failure.reason,
                self.options.retry_s,
                self.place.advice,
            )

    @contextmanager
    def _request(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError:
            raise
        except Exception as error:  # noqa: BLE001 - it is translated
            # A traceback would show the query, which is in the text of the client's error.
            cause = None if self.place.query else error
            raise self.translate_error(operation, key, error) from cause

    def translate_error(self, operation: str, key: str, error: Exception) -> HoldfastError:
        """Translate an error of obstore to a `HoldfastError`; advise if no answer ever came."""
        who = self._clients.who if self._clients is not None else "nothing yet"
        failure = read_failure(error)
        self._note_answer(failure)
        refused = as_store_error(failure, operation, self.url(key), who=who)
        if failure.is_silence and not self._has_answered:
            return TransientStoreError(f"{refused}. No server answered there. {self.place.advice}")
        return refused

    @contextmanager
    def _slot(self, what: str) -> Iterator[None]:
        """Hold one of the slots that limit the number of concurrent requests with data."""
        timeout_s = self.options.timeout_s + self.options.retry_s
        if not self._slots.acquire(timeout=timeout_s):
            raise TransientStoreError(
                f"{what}: none of {self.options.concurrency} requests ended in {timeout_s:.0f} s"
            )
        try:
            yield
        finally:
            self._slots.release()


class Patience:
    """Retry limits of a request that obstore does not retry: number, time, growing pauses."""

    def __init__(self, options: RemoteOptions) -> None:
        self._end = time.monotonic() + options.retry_s
        self._left = options.max_retries
        self._longest_s = _FIRST_PAUSE_S

    def is_used_up(self) -> bool:
        """Whether the retries are used up, or their time is."""
        return not self._left or time.monotonic() + self._longest_s > self._end

    def next_pause_s(self) -> float:
        """Count a retry; return the seconds to wait before it, random and growing."""
        pause_s = _JITTER.uniform(0, self._longest_s)
        self._left -= 1
        self._longest_s = min(2 * self._longest_s, _LONGEST_PAUSE_S)
        return pause_s

    def pause(self) -> None:
        """Sleep before the next retry."""
        time.sleep(self.next_pause_s())


def _pace(options: RemoteOptions, mb_s: float | None) -> RateLimit:
    """Make the rate limit of this rank, offset from the other ranks of the host."""
    nbytes_per_s = options.nbytes_per_s(mb_s)
    if nbytes_per_s is None:
        return RateLimit(None)
    turn_s = _STAGGER_NBYTES / nbytes_per_s
    return RateLimit(nbytes_per_s, offset_s=turn_s * options.rank_on_host / options.ranks_on_host)


def _wait_for_rate(pace: RateLimit, nbytes: int) -> None:
    delay_s = pace.reserve(nbytes)
    if delay_s > 0:
        time.sleep(delay_s)
