"""Blocks as Blosc2 chunks: bytes of equal weight are put together before they are compressed.

The library is asked only for what docs/format.md, section 8, lists: for filters and codecs that it
does not know it would look for plug-ins, and run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from holdfast.errors import CorruptData
from holdfast.store.base import Buffer

_HEADER_NBYTES = 32
_IS_EXTENDED = 0b101
_FORMATS = (1, 4)
"""LZ4 and Zstandard, in the upper three bits of the flags."""
_FILTERS = frozenset({0, 1, 2})
_HAS_DICTIONARY = 1


class Blosc2:
    """Each block is one chunk. `item_nbytes` gives the size of the items in each block."""

    def __init__(
        self,
        item_nbytes: Sequence[int],
        *,
        level: int = 1,
        shuffle: Literal["byte", "bit", "none"] = "byte",
        inner: Literal["zstd", "lz4"] = "zstd",
    ) -> None:
        self._item_nbytes = item_nbytes
        self._level = level
        self._shuffle = shuffle
        self._inner = inner

    def encode(self, number: int, plain: memoryview) -> Buffer:
        """See `Encoder.encode`. What does not shrink is copied into the chunk."""
        import blosc2

        filters = {
            "byte": blosc2.Filter.SHUFFLE,
            "bit": blosc2.Filter.BITSHUFFLE,
            "none": blosc2.Filter.NOFILTER,
        }
        codecs = {"zstd": blosc2.Codec.ZSTD, "lz4": blosc2.Codec.LZ4}
        chunk: bytes = blosc2.compress2(
            plain,
            codec=codecs[self._inner],
            clevel=self._level,
            typesize=self._item_nbytes[number],
            filters=[filters[self._shuffle]],
            filters_meta=[0],
            nthreads=1,
        )
        return chunk

    def decode(self, number: int, stored: memoryview, plain: memoryview) -> None:
        """See `Decoder.decode`; straight into `plain`."""
        import blosc2

        _check_header(stored, plain.nbytes)
        try:
            blosc2.decompress2(stored, dst=plain, nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise CorruptData(f"no Blosc2 chunk that can be decoded: {error}") from error


def _check_header(stored: memoryview, nbytes: int) -> None:
    """Raise `CorruptData` unless the chunk is of the plain kind that `encode` makes."""
    if stored.nbytes < _HEADER_NBYTES:
        raise CorruptData("too short for a Blosc2 chunk")
    head = bytes(stored[:_HEADER_NBYTES])
    flags, filters, flags2 = head[2], head[16:22], head[31]
    if flags & _IS_EXTENDED != _IS_EXTENDED or flags >> 5 not in _FORMATS:
        raise CorruptData("a Blosc2 chunk of a kind that is not allowed")
    if not _FILTERS.issuperset(filters) or flags2 & _HAS_DICTIONARY:
        raise CorruptData("a Blosc2 chunk with filters or a dictionary that are not allowed")
    sizes = [int.from_bytes(head[at : at + 4], "little") for at in (4, 12)]
    if sizes != [nbytes, stored.nbytes]:
        raise CorruptData(f"a Blosc2 chunk of {sizes[0]:,} bytes where {nbytes:,} are expected")
