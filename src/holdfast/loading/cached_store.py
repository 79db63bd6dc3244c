"""Store that caches the checkpoint files of another store on a disk of this host.

The ranks of a host that load one checkpoint download each of its bytes once. Only data files of
checkpoints are cached: their keys are never reused, and digests cover their bytes. The manifest,
which shows that a checkpoint exists, and everything else is read anew each time; so a deleted
checkpoint cannot be loaded, even if copies of it are left.

Only `read_into` uses the cache, because its caller can read `afresh` if a digest is wrong; a
damaged copy costs one more read and condemns nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from typing_extensions import override

from holdfast.errors import FormatError, UsageError
from holdfast.format import layout
from holdfast.store import open_store
from holdfast.store.base import BlockWriter, Buffer, ObjectInfo, Seen, Store, WrappedStore, ignore
from holdfast.store.local.pieces import PIECE_NBYTES, LocalPieces, Piece

_MAX_LENGTHS = 10_000


class CachedStore(WrappedStore):
    """Store that reads from `inner`, and caches checkpoint files in a folder of this host.

    Args:
        inner: a store, or a path or URL as `open_store` takes it.
        folder: folder of the cache on a disk of this host, for all processes and any number of
            runs. The copies are in a subfolder that only this user may read.
        max_nbytes: most bytes that the cache may take; the least recently used copies are deleted.
            Downloads under way come on top, up to 8 MiB a thread.
        wait_s: seconds to wait for another process that downloads the same 8 MiB. After that they
            are downloaded here, too.

    Thread-safe. It may be pickled if `inner` may. If the folder is full or cannot be written, it
    reads without the cache and logs that once; it never makes a read fail.
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
        """Key of a checkpoint file → its length in bytes, as `head` last returned it."""

    def __repr__(self) -> str:
        return f"CachedStore({self.inner!r})"

    @override
    def uncached(self) -> Store:
        return self.inner.uncached()

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self.inner.put(key, data, if_absent=if_absent)
        self._remove_copies(key)

    @override
    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        return self.inner.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        """Read through the cache; with `afresh`, drop the copies and read from `inner`."""
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
                self._pieces.remove_copies(piece.place)
        if afresh or start + len(memory) > length:
            self.inner.read_into(key, start, memory, seen=seen, afresh=afresh)
            return

        def fetch(at: int, part: memoryview, shown: Seen) -> None:
            self.inner.read_into(key, at, part, seen=shown)

        for piece in pieces:
            first = max(piece.start, start)
            part = memory[first - start : piece.start + piece.nbytes - start]
            self._pieces.read_piece(piece, first, part, fetch, seen=seen)

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
        self._remove_copies(key)

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        self.inner.delete_many(keys)
        for key in keys:
            self._remove_copies(key)

    def _pieces_of(self, key: str, length: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces, as cached, of an object that hold the bytes from `start` to `stop`."""
        for at in range(start - start % PIECE_NBYTES, min(stop, length), PIECE_NBYTES):
            yield Piece(
                place=f"{self._place}/{key}/{at // PIECE_NBYTES:08d}",
                start=at,
                nbytes=min(PIECE_NBYTES, length - at),
            )

    def _remove_copies(self, key: str) -> None:
        """Drop the cached copies of a checkpoint file, or of all files in its folder."""
        folder, _, name = key.partition("/")
        if layout.parse_attempt(folder) is None or (name and not _is_lasting(key)):
            return
        for known in tuple(self._lengths):
            if known.startswith(key):
                self._lengths.pop(known, None)
        self._pieces.remove_copies(f"{self._place}/{key.rstrip('/')}")


def _is_lasting(key: str) -> bool:
    """Whether a key is that of a checkpoint's data file, which is written only once."""
    folder, _, name = key.partition("/")
    if layout.parse_attempt(folder) is None:
        return False
    try:
        if not layout.is_stored_name(name):
            layout.check_file_name(name)
    except FormatError:
        return False
    return True
