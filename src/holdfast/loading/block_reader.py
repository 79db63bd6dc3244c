"""Reads of a file's blocks: each is checked against its digest, and decompressed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.errors import CorruptData
from holdfast.format import blocks
from holdfast.format.blocks import DIGEST_NBYTES
from holdfast.format.codec import Decode, decoder
from holdfast.format.index import Index, StoredBlocks
from holdfast.format.manifest import FileEntry
from holdfast.store.base import Store, ignore
from holdfast.threads.buffers import Buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBlocks:
    """Places, digests and decoder of the blocks of one file of a checkpoint."""

    key: str
    block_nbytes: int
    digests: bytes
    """Digests of the plain (uncompressed) blocks, joined."""
    stored_digests: bytes = b""
    """Digests of the stored blocks, if they are compressed, joined."""
    spans: Sequence[tuple[int, int]] = ()
    """(start, stop) of the stored blocks, if they are compressed."""
    decoder: Decode | None = None
    """Function that decompresses a block; None: the file is stored uncompressed."""

    @classmethod
    def from_entries(cls, folder: str, name: str, entry: FileEntry, index: Index) -> FileBlocks:
        """Create the `FileBlocks` of a file from its entries in manifest and index.

        Raises:
            UnsupportedVersion: the package that decompresses it is not installed.
        """
        plain = cls(
            key=f"{folder}/{name}", block_nbytes=index.block_nbytes, digests=index.blocks[name]
        )
        return plain if entry.stored is None else plain.made_by(entry, index.stored[name])

    def made_by(self, entry: FileEntry, stored: StoredBlocks) -> FileBlocks:
        """Return a copy of these for the same file, stored as the compressed blocks `stored`."""
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
"""Function that checks a block after its read; returns the fault, or "". Called once."""

_CACHED_NBYTES = 1 << 20
"""Largest piece in bytes that is hashed during the read, while it is in the processor's cache.
Stores show larger pieces (`PIECE_NBYTES` in store/local/reads.py) only for direct reads, which
bring nothing into that cache."""


def read_block(
    store: Store, file: FileBlocks, number: int, plain: memoryview, *, verify: bool = True
) -> str:
    """Read, decompress and check a block into `plain`, of its length; return its fault, or ""."""
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
    """Read the stored bytes of a block; return a function that checks them and fills `plain`.

    A block with a wrong digest is read once more: a transient read error must not condemn a sound
    checkpoint. `buffers` has memory for compressed blocks.
    """
    if file.decoder is None:
        return _begin_plain(store, file, number, plain, verify=verify)
    start, stop = file.spans[number]
    # From the start of the page, as direct reads require.
    skipped = start % mmap.PAGESIZE
    buffer = buffers.acquire_buffer(max(file.block_nbytes, skipped + stop - start))
    memory = buffer[: skipped + stop - start]
    try:
        store.read_into(file.key, start - skipped, memory)
    except BaseException:
        buffers.release_buffer(buffer)
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
            buffers.release_buffer(buffer)

    return check


def cached_block(
    store: Store, file: FileBlocks, number: int, nbytes: int
) -> Callable[[Sequence[memoryview], bool], bool] | None:
    """Return a function that copies a block from the page cache to targets, without waiting.

    None if the store cannot do that. The function takes the targets, in order, and whether to
    check. It returns whether all `nbytes` were cached and right; if not, targets are undefined.
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
        return not verify or hasher.digest() == _select_digest(file.digests, number)

    return checked


def decode_block(
    file: FileBlocks, number: int, stored: memoryview, plain: memoryview, *, verify: bool = True
) -> str:
    """Decompress a stored block into `plain` and check its digest; return its fault, or ""."""
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
    # A digest needs the bytes in order: after a piece that is not hashed, the rest is hashed later.
    hasher = blocks.block_hasher()
    has_gap, hashed = False, 0

    def hash_piece(piece: memoryview) -> None:
        nonlocal has_gap, hashed
        has_gap = has_gap or piece.nbytes > _CACHED_NBYTES
        if not has_gap:
            hasher.update(piece)
            hashed += piece.nbytes

    def check() -> str:
        hasher.update(plain[hashed:])
        if hasher.digest() == _select_digest(file.digests, number):
            return ""
        store.read_into(file.key, start, plain, afresh=True)
        return "" if _is_block(plain, file.digests, number) else "is not what was written"

    store.read_into(file.key, start, plain, seen=hash_piece)
    return check


def _select_digest(digests: bytes, number: int) -> bytes:
    return digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)]


def _is_block(data: memoryview, digests: bytes, number: int) -> bool:
    return blocks.block_digest(data) == _select_digest(digests, number)
