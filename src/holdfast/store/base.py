"""The class of all stores: keys and bytes. A store writes seven members and inherits the rest.

A store knows nothing of checkpoints or tensors. What every store must do is written as a test
suite, `holdfast.testing.StoreContract`.
"""

from __future__ import annotations

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
    """Set by `head` only. Two keys with the same identity are names of one file, so that damage to
    one is damage to both. Empty: the key has a file of its own, as far as the store can tell."""


def flat(data: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, whatever its shape and item type."""
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def ignore(piece: memoryview) -> None:
    """Default callback for pieces: does nothing."""


FillCached: TypeAlias = Callable[[Sequence[memoryview], Callable[[memoryview], object]], bool]
"""Fills one target after the other, which together take the bytes that were asked for, and shows
each piece as `Store.read_into` does. It waits for nothing: False when that would be needed, or
anything else is wrong; the targets then hold any bytes."""


class BlockWriter(Protocol):
    """Object that is written in pieces, in any order, from several threads.

    Where pieces are sent in their order, one that comes far ahead waits in `write` for those before
    it, so another thread has to bring them.
    """

    def write(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start`. Pieces must not overlap."""
        ...

    def finish(self, nbytes: int | None = None) -> None:
        """Put all bytes, the length and the name on stable storage. Called once, at the end.

        `nbytes` is the length of an object that was begun with `at_most`; of others it is known.
        """
        ...

    def abort(self) -> None:
        """Give up; the object is removed or left as junk. Safe after a failure of `finish`."""
        ...


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Free bytes and inodes of a storage; None where it does not say."""

    nbytes: int | None
    inodes: int | None


class Store(ABC):
    """Keys and bytes. Every method raises a `StoreError`.

    A subclass writes `url`, `put`, `get`, `head`, `list`, `children` and `delete`. All else works
    through these, and is overridden by a store that can do it sooner, or can do more. Where
    `make_folder`, `link` or `create` is overridden, `has_folders`, `has_links` and
    `writes_in_place` are true unless the store says otherwise.

    A put with `if_absent` is never sent again on its own while an earlier one may take effect.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this is, for messages."""

    @abstractmethod
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Store `data` under `key`, whole or not at all; durable when this returns.

        With `if_absent` exactly one of any number of concurrent puts succeeds and the others
        raise `AlreadyExists`. Never makes a folder: where the store has folders, the folder
        must exist, else `NotFound`.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """The bytes [start, start + nbytes), or to the end when `nbytes` is None.

        Exact: fewer bytes than asked for raise `CorruptData`, a missing object `NotFound`. Never
        from a copy nearer by.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Length of an object; `NotFound` when there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in order of keys. May lag behind."""

    @abstractmethod
    def children(self, folder: str = "") -> tuple[str, ...]:
        """Names directly inside `folder` (no trailing slash), sorted; folders end with `/`.

        A missing folder is empty.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine. The removal is durable when this returns.

        A `key` that ends with `/` removes everything under it, the folder itself and the
        store's own leftovers in it; not atomic.
        """

    # Folders

    @property
    def has_folders(self) -> bool:
        """Whether folders are real things that must be made before anything is put into them.

        Puts are then calls of this host's kernel: of a process that is gone none can take effect
        any more.
        """
        return type(self).make_folder is not Store.make_folder

    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:  # noqa: B027
        """Make `folder`, the root and its ancestors; durable when this returns. No-op where the
        store has no folders.

        With `exclusive`, an existing `folder` raises `AlreadyExists`.
        """

    def sync_folder(self, folder: str) -> None:  # noqa: B027
        """Put the names in `folder` on stable storage ("" is the root)."""

    def refresh_folder(self, folder: str) -> None:  # noqa: B027
        """Make names that other hosts made in `folder` visible here.

        Network file systems answer from a cache that may be seconds old.
        """

    def sweep(self, folder: str) -> int:
        """Remove leftovers of interrupted puts directly in `folder`; returns how many."""
        return 0

    # Reading

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        """Fill `buffer` with the bytes at `start`; exact like `get`. Thread-safe.

        `seen` is called with one piece of the buffer after the other, as soon as its bytes are
        there, so that a digest finds them in the processor's cache. With `afresh` the bytes come
        from the medium itself, not from a cache on the way, where that can be had.
        """
        data = self.get(key, start, buffer.nbytes)
        if data:
            memory = buffer.cast("B")
            memory[:] = data
            seen(memory)

    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        """All bytes of an object, of one version of it; exact like `get`. `afresh` is as for
        `read_into`.

        Raises:
            LimitExceeded: it has more than `max_nbytes`; nothing was read.
        """
        nbytes = self.head(key).nbytes
        expect_at_most(nbytes, max_nbytes, what=f"{self.url}/{key}")
        if not afresh:
            return self.get(key, 0, nbytes)
        data = bytearray(nbytes)
        self.read_into(key, 0, memoryview(data), afresh=True)
        return bytes(data)

    def cached(self, key: str, start: int, nbytes: int) -> FillCached | None:
        """A function that copies these bytes, where they are in the memory of this machine already;
        exact like `get`. Thread-safe.

        Whoever is told None inside `keeping_open` asks `read_into`; outside it nothing is at hand.
        """
        return None

    def keeping_open(self) -> AbstractContextManager[None]:
        """Meanwhile an object stays open for the reads that follow, of any thread.

        A read may then see an object as it was when the first one came, unless it was deleted or
        replaced, or the read asks `afresh`.
        """
        return nullcontext()

    @property
    def reads_origin(self) -> bool:
        """Whether it never answers from copies: then what was read is what is there.

        False also where that is not known, as of a wrapper that a user has written.
        """
        return False

    def uncached(self) -> Store:
        """The same place, read in a way that copies nearer by never answer."""
        if self.reads_origin or type(self).read_into is Store.read_into:
            return self
        return WrappedStore(self)

    # Writing and deleting

    @property
    def writes_in_place(self) -> bool:
        """Whether an object that `create` began may be seen before it is finished."""
        return type(self).create is not Store.create

    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Begin an object of `nbytes` bytes under a key that is not taken (`AlreadyExists`).

        Readers may see it before it is finished, so only keys that no manifest lists yet are
        written this way. By default the pieces are held in memory, and put when it is finished.

        With `at_most` it may become shorter: its length is what `finish` is told. Such an object
        comes in pieces of 8 MiB, each at a multiple of that; only the last is shorter.
        """
        expect_positive("create", key, nbytes=nbytes)
        with suppress(NotFound):
            self.head(key)
            raise AlreadyExists(f"create {self.url}/{key}: the key is taken")
        return GatheringWriter(self, key, bytearray(nbytes), at_most=at_most)

    @property
    def has_links(self) -> bool:
        """Whether one object can have two keys, and lives until both are deleted."""
        return type(self).link is not Store.link

    def link(self, source: str, key: str) -> bool:
        """Give a finished object a second key, durably; the key must be new (`AlreadyExists`).

        False, and nothing done, when there is no `source` or it cannot have another name.
        """
        return False

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, in any order; missing ones are fine. No key ends with `/`.

        The removals are durable when this returns; when it raises, some may have been made.
        """
        for key in keys:
            self.delete(key)

    def uploads(self, folder: str = "") -> Iterator[str]:
        """Keys under `folder` ("" is the root) of objects that were begun and not completed, and
        whose bytes no list of objects shows."""
        return iter(())

    def abort_uploads(self, folder: str) -> int:
        """Give up what was begun and not completed under `folder`; returns how many.

        A writer that is still at it fails. Deleting a folder does the same, as far as it may.
        """
        return 0

    # The place itself

    def point(self, name: str, target: str) -> None:
        """Make `name` in the root point to the folder `target`, for people, replacing it
        atomically. By default an object holds the name of the folder."""
        check_key(target)
        self.put(name, target.encode())

    def pointed(self, name: str) -> str | None:
        """The folder that `name` in the root points to; None where there is no such pointer."""
        try:
            data = self.get_whole(name, max_nbytes=MAX_KEY_BYTES + 1)
        except NotFound:
            return None
        except StoreError as error:
            if type(error) is not StoreError:
                raise  # it may pass
            return None
        return data.decode(errors="replace").strip()

    def free_space(self) -> FreeSpace:
        """Room for this process, in bytes and inodes."""
        return FreeSpace(None, None)

    def probe(self) -> str:
        """Try in the root, which exists, what saves need, and leave nothing behind.

        Says, for people, how large objects will be written from now on; empty where there is
        nothing to choose.

        Raises:
            UnsupportedStore: something is lacking; the message says what.
        """
        return ""


class WrappedStore(Store):
    """`inner` under another name: subclass it to change what some operations do.

    It hands on the seven, folders, pointers, uploads, and what is asked of the place itself. Bytes
    go through `put` and `get` alone, and removals through `delete`: so a subclass that overrides
    one of these sees all of them. The faster ways of `inner` (`read_into`, `get_whole`, `cached`,
    `create`, `link`, `delete_many`) are used by a subclass that overrides them to hand them on.
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
    def free_space(self) -> FreeSpace:
        return self.inner.free_space()

    @override
    def probe(self) -> str:
        return self.inner.probe()


class GatheringWriter:
    """The `BlockWriter` of a store that takes whole objects: holds the pieces, and puts them."""

    def __init__(self, store: Store, key: str, content: bytearray, *, at_most: bool) -> None:
        self._store = store
        self._key = key
        self._content = content
        self._at_most = at_most
        self._lock = threading.Lock()
        self._is_open = True
        self._written_nbytes = 0

    def write(self, start: int, data: memoryview) -> None:
        """Keep a piece."""
        expect_inside(self._key, start, data.nbytes, len(self._content))
        with self._lock:
            self._check_open("write")
            self._content[start : start + data.nbytes] = data.tobytes()
            self._written_nbytes += data.nbytes

    def finish(self, nbytes: int | None = None) -> None:
        """Put the object, once all of its bytes were written."""
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
        self.keep(self._content)

    def abort(self) -> None:
        """Drop the pieces."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self.drop()

    def keep(self, content: bytearray) -> None:
        """Store the whole object."""
        self._store.put(self._key, content)

    def drop(self) -> None:
        """Remove what can be seen of an object that is given up: nothing."""

    def _check_open(self, operation: str) -> None:
        if not self._is_open:
            raise StoreError(f"{operation} {self._key}: this was finished or given up before")


def is_one_file(store: Store, key: str, other: str) -> bool:
    """Whether two keys are names of one file, so that its damage is in both; False if one is gone.

    Raises:
        StoreError: that cannot be told now.
    """
    try:
        found = store.head(key).identity
        return bool(found) and found == store.head(other).identity
    except NotFound:
        return False


@lru_cache(maxsize=4096)  # the same few names are in every folder, and each key is checked thrice
def check_key(key: str) -> None:
    """Raise `InvalidKey` unless `key` is one that every store accepts (docs/format.md)."""
    if len(key) > MAX_KEY_BYTES or not key.isascii():
        raise InvalidKey(f"key {key[:80]!r}: at most {MAX_KEY_BYTES} ASCII characters")
    for segment in key.split("/"):
        if len(segment) > MAX_SEGMENT_BYTES or not _SEGMENT.fullmatch(segment):
            raise InvalidKey(
                f"key {key!r}: segment {segment!r} must match {_SEGMENT.pattern} "
                f"and have at most {MAX_SEGMENT_BYTES} characters"
            )


def is_key(key: str) -> bool:
    """Whether every store accepts this key; what others have put into a store may have any."""
    try:
        check_key(key)
    except InvalidKey:
        return False
    return True


def final_nbytes(given: int | None, planned: int, *, at_most: bool, what: str) -> int:
    """The length of an object that is finished: as planned, or with `at_most` what is given.

    Raises:
        UsageError: it is missing, not wanted, or not within what was planned.
    """
    if not at_most and given in (None, planned):
        return planned
    if not at_most or given is None or not 0 <= given <= planned:
        limit = "at most " if at_most else ""
        raise UsageError(f"finish {what}: {given} bytes where {limit}{planned} were planned")
    return given


def check_folder(folder: str) -> None:
    """Raise `InvalidKey` unless `folder` is "", which is the root, or as `check_key` wants it."""
    if folder:
        check_key(folder)


def expect_positive(operation: str, key: str, **counts: int | None) -> None:
    """Raise `UsageError` where one of the `counts`, which are given by their names, is negative."""
    if any(count is not None and count < 0 for count in counts.values()):
        given = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise UsageError(f"{operation} {key}: {given} must not be negative")


def expect_inside(key: str, start: int, nbytes: int, planned: int) -> None:
    """Raise `UsageError` for a piece that does not lie inside the object that was begun."""
    if start < 0 or start + nbytes > planned:
        raise UsageError(
            f"write {key}: bytes {start} to {start + nbytes} are not inside the {planned} that "
            "were planned"
        )


def expect_at_least(nbytes: int, stop: int, *, what: str) -> None:
    """Raise `CorruptData` for an object that ends before byte `stop`."""
    if nbytes < stop:
        raise CorruptData(f"{what}: has {nbytes} bytes, expected at least {stop}")


def expect_at_most(nbytes: int, max_nbytes: int, *, what: str) -> None:
    """Raise `LimitExceeded` for an object that is longer than it may be."""
    if nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: {nbytes} bytes, at most {max_nbytes} are allowed")
