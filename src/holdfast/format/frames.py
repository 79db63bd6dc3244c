"""Compression of blocks as Zstandard and LZ4 frames, which the usual tools can read.

Each block is one frame, with its content size in the header. A block that does not shrink is
stored raw inside the frame.
"""

from __future__ import annotations

from holdfast.errors import CorruptData
from holdfast.store.base import Buffer

_MIN_WINDOW_NBYTES = 1024


def encode_zstd(plain: memoryview, level: int, *_filter: object) -> Buffer:
    """Encode a block as a Zstandard frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(plain)


def decode_zstd(stored: memoryview, plain: memoryview) -> None:
    """Decode a Zstandard frame into `plain`, without an intermediate buffer.

    Raises:
        CorruptData: it is not one frame of that length.
    """
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
    """Decode an LZ4 frame into `plain`, through a buffer of the size of the block.

    Raises:
        CorruptData: it is not one frame of that length.
    """
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
