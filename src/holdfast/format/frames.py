"""Compression of blocks as Zstandard frames, LZ4 frames or Blosc2 chunks.

Each block is one frame with its content size in the header, which the usual tools can read. A block
that does not shrink is stored raw inside the frame. In a chunk, bytes of equal significance are
grouped, then compressed. Only the filters and codecs of docs/format.md, section 8, are passed to
the Blosc2 library: for others it would look for plug-ins, and run them.
"""

from __future__ import annotations

from typing import Any, Literal

from holdfast.errors import CorruptData
from holdfast.store.base import Buffer

_MIN_WINDOW_NBYTES = 1024
_HEADER_NBYTES = 32
_IS_EXTENDED = 0b101
_IS_COPIED = 0b010
_FORMATS = (1, 4)
"""Accepted codecs, LZ4 and Zstandard, in the upper three bits of the flags."""
_FILTERS = frozenset({0, 1, 2})
_SPECIALS = (0, 16)
"""Accepted special values in the header's last byte: none, and a chunk of zeros."""


def encode_zstd(plain: memoryview, level: int, *_filter: object) -> Buffer:
    """Encode a block as a Zstandard frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(plain)


def decode_zstd(stored: memoryview, plain: memoryview) -> None:
    """Decode a Zstandard frame into `plain`, without an intermediate buffer."""
    import zstandard

    try:
        _expect_size(zstandard.get_frame_parameters(stored).content_size, plain)
        window = max(plain.nbytes, _MIN_WINDOW_NBYTES)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        reader = decompressor.stream_reader(stored)
        if reader.readinto(plain) == plain.nbytes and not reader.read(1):
            return
    except zstandard.ZstdError as error:
        raise CorruptData(f"no Zstandard frame that can be decoded: {error}") from error
    raise CorruptData(f"not one Zstandard frame of {plain.nbytes:,} bytes")


def encode_lz4(plain: memoryview, level: int, *_filter: object) -> Buffer:
    """Encode a block as an LZ4 frame."""
    import lz4.frame

    frame: bytes = lz4.frame.compress(
        plain,
        compression_level=level,
        block_size=lz4.frame.BLOCKSIZE_MAX4MB,
        block_linked=False,
        store_size=True,
    )
    return frame


def decode_lz4(stored: memoryview, plain: memoryview) -> None:
    """Decode an LZ4 frame into `plain`, through a buffer of the size of the block."""
    import lz4.frame

    try:
        _expect_size(lz4.frame.get_frame_info(stored)["content_size"], plain)
        decompressor = lz4.frame.LZ4FrameDecompressor()
        found = decompressor.decompress(stored, max_length=plain.nbytes + 1)
    except RuntimeError as error:
        raise CorruptData(f"no LZ4 frame that can be decoded: {error}") from error
    if not decompressor.eof or decompressor.unused_data or len(found) != plain.nbytes:
        raise CorruptData(f"not one LZ4 frame of {plain.nbytes:,} bytes")
    plain[:] = found


def _expect_size(found: int, plain: memoryview) -> None:
    if found != plain.nbytes:
        raise CorruptData(f"a frame of {found:,} bytes where {plain.nbytes:,} are expected")


def encode_blosc2(
    plain: memoryview,
    level: int,
    item_nbytes: int,
    shuffle: Literal["byte", "bit", "none"],
    inner: Literal["zstd", "lz4"],
) -> Buffer:
    """Encode a block as a Blosc2 chunk; one that does not shrink is stored raw inside it."""
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
    """Decode a Blosc2 chunk into `plain`, without an intermediate buffer."""
    _check_header(stored, plain.nbytes)
    try:
        _library().decompress2(stored, dst=plain, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise CorruptData(f"no Blosc2 chunk that can be decoded: {error}") from error


def _library() -> Any:
    import blosc2

    # A setting of the whole process: without it the library keeps the GIL while it works.
    blosc2.set_releasegil(True)
    return blosc2


def _check_header(stored: memoryview, nbytes: int) -> None:
    """Expect a chunk as of `encode_blosc2`, as the library trusts the length in the header."""
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
