"""Files of a checkpoint as they lie in a store: how long they are, and digests to check them by.

Whoever copies a checkpoint looks at files this way, and does not care what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.format import layout
from holdfast.format.blocks import DIGEST_NBYTES, digest_blocks, split
from holdfast.format.index import decode_index
from holdfast.format.manifest import FileEntry, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stretch of a file, and the digest of its bytes."""

    start: int
    stop: int
    digest: bytes


def length(entry: FileEntry) -> int:
    """Bytes that a file has where it lies."""
    return entry.nbytes


def pieces_of(
    manifest: Manifest, index_data: bytes, *, what: str
) -> Mapping[str, tuple[Piece, ...]]:
    """Every file that a manifest lists, in pieces that are read and checked one by one.

    `index_data` is its index, which was compared with the manifest before.

    Raises:
        FormatError: it is no index of this manifest; names `what`.
    """
    index = decode_index(index_data, files=manifest.files, what=what)
    own = digest_blocks(index_data, manifest.block_nbytes)
    digests = {**index.blocks, layout.INDEX: own}
    return {
        name: _pieces(split(entry.nbytes, index.block_nbytes), digests[name])
        for name, entry in manifest.files.items()
    }


def _pieces(spans: list[tuple[int, int]], digests: bytes) -> tuple[Piece, ...]:
    return tuple(
        Piece(
            start=start,
            stop=stop,
            digest=digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
        )
        for number, (start, stop) in enumerate(spans)
    )
