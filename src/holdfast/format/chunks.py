"""Blosc2 compression of blocks: bytes of equal weight are grouped, then compressed.

Only the filters and codecs of docs/format.md, section 8, are passed to the library: for others
it would look for plug-ins, and run them.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.errors import CorruptData
from holdfast.store.base import Buffer

_HEADER_NBYTES = 32
_IS_EXTENDED = 0b101
_IS_COPIED = 0b010
_FORMATS = (1, 4)
"""Accepted codecs, LZ4 and Zstandard, in the upper three bits of the flags."""
_FILTERS = frozenset({0, 1, 2})
_SPECIALS = (0, 16)
"""Accepted special values in the header's last byte: none, and a chunk of zeros."""


def encode_blosc2(
    plain: memoryview,
    level: int,
    item_nbytes: int,
    shuffle: Literal["byte", "bit", "none"],
    inner: Literal["zstd", "lz4"],
) -> Buffer:
    """Encode a block as a Blosc2 chunk, which copies it if it does not shrink."""
    blosc2 = _library()
    filters = {
        "byte": blosc2.Filter.SHUFFLE,
        "bit": blosc2.Filter.BITSHUFFLE,
        "none": blosc2.Filter.NOFILTER,
    }
    codecs = {"zstd": blosc2.Codec.ZSTD, "lz4": blosc2.Codec.LZ4}
    chunk: bytes = blosc2.compress2(
        plain,
        codec=codecs[inner],
        clevel=level,
        typesize=item_nbytes,
        filters=[filters[shuffle]],
        filters_meta=[0],
        nthreads=1,
    )
    return chunk


def decode_blosc2(stored: memoryview, plain: memoryview) -> None:
    """Decode a Blosc2 chunk into `plain`, without an intermediate buffer.

    Raises:
        CorruptData: not a chunk of that length, or of a kind that is not allowed.
    """
    _check_header(stored, plain.nbytes)
    try:
        _library().decompress2(stored, dst=plain, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise CorruptData(f"no Blosc2 chunk that can be decoded: {error}") from error


def _library() -> Any:
    import blosc2

    # A setting of the whole process: without it all other threads wait meanwhile.
    blosc2.set_releasegil(True)
    return blosc2


def _check_header(stored: memoryview, nbytes: int) -> None:
    """Raise `CorruptData` unless the chunk is of the kind that `encode_blosc2` makes.

    The library trusts the length in the header, even beyond the end of its output buffer.
    """
    if stored.nbytes < _HEADER_NBYTES:
        raise CorruptData("too short for a Blosc2 chunk")
    head = bytes(stored[:_HEADER_NBYTES])
    flags, filters, special = head[2], head[16:22], head[31]
    found, block_nbytes, length = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8, 12))
    if (found, length) != (nbytes, stored.nbytes) or not 1 <= block_nbytes <= nbytes:
        raise CorruptData(f"a Blosc2 chunk of {found:,} bytes where {nbytes:,} are expected")
    is_known = flags & _IS_COPIED or flags >> 5 in _FORMATS
    if flags & _IS_EXTENDED != _IS_EXTENDED or not is_known or special not in _SPECIALS:
        raise CorruptData("a Blosc2 chunk of a kind that is not allowed")
    if not _FILTERS.issuperset(filters):
        raise CorruptData("a Blosc2 chunk with filters that are not allowed")
