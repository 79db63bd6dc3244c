"""A store that keeps copies of what it reads of checkpoints on a disk of this host.

The ranks of a host that load one checkpoint fetch each of its bytes once. Copies are made of the
files of checkpoints alone: their keys are never used twice, and digests cover their bytes. The
manifest, which says whether a checkpoint is there, is asked for anew each time, as is all else; so
a deleted checkpoint is gone, whatever copies of it are left.

Only `read_into` is answered from copies, because its caller can ask `afresh` when the bytes are not
what they should be; a damaged copy costs one more read and condemns nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from holdfast.errors import FormatError, UsageError
from holdfast.format import layout
from holdfast.store import open_store
from holdfast.store.base import (
    AbortsUploads,
    Buffer,
    Folders,
    KeepsOpen,
    LinksFiles,
    ObjectInfo,
    Points,
    Probes,
    ReadsWhole,
    Store,
    TellsSpace,
    WritesBlocks,
    delete_many,
    ignore,
    read_into,
    uncached,
)
from holdfast.store.localpieces import PIECE_NBYTES, LocalPieces, Piece
from holdfast.store.wrapping import handing_on

_PASSED_ON = (
    Folders,
    WritesBlocks,
    LinksFiles,
    Points,
    TellsSpace,
    Probes,
    AbortsUploads,
    KeepsOpen,
    ReadsWhole,
)
_MAX_LENGTHS = 10_000


class CachedStore:
    """`inner`, with copies of what is read of checkpoints in a folder of this host.

    Args:
        inner: a store, or a path or URL as `open_store` takes it.
        folder: where the copies are, on a disk of this host: one for all processes and for any
            number of runs. They are in a folder of their own in it, which only this user may read.
        max_nbytes: what the copies may take, in bytes; those that were not used for longest go.
            What is being fetched comes on top, up to 8 MiB a thread.
        wait_s: how long to wait for another process that fetches the same 8 MiB. After that it is
            fetched here, too.

    Thread-safe. It may be pickled where `inner` may. A folder that is full or cannot be written
    makes it read without copies, which is told once; it never makes a read fail.
    """

    def __new__(
        cls, inner: str | os.PathLike[str] | Store, *_: object, **__: object
    ) -> CachedStore:
        """An instance of a subclass that has what `inner` has."""
        store = open_store(inner)
        offered = tuple(
            handing_on(protocol) for protocol in _PASSED_ON if isinstance(store, protocol)
        )
        kind = type(cls.__name__, (cls, *offered), {"__doc__": cls.__doc__})
        made = cast(CachedStore, object.__new__(kind))
        made.inner = store
        return made

    inner: Any
    """The store without copies."""

    def __init__(
        self,
        inner: str | os.PathLike[str] | Store,
        folder: str | os.PathLike[str],
        *,
        max_nbytes: int,
        wait_s: float = 60.0,
    ) -> None:
        if not isinstance(max_nbytes, int) or max_nbytes < PIECE_NBYTES:
            raise UsageError(f"max_nbytes={max_nbytes!r}: must be at least {PIECE_NBYTES} bytes")
        if not 0 <= wait_s <= 3600:
            raise UsageError(f"wait_s={wait_s!r}: must be from 0 to 3600 seconds")
        self._given = (folder, max_nbytes, wait_s)
        self._pieces = LocalPieces(folder, max_nbytes=max_nbytes, wait_s=wait_s)
        self._place = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._lengths: dict[str, int] = {}
        """Of files of checkpoints, as they were last told."""

    def __repr__(self) -> str:
        return f"CachedStore({self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is what it was made from: its class is there only in this process."""
        folder, max_nbytes, wait_s = self._given
        made = partial(CachedStore, max_nbytes=max_nbytes, wait_s=wait_s)
        return made, (self.inner, folder)

    @property
    def url(self) -> str:
        """See `Store.url`: that of `inner`."""
        return cast(str, self.inner.url)

    def uncached(self) -> Store:
        """See `Caches.uncached`."""
        return uncached(self.inner)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        self.inner.put(key, data, if_absent=if_absent)
        self._forget(key)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`; never from a copy."""
        return cast(bytes, self.inner.get(key, start, nbytes))

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        """See `ReadsInto.read_into`; from copies, unless `afresh`, which drops them."""
        memory = memoryview(buffer).cast("B")
        if not _is_lasting(key) or start < 0 or not memory:
            read_into(self.inner, key, start, memory, seen=seen, afresh=afresh)
            return
        length = self._lengths.get(key)
        if length is None:
            length = self.head(key).nbytes
        pieces = self._pieces_of(key, length, start, start + len(memory))
        if afresh:
            for piece in pieces:
                self._pieces.forget(piece.place)
        if afresh or start + len(memory) > length:
            read_into(self.inner, key, start, memory, seen=seen, afresh=afresh)
            return

        def fetch(at: int, part: memoryview, shown: Callable[[memoryview], object]) -> None:
            read_into(self.inner, key, at, part, seen=shown)

        for piece in pieces:
            first = max(piece.start, start)
            part = memory[first - start : piece.start + piece.nbytes - start]
            self._pieces.read(piece, first, part, fetch, seen=seen)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        info = cast(ObjectInfo, self.inner.head(key))
        if _is_lasting(key):
            if len(self._lengths) >= _MAX_LENGTHS:
                self._lengths.clear()
            self._lengths[key] = info.nbytes
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        return cast("Iterator[ObjectInfo]", self.inner.list(prefix))

    def children(self, folder: str = "") -> tuple[str, ...]:
        """See `Store.children`."""
        return cast("tuple[str, ...]", self.inner.children(folder))

    def delete(self, key: str) -> None:
        """See `Store.delete`; copies go, too."""
        self.inner.delete(key)
        self._forget(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `DeletesMany.delete_many`; copies go, too."""
        delete_many(self.inner, keys)
        for key in keys:
            self._forget(key)

    def _pieces_of(self, key: str, length: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of an object in which the bytes from `start` to `stop` lie."""
        for at in range(start - start % PIECE_NBYTES, min(stop, length), PIECE_NBYTES):
            yield Piece(
                place=f"{self._place}/{key}/{at // PIECE_NBYTES:08d}",
                start=at,
                nbytes=min(PIECE_NBYTES, length - at),
            )

    def _forget(self, key: str) -> None:
        """Drop what is known of a file of a checkpoint, or of all files of one."""
        folder, _, name = key.partition("/")
        if layout.parse_attempt(folder) is None or (name and not _is_lasting(key)):
            return
        for known in tuple(self._lengths):
            if known.startswith(key):
                self._lengths.pop(known, None)
        self._pieces.forget(f"{self._place}/{key.rstrip('/')}")


def _is_lasting(key: str) -> bool:
    """Whether a key is that of a file of a checkpoint, which is written once and never again."""
    folder, _, name = key.partition("/")
    if layout.parse_attempt(folder) is None:
        return False
    try:
        if not layout.is_stored_name(name):
            layout.check_file_name(name)
    except FormatError:
        return False
    return True
