"""Plain blocks of a file, read and checked, however they are stored."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.engine.memory import Buffers
from holdfast.errors import CorruptData
from holdfast.format import blocks
from holdfast.format.blocks import DIGEST_NBYTES
from holdfast.format.codec import Decode, decoder
from holdfast.format.index import Index, StoredBlocks
from holdfast.format.manifest import FileEntry
from holdfast.store.base import Store, ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBlocks:
    """The blocks of one file of a checkpoint: where they lie, and what they must be."""

    key: str
    block_nbytes: int
    digests: bytes
    """Of the plain blocks."""
    stored_digests: bytes = b""
    """Of the stored blocks, where a codec made them."""
    spans: Sequence[tuple[int, int]] = ()
    """(start, stop) of the stored blocks."""
    decoder: Decode | None = None
    """None: the file is stored as it is."""

    @classmethod
    def of(cls, folder: str, name: str, entry: FileEntry, index: Index) -> FileBlocks:
        """Those of a file that manifest and index list.

        Raises:
            UnsupportedVersion: the package that decodes them is not installed.
        """
        found = cls(
            key=f"{folder}/{name}", block_nbytes=index.block_nbytes, digests=index.blocks[name]
        )
        return found if entry.stored is None else found.made_by(entry, index.stored[name])

    def made_by(self, entry: FileEntry, stored: StoredBlocks) -> FileBlocks:
        """The same file, stored as blocks of a codec."""
        assert entry.stored is not None
        return FileBlocks(
            key=self.key,
            block_nbytes=self.block_nbytes,
            digests=self.digests,
            stored_digests=stored.digests,
            spans=stored.spans(),
            decoder=decoder(entry.stored.codec),
        )


Check: TypeAlias = Callable[[], str]
"""Looks at a block that was read; gives what is wrong with it, or nothing. To be called once."""

_CACHED_NBYTES = 1 << 20
"""Bytes that are still in the cache of the processor that brought them. Stores show no larger
pieces (`PIECE_NBYTES` in store/local/reads.py), but of direct reads, which bring nothing into that
cache."""


def read_block(
    store: Store, file: FileBlocks, number: int, plain: memoryview, *, verify: bool = True
) -> str:
    """Fill `plain`, which has the length of the block; says what is wrong with it, or nothing.

    Raises:
        StoreError: it cannot be read.
        CorruptData: the file is too short.
    """
    return begin_block(store, file, number, plain, verify=verify, buffers=Buffers())()


def begin_block(
    store: Store,
    file: FileBlocks,
    number: int,
    plain: memoryview,
    *,
    verify: bool,
    buffers: Buffers,
) -> Check:
    """Wait for what is stored of a block; what this gives fills `plain`, which has its length, or
    the rest of it.

    A block that is not what was written is read once more: a transient error on the way must not
    condemn a sound checkpoint. `buffers` is where memory for stored blocks comes from.

    Raises:
        StoreError: it cannot be read.
        CorruptData: the file is too short, or was tampered with.
        What this gives raises the same, because it may have to read once more.
    """
    if file.decoder is None:
        return _begin_plain(store, file, number, plain, verify=verify)
    start, stop = file.spans[number]
    # From the page before on, because direct reads want that.
    skipped = start % mmap.PAGESIZE
    buffer = buffers.take(max(file.block_nbytes, skipped + stop - start))
    memory = buffer[: skipped + stop - start]
    try:
        store.read_into(file.key, start - skipped, memory)
    except BaseException:
        buffers.give_back(buffer)
        raise

    def check() -> str:
        try:
            stored = memory[skipped:]
            if verify and not _is_block(stored, file.stored_digests, number):
                store.read_into(file.key, start - skipped, memory, afresh=True)
                if not _is_block(stored, file.stored_digests, number):
                    return "is not what was written"
            return decode_block(file, number, stored, plain, verify=verify)
        finally:
            buffers.give_back(buffer)

    return check


def cached_block(
    store: Store, file: FileBlocks, number: int, nbytes: int
) -> Callable[[Sequence[memoryview], bool], bool] | None:
    """What fills one target after the other with a block of `nbytes`, without any waiting, where
    its bytes are at hand; with True it checks them, too. It gives whether they are there, and
    right; if not, any bytes may be.

    Raises:
        StoreError: the file cannot be opened.
        CorruptData: it is too short.
    """
    if file.decoder is not None:
        return None
    fill = store.cached(file.key, number * file.block_nbytes, nbytes)
    if fill is None:
        return None

    def checked(targets: Sequence[memoryview], verify: bool) -> bool:
        hasher = blocks.block_hasher()
        if not fill(targets, hasher.update if verify else ignore):
            return False
        return not verify or hasher.digest() == _digest(file.digests, number)

    return checked


def decode_block(
    file: FileBlocks, number: int, stored: memoryview, plain: memoryview, *, verify: bool = True
) -> str:
    """Fill `plain` from a stored block; says what is wrong with it, or nothing."""
    assert file.decoder is not None
    try:
        file.decoder(stored, plain)
    except CorruptData as error:
        return f"cannot be decoded: {error}"
    if verify and not _is_block(plain, file.digests, number):
        return "decodes to other bytes than were saved"
    return ""


def _begin_plain(
    store: Store, file: FileBlocks, number: int, plain: memoryview, *, verify: bool
) -> Check:
    start = number * file.block_nbytes
    if not verify:
        store.read_into(file.key, start, plain)
        return lambda: ""
    hasher = blocks.block_hasher()
    is_behind, done = False, 0

    def see(piece: memoryview) -> None:
        nonlocal is_behind, done
        is_behind = is_behind or piece.nbytes > _CACHED_NBYTES
        if not is_behind:
            hasher.update(piece)
            done += piece.nbytes

    def check() -> str:
        hasher.update(plain[done:])
        if hasher.digest() == _digest(file.digests, number):
            return ""
        store.read_into(file.key, start, plain, afresh=True)
        return "" if _is_block(plain, file.digests, number) else "is not what was written"

    store.read_into(file.key, start, plain, seen=see)
    return check


def _digest(digests: bytes, number: int) -> bytes:
    return digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)]


def _is_block(data: memoryview, digests: bytes, number: int) -> bool:
    return blocks.block_digest(data) == _digest(digests, number)
