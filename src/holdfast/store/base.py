"""The store protocol: six operations on keys and bytes, and optional speed-ups.

A store knows nothing of checkpoints or tensors. What every store must do is written as a test
suite, `holdfast.testing.StoreContract`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeAlias, runtime_checkable

from holdfast.errors import (
    AccessDenied,
    InvalidKey,
    LimitExceeded,
    NotFound,
    UnsupportedStore,
    UsageError,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_KEY_BYTES = 900
MAX_SEGMENT_BYTES = 255
_SEGMENT = re.compile(r"[A-Za-z0-9_=+\-][A-Za-z0-9._=+\-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What `head` and `list` tell about an object. `nbytes` is its length in bytes."""

    key: str
    nbytes: int
    identity: str = field(default="", compare=False)
    """Set by `head` only. Two keys with the same identity are names of one file, so that damage to
    one is damage to both. Empty: the key has a file of its own, as far as the store can tell."""


@runtime_checkable
class Store(Protocol):
    """Keys and bytes. Every method raises a `StoreError`.

    A put with `if_absent` is never sent again on its own while an earlier one may take effect.
    """

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        ...

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Store `data` under `key`, whole or not at all; durable when this returns.

        With `if_absent` exactly one of any number of concurrent puts succeeds and the others
        raise `AlreadyExists`. Never makes a folder: where the store has folders, the folder
        must exist, else `NotFound`.
        """
        ...

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """The bytes [start, start + nbytes), or to the end when `nbytes` is None.

        Exact: fewer bytes than asked for raise `CorruptData`, a missing object `NotFound`.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Length of an object; `NotFound` when there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in order of keys. May lag behind."""
        ...

    def children(self, folder: str = "") -> tuple[str, ...]:
        """Names directly inside `folder` (no trailing slash), sorted; folders end with `/`.

        A missing folder is empty.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; a missing one is fine. The removal is durable when this returns.

        A `key` that ends with `/` removes everything under it, the folder itself and the
        store's own leftovers in it; not atomic.
        """
        ...


@runtime_checkable
class Folders(Protocol):
    """Stores whose folders are real things that must be made and synced."""

    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:
        """Make `folder`, the root and its ancestors; durable when this returns.

        With `exclusive`, an existing `folder` raises `AlreadyExists`.
        """
        ...

    def sync_folder(self, folder: str) -> None:
        """Put the names in `folder` on stable storage ("" is the root)."""
        ...

    def refresh_folder(self, folder: str) -> None:
        """Make names that other hosts made in `folder` visible here.

        Network file systems answer from a cache that may be seconds old.
        """
        ...

    def sweep(self, folder: str) -> int:
        """Remove leftovers of interrupted puts directly in `folder`; returns how many."""
        ...


def ignore(piece: memoryview) -> None:
    """For whoever need not see the pieces."""


@runtime_checkable
class ReadsInto(Protocol):
    """Stores that read straight into memory of the caller."""

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
        ...


FillCached: TypeAlias = Callable[[Sequence[memoryview], Callable[[memoryview], object]], bool]
"""Fills one target after the other, which together take the bytes that were asked for, and shows
each piece as `ReadsInto.read_into` does. It waits for nothing: False when that would be needed, or
anything else is wrong; the targets then hold any bytes."""


@runtime_checkable
class ReadsCached(Protocol):
    """Stores of which bytes may lie in the memory of this machine already."""

    def cached(self, key: str, start: int, nbytes: int) -> FillCached | None:
        """What copies these bytes, where they are at hand; exact like `get`. Thread-safe.

        Whoever is told None inside `KeepsOpen.keeping_open` asks `ReadsInto.read_into`; outside
        it nothing is at hand.
        """
        ...


@runtime_checkable
class KeepsOpen(Protocol):
    """Stores in which an object has to be opened before each read."""

    def keeping_open(self) -> AbstractContextManager[None]:
        """Meanwhile an object stays open for the reads that follow, of any thread.

        A read may then see an object as it was when the first one came, unless it was deleted or
        replaced, or the read asks `afresh`.
        """
        ...


@runtime_checkable
class ReadsWhole(Protocol):
    """Stores in which the length and the bytes of an object come sooner together than apart."""

    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        """All bytes of an object, of one version of it; exact like `get`. `afresh` is as for
        `ReadsInto.read_into`.

        Raises:
            LimitExceeded: it has more than `max_nbytes`; nothing was read.
        """
        ...


@runtime_checkable
class DeletesMany(Protocol):
    """Stores in which to remove many objects takes less than to remove each."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, in any order; missing ones are fine. No key ends with `/`.

        The removals are durable when this returns; when it raises, some may have been made.
        """
        ...


@runtime_checkable
class ReadsOrigin(Protocol):
    """Stores that say whether all they read comes from where it lies.

    Of one that says nothing, such as a wrapper that a user has written, nobody knows.
    """

    @property
    def reads_origin(self) -> bool:
        """Whether it never answers from copies: then what was read is what is there."""
        ...


@runtime_checkable
class Caches(Protocol):
    """Stores that may answer `read_into` from copies nearer by, unless it asks `afresh`; never
    `get`."""

    def uncached(self) -> Store:
        """The same place without the copies, for whoever says what is there."""
        ...


class BlockWriter(Protocol):
    """One object that is written in pieces, in any order, from several threads.

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


@runtime_checkable
class WritesBlocks(Protocol):
    """Stores that take a large object in pieces."""

    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Begin an object of `nbytes` bytes under a key that is not taken (`AlreadyExists`).

        Readers may see it before it is finished, so only keys that no manifest lists yet are
        written this way.

        With `at_most` it may become shorter: its length is what `finish` is told. Such an object
        comes in pieces of 8 MiB, each at a multiple of that; only the last is shorter.
        """
        ...


@runtime_checkable
class LinksFiles(Protocol):
    """Stores in which one object can have two keys, and lives until both are deleted."""

    def link(self, source: str, key: str) -> bool:
        """Give a finished object a second key, durably; the key must be new (`AlreadyExists`).

        False, and nothing done, when there is no `source` or it cannot have another name.
        """
        ...


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


@runtime_checkable
class Points(Protocol):
    """Stores that can hold a pointer for people."""

    def point(self, name: str, target: str) -> None:
        """Make `name` in the root point to the folder `target`, replacing it atomically."""
        ...

    def pointed(self, name: str) -> str | None:
        """The folder that `name` in the root points to; None where there is no such pointer."""
        ...


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What is left: bytes and inodes; None where the storage does not say."""

    nbytes: int | None
    inodes: int | None


@runtime_checkable
class TellsSpace(Protocol):
    """Stores that know how much room is left."""

    def free_space(self) -> FreeSpace:
        """Room for this process, in bytes and inodes."""
        ...


@runtime_checkable
class Probes(Protocol):
    """Stores that find out by trying how they have to work."""

    def probe(self) -> str:
        """Try in the root, which exists, what saves need, and leave nothing behind.

        Says, for people, how large objects will be written from now on.

        Raises:
            UnsupportedStore: something is lacking; the message says what.
        """
        ...


@runtime_checkable
class AbortsUploads(Protocol):
    """Stores in which a write that broke off leaves bytes that no list of objects shows."""

    def uploads(self, folder: str = "") -> Iterator[str]:
        """Keys under `folder` ("" is the root) of objects that were begun and not completed."""
        ...

    def abort_uploads(self, folder: str) -> int:
        """Give up what was begun and not completed under `folder`; returns how many.

        A writer that is still at it fails. Deleting a folder does the same, as far as it may.
        """
        ...


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


def make_folder(store: Store, folder: str, *, exclusive: bool = False) -> None:
    """Make a folder where the store has folders; elsewhere there is nothing to make."""
    if isinstance(store, Folders):
        store.make_folder(folder, exclusive=exclusive)


def sync_folder(store: Store, folder: str) -> None:
    """Sync a folder's names where the store has folders."""
    if isinstance(store, Folders):
        store.sync_folder(folder)


def abort_uploads(store: Store, folder: str) -> None:
    """Give up what was begun and not completed, where there is such a thing and it is allowed."""
    if isinstance(store, AbortsUploads):
        with suppress(AccessDenied, UnsupportedStore):
            store.abort_uploads(folder)


def reads_origin(store: Store) -> bool:
    """Whether what this store reads is what is there, as far as it says so."""
    return isinstance(store, ReadsOrigin) and store.reads_origin


def uncached(store: Store) -> Store:
    """The store itself, where copies nearer by may answer for it; to read from."""
    if isinstance(store, Caches):
        return store.uncached()
    if reads_origin(store) or not isinstance(store, ReadsInto):
        return store
    return _Gets(store)


class _Gets:
    """A store that may have copies somewhere in it, read in the way that they never answer."""

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.put, self.delete = inner.put, inner.delete
        self.get, self.head = inner.get, inner.head
        self.list, self.children = inner.list, inner.children


def read_into(
    store: Store,
    key: str,
    start: int,
    memory: memoryview,
    *,
    seen: Callable[[memoryview], object] = ignore,
    afresh: bool = False,
) -> None:
    """Fill `memory` as `ReadsInto.read_into` does, also from a store that only gets."""
    if isinstance(store, ReadsInto):
        store.read_into(key, start, memory, seen=seen, afresh=afresh)
    else:
        memory[:] = store.get(key, start, len(memory))
        seen(memory)


def get_whole(store: Store, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
    """All bytes of an object as `ReadsWhole.get_whole` gives them, also from a store that only
    gets."""
    # isinstance() with a Protocol takes as long as a small local read.
    whole: Callable[..., bytes] | None = getattr(store, "get_whole", None)
    if whole is not None:
        return whole(key, max_nbytes=max_nbytes, afresh=afresh)
    nbytes = store.head(key).nbytes
    expect_at_most(nbytes, max_nbytes, what=f"{store.url}/{key}")
    if not afresh:
        return store.get(key, 0, nbytes)
    data = bytearray(nbytes)
    read_into(store, key, 0, memoryview(data), afresh=True)
    return bytes(data)


def expect_at_most(nbytes: int, max_nbytes: int, *, what: str) -> None:
    """Raise `LimitExceeded` for an object that is longer than it may be."""
    if nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: {nbytes} bytes, at most {max_nbytes} are allowed")


def delete_many(store: Store, keys: Sequence[str]) -> None:
    """Remove objects as `DeletesMany.delete_many` does, one by one where the store does no more."""
    if isinstance(store, DeletesMany):
        store.delete_many(keys)
    else:
        for key in keys:
            store.delete(key)


def keeping_open(store: Store) -> AbstractContextManager[None]:
    """Have objects stay open between the reads of each, where the store can do that."""
    return store.keeping_open() if isinstance(store, KeepsOpen) else nullcontext()


def refresh_folder(store: Store, folder: str) -> None:
    """See names that others made, where the store has folders that are cached."""
    if isinstance(store, Folders):
        store.refresh_folder(folder)
