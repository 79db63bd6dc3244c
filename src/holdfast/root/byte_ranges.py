"""Stored files of a checkpoint as byte ranges with digests, for copies of the raw bytes.

Nothing is decoded or decrypted but the manifest and the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.errors import CorruptData, MissingKey
from holdfast.format import layout
from holdfast.format.blocks import DIGEST_NBYTES, digest_blocks, file_digest, list_blocks
from holdfast.format.envelope import Visible, decode_visible
from holdfast.format.index_parts import ReadDocument, open_index
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    FileEntry,
    Manifest,
    decode_register,
)
from holdfast.root.documents import read_if_there
from holdfast.store.base import Buffer, Store

Listing: TypeAlias = Manifest | Visible
"""Document that lists the files of a checkpoint by stored name; `Visible` if encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """A byte range of a file, and the digest of its bytes."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGroup:
    """A byte range of a file that is written in one call, and the pieces that cover it."""

    start: int
    stop: int
    pieces: tuple[FilePiece, ...]


def groups_of(pieces: Sequence[FilePiece]) -> Iterator[PieceGroup]:
    """Divide a whole file into groups of 8 MiB; a piece that overlaps two is in both."""
    first, nbytes = 0, pieces[-1].stop
    for start in range(0, nbytes, BLOCK_NBYTES):
        stop = min(start + BLOCK_NBYTES, nbytes)
        while pieces[first].stop <= start:
            first += 1
        last = first
        while pieces[last].stop < stop:
            last += 1
        yield PieceGroup(start=start, stop=stop, pieces=tuple(pieces[first : last + 1]))


def decode_listing(data: Buffer, *, what: str) -> Listing | Aborted | Deleted:
    """Decode a manifest, abort or deletion document; of an encrypted manifest the visible part."""
    try:
        return decode_register(data, what=what)
    except MissingKey:
        return decode_visible(data, what=what)


def read_listing(store: Store, folder: str) -> Listing | Aborted | Deleted | None:
    """Read a folder's manifest document, as `decode_listing`; None if there is none."""
    key = f"{folder}/{layout.MANIFEST}"
    return read_if_there(store, key, decode_listing, max_nbytes=MAX_MANIFEST_NBYTES)


def pieces_of_sealed(
    entry: FileEntry, digests: Iterable[bytes], *, what: str
) -> tuple[FilePiece, ...]:
    """Divide an encrypted file into pieces, after checking the digest of the whole file.

    Only a digest of the whole file is recorded, so the caller reads all of it first: `digests` are
    those of the blocks into which `format.blocks.list_blocks` splits it.

    Raises:
        CorruptData: they do not match the recorded digest; names `what`.
    """
    spans = list_blocks(entry.nbytes)
    joined = b"".join(digests)
    if file_digest(entry.nbytes, joined) != entry.digest:
        raise CorruptData(f"{what}: not what was written")
    return _pieces(spans, joined)


def pieces_of(
    manifest: Manifest, read: ReadDocument, *, what: str
) -> Mapping[str, tuple[FilePiece, ...]]:
    """Divide every file of a manifest into pieces to check, by its index.

    `read` returns documents of the index, checked; `what` names the checkpoint's folder.
    """
    own: dict[str, bytes] = {}

    def read_and_digest(name: str) -> Buffer:
        data = read(name)
        own[name] = digest_blocks(data, manifest.block_nbytes)
        return data

    index = open_index(
        read_and_digest(layout.INDEX),
        read_and_digest,
        files=manifest.files,
        what=f"{what}/{layout.INDEX}",
    )
    digests = {**index.blocks, **own}
    pieces = {}
    for name, entry in manifest.files.items():
        stored = index.stored.get(name)
        if stored is None:
            pieces[name] = _pieces(list_blocks(entry.nbytes, index.block_nbytes), digests[name])
        else:
            pieces[name] = _pieces(stored.spans(), stored.digests)
    return pieces


def _pieces(spans: list[tuple[int, int]], digests: bytes) -> tuple[FilePiece, ...]:
    return tuple(
        FilePiece(
            start=start,
            stop=stop,
            digest=digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
        )
        for number, (start, stop) in enumerate(spans)
    )
