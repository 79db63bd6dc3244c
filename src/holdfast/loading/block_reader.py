"""Reads of files: block by block, each checked and decompressed, and whole documents; no torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.errors import CorruptData, NotFound
from holdfast.format import blocks, layout
from holdfast.format.blocks import DIGEST_NBYTES
from holdfast.format.codec import Decode, decoder
from holdfast.format.index import Index, StoredBlocks
from holdfast.format.index_parts import open_index
from holdfast.format.manifest import FileEntry, Manifest
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
        """Create the `FileBlocks` of a file from its entries in manifest and index."""
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


def read_blocks(
    store: Store, file: FileBlocks, nbytes: int, *, what: str, verify: bool = True
) -> bytes:
    """Read the first `nbytes` of a file, which end with a block; `what` names it in errors."""
    data = bytearray(nbytes)
    for number, (start, stop) in enumerate(blocks.list_blocks(nbytes, file.block_nbytes)):
        fault = read_block(store, file, number, memoryview(data)[start:stop], verify=verify)
        if fault:
            raise CorruptData(f"{what}: block {number} {fault}")
    return bytes(data)


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
            if verify and not is_block(stored, file.stored_digests, number):
                store.read_into(file.key, start - skipped, memory, afresh=True)
                if not is_block(stored, file.stored_digests, number):
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
    if verify and not is_block(plain, file.digests, number):
        return "decodes to bytes that differ from those saved"
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
        return "" if is_block(plain, file.digests, number) else "is not what was written"

    store.read_into(file.key, start, plain, seen=hash_piece)
    return check


def _select_digest(digests: bytes, number: int) -> bytes:
    return digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)]


def is_block(data: memoryview, digests: bytes, number: int) -> bool:
    """Whether a block has the digest of its number."""
    return blocks.block_digest(data) == _select_digest(digests, number)


def read_index(store: Store, folder: str, manifest: Manifest, *, verify: bool = True) -> Index:
    """Read and check the index of a checkpoint; parts of it are read when they are needed."""

    def read(name: str) -> bytes:
        return read_file(store, folder, name, manifest, verify=verify)

    what = f"{store.url}/{folder}/{layout.INDEX}"
    index = open_index(read(layout.INDEX), read, files=manifest.files, what=what)
    if set(index.components) != set(manifest.components):
        raise CorruptData(f"{folder}: index and manifest list different components")
    if index.block_nbytes != manifest.block_nbytes:
        raise CorruptData(f"{folder}: index and manifest differ in the size of blocks")
    return index


def read_tree(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool = True
) -> bytes:
    """Read and check the tree of a component, as the bytes of its document."""
    tree = manifest.components[name].files[0]
    if manifest.files[tree].stored is None:
        return read_file(store, folder, tree, manifest, verify=verify)
    return decode_file(store, folder, tree, manifest, index, verify=verify)


def read_file(store: Store, folder: str, name: str, manifest: Manifest, *, verify: bool) -> bytes:
    """Read a small file and check its digest against the manifest; retry once if it differs."""
    key, entry = f"{folder}/{name}", _document_entry(store, folder, name, manifest)
    data, digest = bytearray(entry.nbytes), ""
    for afresh in (False, True):
        store.read_into(key, 0, memoryview(data), afresh=afresh)
        digest = blocks.file_digest(len(data), blocks.digest_blocks(data, manifest.block_nbytes))
        if digest == entry.digest or not verify:
            return bytes(data)
    raise CorruptData(f"{store.url}/{key}: digest is {digest}, expected {entry.digest}")


def decode_file(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool
) -> bytes:
    """Read and decompress a small file, checking it block by block."""
    entry = _document_entry(store, folder, name, manifest)
    file = FileBlocks.from_entries(folder, name, entry, index)
    return read_blocks(store, file, entry.nbytes, what=f"{store.url}/{file.key}", verify=verify)


def _document_entry(store: Store, folder: str, name: str, manifest: Manifest) -> FileEntry:
    """Return the manifest's entry of a small file, after checking the file's length."""
    key, entry = f"{folder}/{name}", manifest.files.get(name)
    if entry is None:
        raise CorruptData(f"{store.url}/{folder}: the manifest lists no {name}")
    # Before memory is allocated: a damaged manifest may claim any number of bytes.
    check_size(store, key, entry)
    return entry


def check_size(store: Store, key: str, entry: FileEntry) -> None:
    """Raise `CorruptData` unless a file exists with the length that the manifest records."""
    try:
        nbytes = store.head(key).nbytes
    except NotFound as error:
        raise CorruptData(f"{store.url}/{key}: the file is missing") from error
    if nbytes != entry.stored_nbytes:
        raise CorruptData(f"{store.url}/{key}: {nbytes} bytes, expected {entry.stored_nbytes}")
