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

from typing_extensions import override

from holdfast.errors import FormatError, UsageError
from holdfast.format import layout
from holdfast.store import open_store
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    ObjectInfo,
    Store,
    WrappedStore,
    ignore,
)
from holdfast.store.local.pieces import PIECE_NBYTES, LocalPieces, Piece

_MAX_LENGTHS = 10_000


class CachedStore(WrappedStore):
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
        super().__init__(open_store(inner))
        self._pieces = LocalPieces(folder, max_nbytes=max_nbytes, wait_s=wait_s)
        self._place = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._lengths: dict[str, int] = {}
        """Of files of checkpoints, as they were last told."""

    def __repr__(self) -> str:
        return f"CachedStore({self.inner!r})"

    @override
    def uncached(self) -> Store:
        return self.inner.uncached()

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self.inner.put(key, data, if_absent=if_absent)
        self._forget(key)

    @override
    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        return self.inner.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)

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
        """Read from copies, unless `afresh`, which drops them."""
        memory = memoryview(buffer).cast("B")
        if not _is_lasting(key) or start < 0 or not memory:
            self.inner.read_into(key, start, memory, seen=seen, afresh=afresh)
            return
        length = self._lengths.get(key)
        if length is None:
            length = self.head(key).nbytes
        pieces = self._pieces_of(key, length, start, start + len(memory))
        if afresh:
            for piece in pieces:
                self._pieces.forget(piece.place)
        if afresh or start + len(memory) > length:
            self.inner.read_into(key, start, memory, seen=seen, afresh=afresh)
            return

        def fetch(at: int, part: memoryview, shown: Callable[[memoryview], object]) -> None:
            self.inner.read_into(key, at, part, seen=shown)

        for piece in pieces:
            first = max(piece.start, start)
            part = memory[first - start : piece.start + piece.nbytes - start]
            self._pieces.read(piece, first, part, fetch, seen=seen)

    @override
    def head(self, key: str) -> ObjectInfo:
        info = self.inner.head(key)
        if _is_lasting(key):
            if len(self._lengths) >= _MAX_LENGTHS:
                self._lengths.clear()
            self._lengths[key] = info.nbytes
        return info

    @property
    @override
    def writes_in_place(self) -> bool:
        return self.inner.writes_in_place

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        return self.inner.create(key, nbytes, at_most=at_most)

    @property
    @override
    def has_links(self) -> bool:
        return self.inner.has_links

    @override
    def link(self, source: str, key: str) -> bool:
        return self.inner.link(source, key)

    @override
    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._forget(key)

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        self.inner.delete_many(keys)
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
