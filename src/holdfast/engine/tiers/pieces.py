"""Files of a checkpoint as they lie in a store: how long they are, and digests to check them by.

Whoever copies a checkpoint looks at files this way, and does not care what is in them; of a sealed
one nothing is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.engine.roots.documents import read_if_there
from holdfast.errors import CorruptData, MissingKey
from holdfast.format import layout
from holdfast.format.blocks import DIGEST_NBYTES, digest_blocks, file_digest, split
from holdfast.format.envelope import Visible, decode_visible
from holdfast.format.index import decode_index
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    FileEntry,
    Manifest,
    decode_register,
)
from holdfast.store.base import Buffer, Store

Listing: TypeAlias = Manifest | Visible
"""What lists the files of a checkpoint as they lie there, by name; sealed ones have other names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """A stretch of a file, and the digest of its bytes."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGroup:
    """A stretch of a file as stores like to have it written, and the pieces in which it lies."""

    start: int
    stop: int
    pieces: tuple[FilePiece, ...]


def groups_of(pieces: Sequence[FilePiece]) -> Iterator[PieceGroup]:
    """A whole file, in stretches of 8 MiB, the last may be shorter.

    A piece that lies in two of them, as those of a compressed file do, is in both groups.
    """
    first, nbytes = 0, pieces[-1].stop
    for start in range(0, nbytes, BLOCK_NBYTES):
        stop = min(start + BLOCK_NBYTES, nbytes)
        while pieces[first].stop <= start:
            first += 1
        last = first
        while pieces[last].stop < stop:
            last += 1
        yield PieceGroup(start=start, stop=stop, pieces=tuple(pieces[first : last + 1]))


def length(entry: FileEntry) -> int:
    """Bytes that a file has where it lies."""
    return entry.stored_nbytes


def decode_listing(data: Buffer, *, what: str) -> Listing | Aborted | Deleted:
    """The value of a register, without opening what is sealed.

    Raises:
        FormatError: the format does not allow it.
    """
    try:
        return decode_register(data, what=what)
    except MissingKey:
        return decode_visible(data, what=what)


def read_listing(store: Store, folder: str) -> Listing | Aborted | Deleted | None:
    """Read the register of a folder in a store that does not seal; None while it is empty.

    Raises:
        FormatError: something is there that is not a valid document.
    """
    key = f"{folder}/{layout.MANIFEST}"
    return read_if_there(store, key, decode_listing, max_nbytes=MAX_MANIFEST_NBYTES)


def pieces_of_sealed(
    entry: FileEntry, digests: Iterable[bytes], *, what: str
) -> tuple[FilePiece, ...]:
    """A sealed file in pieces. Only the digest of the whole of it is recorded, so all of it is read
    first: `digests` are those of the blocks into which `format.blocks.split` splits it.

    Raises:
        CorruptData: they are not of the file that was written; names `what`.
    """
    spans = split(entry.nbytes)
    joined = b"".join(digests)
    if file_digest(entry.nbytes, joined) != entry.digest:
        raise CorruptData(f"{what}: not what was written")
    return _pieces(spans, joined)


def pieces_of(
    manifest: Manifest, index_data: bytes, *, what: str
) -> Mapping[str, tuple[FilePiece, ...]]:
    """Every file that a manifest lists, in pieces that are read and checked one by one.

    `index_data` is its index, which was compared with the manifest before.

    Raises:
        FormatError: it is no index of this manifest; names `what`.
    """
    index = decode_index(index_data, files=manifest.files, what=what)
    own = digest_blocks(index_data, manifest.block_nbytes)
    digests = {**index.blocks, layout.INDEX: own}
    pieces = {}
    for name, entry in manifest.files.items():
        stored = index.stored.get(name)
        if stored is None:
            pieces[name] = _pieces(split(entry.nbytes, index.block_nbytes), digests[name])
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
