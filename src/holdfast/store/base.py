"""The base class of all stores, which hold bytes under keys.

A subclass implements seven members and inherits the rest. A store knows nothing of checkpoints or
tensors. What every store must do is written as a test suite, `holdfast.testing.StoreContract`.
"""

from __future__ import annotations

import hashlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeAlias

from typing_extensions import override

from holdfast.errors import (
    AlreadyExists,
    CorruptData,
    InvalidKey,
    LimitExceeded,
    NotFound,
    StoreError,
    UsageError,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_KEY_BYTES = 900
MAX_SEGMENT_BYTES = 255
_SEGMENT = re.compile(r"[A-Za-z0-9_=+\-][A-Za-z0-9._=+\-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Key, length in bytes and identity of an object, from `head` and `list`."""

    key: str
    nbytes: int
    identity: str = field(default="", compare=False)
    """Identity of the file, set by `head` only. Keys with the same one are names of one file, so
    that damage is in both. Empty: the key has a file of its own, as far as the store can tell."""


def proof_of(name: str) -> str:
    """Return the 8 hex digits that prove, at the end of a name, that Holdfast made the name."""
    return hashlib.sha256(f"holdfast {name}".encode()).hexdigest()[:8]


def flatten_buffer(data: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer of any shape and item type as a flat view."""
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


Seen: TypeAlias = Callable[[memoryview], object]
"""Callback that gets each piece of a read, in order, as soon as it is there."""


def ignore(piece: memoryview) -> None:
    """Default callback for pieces: does nothing."""


FillCached: TypeAlias = Callable[[Sequence[memoryview], Seen], bool]
"""Function that fills targets, in order, with cached bytes; the result of `Store.cached`.

The targets together have the length that was asked for. The second argument is called with each
piece, as `seen` of `Store.read_into`. Returns False if it would have to wait or anything else is
wrong; the targets then hold undefined bytes."""


class BlockWriter(Protocol):
    """Writer of one object in pieces, in any order, from several threads.

    If the store sends pieces in order, one that comes far ahead waits in `write` for those before
    it, so another thread has to write them.
    """

    def write(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start`. Pieces must not overlap."""
        ...

    def finish(self, nbytes: int | None = None) -> None:
        """Make the object durable, once; `nbytes` is its length if begun with `at_most`."""
        ...

    def abort(self) -> None:
        """Stop writing; the object is removed or left as junk. Safe after a failed `finish`."""
        ...


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Free bytes and inodes of a store; None where unknown."""

    nbytes: int | None
    inodes: int | None
    file_system: str = ""
    """Identity, on this host, of the file system; empty where there is none."""


class Store(ABC):
    """Base class of stores of bytes under keys. A method that fails raises a `StoreError`.

    A subclass implements `url`, `put`, `get`, `head`, `list`, `children` and `delete`. All else
    works through these, and is overridden by a store that does it faster, or can do more. If all
    four methods of folders are overridden, or `link`, or `create`, then `has_folders`, `has_links`
    or `writes_in_place` is true unless the store overrides it, too.

    A put with `if_absent` is never retried while an earlier request may still take effect.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The store's path or URL, for messages."""

    @abstractmethod
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Store `data` under `key`, whole or not at all; durable when this returns.

        With `if_absent` exactly one of any number of concurrent puts succeeds and the others
        raise `AlreadyExists`. Never makes a folder: where the store has folders, the folder
        must exist, else `NotFound`.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Read the bytes [start, start + nbytes), or to the end if `nbytes` is None.

        Exact: fewer bytes than asked for raise `CorruptData`, a missing object `NotFound`. Never
        read from the local copies of a caching store.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return length and identity of an object; raise `NotFound` if it is missing."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose keys start with `prefix`, ordered by key; may lag behind puts."""

    @abstractmethod
    def children(self, folder: str = "") -> tuple[str, ...]:
        """Return the sorted names directly in `folder` (no trailing slash); folders end with `/`.

        A missing folder is empty.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object, durably; a missing one is no error.

        A `key` that ends with `/` removes an empty folder and the store's own leftovers in it.
        Objects are only ever removed by their own keys.

        Raises:
            StoreError: the folder still has something in it, which stays.
        """

    @property
    def reads_only(self) -> bool:
        """Whether objects can only be read, by their keys: not listed, put or deleted."""
        return False

    # Folders

    @property
    def has_folders(self) -> bool:
        """Whether folders must be made before anything is put into them.

        If so, puts are calls of this host's kernel: none by a process that has ended can take
        effect any more.
        """
        own = type(self)
        return (
            own.make_folder is not Store.make_folder
            and own.sync_folder is not Store.sync_folder
            and own.refresh_folder is not Store.refresh_folder
            and own.sweep is not Store.sweep
        )

    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:  # noqa: B027
        """Make `folder`, the root and its ancestors, durably. No-op if the store has no folders.

        With `exclusive`, an existing `folder` raises `AlreadyExists`.
        """

    def sync_folder(self, folder: str) -> None:  # noqa: B027
        """Make the names in `folder` durable, as by fsync ("" is the root)."""

    def refresh_folder(self, folder: str) -> None:  # noqa: B027
        """Make files that other hosts created in `folder` visible to this host.

        Network file systems answer from a cache that may be seconds old.
        """

    def sweep(self, folder: str) -> int:
        """Remove leftovers of interrupted puts directly in `folder`; return their number."""
        return 0

    def unlisted(self, folder: str) -> tuple[str, ...]:
        """Return the names directly in `folder` that keep it from removal, and are no objects.

        On a disk: folders, links, devices, and files whose names are no keys.
        """
        return ()

    # Reading

    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        """Fill `buffer` with the object's bytes from `start` on; raises as `get`. Thread-safe.

        `seen` is called with each piece of the buffer, in order, as soon as it is filled, so that a
        digest finds it in the processor's cache. With `afresh` the bytes are read from the storage
        itself, not from a cache on the way, where that is possible.
        """
        data = self.get(key, start, buffer.nbytes)
        if data:
            memory = buffer.cast("B")
            memory[:] = data
            seen(memory)

    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        """Read a whole object, all of it from one version; `afresh` as for `read_into`.

        Raises:
            LimitExceeded: it has more than `max_nbytes`; nothing was read.
        """
        what = f"{self.url}/{key}"
        nbytes = self.head(key).nbytes
        expect_at_most(nbytes, max_nbytes, what=what)
        if not afresh:
            # Not `nbytes` of it: the object may have been replaced, as a manifest by a tombstone.
            found = self.get(key)
            expect_at_most(len(found), max_nbytes, what=what)
            return found
        data = bytearray(nbytes)
        self.read_into(key, 0, memoryview(data), afresh=True)
        return bytes(data)

    def cached(self, key: str, start: int, nbytes: int) -> FillCached | None:
        """Return a function that copies these bytes from this machine's memory; None: not cached.

        Exact like `get`. Thread-safe. Bytes are only found within `keeping_open`; callers that get
        None call `read_into`.
        """
        return None

    def keeping_open(self) -> AbstractContextManager[None]:
        """Keep objects open within the `with` block for later reads, by any thread.

        A read may then see an object as it was at its first read, unless it was deleted or
        replaced, or the read asks `afresh`.
        """
        return nullcontext()

    @property
    def reads_origin(self) -> bool:
        """Whether reads never come from local copies, and so show the stored bytes.

        False also if that is not known, as for a wrapper that a user has written.
        """
        return False

    def uncached(self) -> Store:
        """Return this store, or a view of it whose reads bypass local copies."""
        if self.reads_origin or type(self).read_into is Store.read_into:
            return self
        return WrappedStore(self)

    # Writing and deleting

    @property
    def writes_in_place(self) -> bool:
        """Whether readers may see an object of `create` before it is finished."""
        return type(self).create is not Store.create

    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Return a writer of a new object of `nbytes` bytes; `AlreadyExists` if the key is taken.

        Readers may see it before it is finished, so only keys that no manifest lists yet are
        written this way. By default the pieces are held in memory, and put when it is finished.

        With `at_most` it may become shorter: its length is passed to `finish`. Such an object is
        written in pieces of 8 MiB, each at a multiple of that; only the last is shorter.
        """
        expect_positive("create", key, nbytes=nbytes)
        with suppress(NotFound):
            self.head(key)
            raise AlreadyExists(f"create {self.url}/{key}: the key is taken")
        return GatheringWriter(self, key, bytearray(nbytes), at_most=at_most)

    @property
    def has_links(self) -> bool:
        """Whether one object can have two keys (hard links), and exists until both are deleted."""
        return type(self).link is not Store.link

    def link(self, source: str, key: str) -> bool:
        """Give a finished object a second key, durably; the key must be new (`AlreadyExists`).

        Returns False, without a change, if `source` is missing or cannot have another name.
        """
        return False

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, in any order; missing ones are no error. No key ends with `/`.

        The removals are durable when this returns; if it raises, some may have been made.
        """
        for key in keys:
            self.delete(key)

    def uploads(self, folder: str = "") -> Iterator[str]:
        """Yield keys of incomplete uploads under `folder` ("" is the root), which `list` omits."""
        return iter(())

    def abort_uploads(self, folder: str) -> int:
        """Abort the incomplete uploads under `folder`; return their number.

        A writer that is still uploading fails. Deleting a folder does the same, if permitted.
        """
        return 0

    # The root

    def point(self, name: str, target: str) -> None:
        """Make `name` in the root point to folder `target`, for people; replaces atomically.

        By default an object holds the name of the folder.
        """
        check_key(target)
        self.put(name, target.encode())

    def pointed(self, name: str) -> str | None:
        """Return the folder that `name` in the root points to; None if there is no such pointer."""
        try:
            data = self.get_whole(name, max_nbytes=MAX_KEY_BYTES + 1)
        except NotFound:
            return None
        except StoreError as error:
            if type(error) is not StoreError:
                raise  # may be temporary
            return None
        return data.decode(errors="replace").strip()

    def outer(self) -> Iterator[Store]:
        """Yield stores of the folders that the root is in, from the inside out."""
        return iter(())

    def free_space(self) -> FreeSpace:
        """Return the free space for this process, in bytes and inodes."""
        return FreeSpace(None, None)

    def probe(self) -> str:
        """Try the operations that saves need in the existing root; leave nothing behind.

        Returns a text, for people, on how large objects will be written from now on; empty if there
        is nothing to choose.

        Raises:
            UnsupportedStore: something is missing; the message says what.
        """
        return ""


class WrappedStore(Store):
    """Wrapper that delegates operations to the store `inner`; subclasses override some.

    It delegates the seven required members, folders, pointers, uploads, and operations on the root.
    All bytes pass through `put` and `get`, and all removals through `delete`: so a subclass that
    overrides one of these sees all of them. The faster operations of `inner` (`read_into`,
    `get_whole`, `cached`, `create`, `link`, `delete_many`) are used only by a subclass that
    overrides them to delegate them.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    @override
    def url(self) -> str:
        return self.inner.url

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self.inner.put(key, data, if_absent=if_absent)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        return self.inner.get(key, start, nbytes)

    @override
    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        return self.inner.children(folder)

    @override
    def delete(self, key: str) -> None:
        self.inner.delete(key)

    @property
    @override
    def reads_only(self) -> bool:
        return self.inner.reads_only

    @property
    @override
    def has_folders(self) -> bool:
        return self.inner.has_folders

    @override
    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:
        self.inner.make_folder(folder, exclusive=exclusive)

    @override
    def sync_folder(self, folder: str) -> None:
        self.inner.sync_folder(folder)

    @override
    def refresh_folder(self, folder: str) -> None:
        self.inner.refresh_folder(folder)

    @override
    def sweep(self, folder: str) -> int:
        return self.inner.sweep(folder)

    @override
    def unlisted(self, folder: str) -> tuple[str, ...]:
        return self.inner.unlisted(folder)

    @override
    def keeping_open(self) -> AbstractContextManager[None]:
        return self.inner.keeping_open()

    @override
    def uploads(self, folder: str = "") -> Iterator[str]:
        return self.inner.uploads(folder)

    @override
    def abort_uploads(self, folder: str) -> int:
        return self.inner.abort_uploads(folder)

    @override
    def point(self, name: str, target: str) -> None:
        self.inner.point(name, target)

    @override
    def pointed(self, name: str) -> str | None:
        return self.inner.pointed(name)

    @override
    def outer(self) -> Iterator[Store]:
        return self.inner.outer()

    @override
    def free_space(self) -> FreeSpace:
        return self.inner.free_space()

    @override
    def probe(self) -> str:
        return self.inner.probe()


class GatheringWriter:
    """`BlockWriter` for stores that only put whole objects: gathers the pieces in memory."""

    def __init__(self, store: Store, key: str, content: bytearray, *, at_most: bool) -> None:
        self._store = store
        self._key = key
        self._content = content
        self._at_most = at_most
        self._lock = threading.Lock()
        self._is_open = True
        self._written_nbytes = 0

    def write(self, start: int, data: memoryview) -> None:
        """Copy a piece into the gathered object."""
        expect_inside(self._key, start, data.nbytes, len(self._content))
        with self._lock:
            self._check_open("write")
            self._content[start : start + data.nbytes] = data.tobytes()
            self._written_nbytes += data.nbytes

    def finish(self, nbytes: int | None = None) -> None:
        """Put the object; all of its bytes must have been written."""
        planned = len(self._content)
        length = final_nbytes(nbytes, planned, at_most=self._at_most, what=self._key)
        with self._lock:
            self._check_open("finish")
            if length != self._written_nbytes:
                raise StoreError(
                    f"finish {self._key}: {length - self._written_nbytes} of {length} bytes "
                    f"were not written"
                )
            self._is_open = False
        del self._content[length:]
        self.put_content(self._content)

    def abort(self) -> None:
        """Discard the gathered pieces."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self.remove_visible()

    def put_content(self, content: bytearray) -> None:
        """Put the gathered object into the store; subclasses may override it."""
        self._store.put(self._key, content)

    def remove_visible(self) -> None:
        """Remove what readers can see of an aborted object; no-op, as nothing was put yet."""

    def _check_open(self, operation: str) -> None:
        if not self._is_open:
            raise StoreError(
                f"{operation} {self._key}: the write has already been finished or aborted"
            )


def is_one_file(store: Store, key: str, other: str) -> bool:
    """Whether two keys are names of one file, so that damage is in both."""
    try:
        found = store.head(key).identity
        return bool(found) and found == store.head(other).identity
    except NotFound:
        return False


@lru_cache(maxsize=4096)  # the same few names are in every folder, and each key is checked thrice
def check_key(key: str) -> None:
    """Raise `InvalidKey` unless every store accepts `key` (docs/format.md)."""
    if len(key) > MAX_KEY_BYTES or not key.isascii():
        raise InvalidKey(f"key {key[:80]!r}: at most {MAX_KEY_BYTES} ASCII characters")
    for segment in key.split("/"):
        if len(segment) > MAX_SEGMENT_BYTES or not _SEGMENT.fullmatch(segment):
            raise InvalidKey(
                f"key {key!r}: segment {segment!r} must match {_SEGMENT.pattern} "
                f"and have at most {MAX_SEGMENT_BYTES} characters"
            )


def is_key(key: str) -> bool:
    """Whether every store accepts this key; foreign objects in a store may have other keys."""
    try:
        check_key(key)
    except InvalidKey:
        return False
    return True


def final_nbytes(given: int | None, planned: int, *, at_most: bool, what: str) -> int:
    """Return the length of an object at `finish`: as planned, or with `at_most` the given one."""
    if not at_most and given in (None, planned):
        return planned
    if not at_most or given is None or not 0 <= given <= planned:
        limit = "at most " if at_most else ""
        raise UsageError(f"finish {what}: {given} bytes where {limit}{planned} were planned")
    return given


def check_folder(folder: str) -> None:
    """Raise `InvalidKey` unless `folder` is "", which is the root, or a valid key."""
    if folder:
        check_key(folder)


def expect_positive(operation: str, key: str, **counts: int | None) -> None:
    """Raise `UsageError` if one of the named `counts` is negative."""
    if any(count is not None and count < 0 for count in counts.values()):
        given = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise UsageError(f"{operation} {key}: {given} must not be negative")


def expect_inside(key: str, start: int, nbytes: int, planned: int) -> None:
    """Raise `UsageError` if a piece does not lie inside the `planned` bytes of its object."""
    if start < 0 or start + nbytes > planned:
        raise UsageError(
            f"write {key}: bytes {start} to {start + nbytes} are not inside the {planned} that "
            "were planned"
        )


def expect_at_least(nbytes: int, stop: int, *, what: str) -> None:
    """Raise `CorruptData` if an object of `nbytes` ends before byte `stop`."""
    if nbytes < stop:
        raise CorruptData(f"{what}: has {nbytes} bytes, expected at least {stop}")


def expect_at_most(nbytes: int, max_nbytes: int, *, what: str) -> None:
    """Raise `LimitExceeded` if an object of `nbytes` has more than `max_nbytes`."""
    if nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: {nbytes} bytes, at most {max_nbytes} are allowed")
