"""Codecs: the form in which the blocks of a file are stored (docs/format.md, section 8).

`Encoder` and `Decoder` are the seam: whatever turns a plain block into a stored one, and back.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

from holdfast.errors import UnsupportedVersion, UsageError
from holdfast.format import blocks, chunks, frames
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.base import Buffer

Codec = Literal["zstd", "lz4", "blosc2"]
Shuffle = Literal["byte", "bit", "none"]
Inner = Literal["zstd", "lz4"]

LIBRARIES: Mapping[Codec, str] = types.MappingProxyType(
    {"zstd": "zstandard", "lz4": "lz4", "blosc2": "blosc2"}
)
"""The package that each codec needs."""
LEVELS: Mapping[Codec, range] = types.MappingProxyType(
    {"zstd": range(-100, 23), "lz4": range(-100, 17), "blosc2": range(10)}
)


class Encoder(Protocol):
    """Makes stored blocks. Thread-safe."""

    def encode(self, number: int, plain: memoryview) -> Buffer:
        """The stored form of the plain block of that number, at most `max_stored_nbytes` long."""
        ...


class Decoder(Protocol):
    """Gives plain blocks back. Thread-safe."""

    def decode(self, number: int, stored: memoryview, plain: memoryview) -> None:
        """Fill `plain`, which has the length of the plain block, from its stored form.

        Takes no more memory than a few times the two, whatever the stored bytes say.

        Raises:
            CorruptData: they are not the stored form of a block of that length.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How one file is stored: its codec, and what encodes its blocks."""

    codec: Codec
    encoder: Encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How to compress.

    Raises:
        UsageError: a field is wrong, would do nothing, or needs a package that is not installed.
    """

    codec: Codec = "zstd"
    level: int | None = None
    """Of the codec: zstd -100 to 22, lz4 -100 to 16, blosc2 0 to 9. None: the fast end of what
    helps (1; for lz4 0)."""
    shuffle: Shuffle | None = None
    """For blosc2: whether bytes or bits of equal weight are put together first. None: bytes."""
    inner: Inner | None = None
    """For blosc2: what compresses the shuffled bytes. None: zstd."""

    def __post_init__(self) -> None:
        for name, choices in (("codec", Codec), ("shuffle", Shuffle), ("inner", Inner)):
            value = getattr(self, name)
            if value not in get_args(choices) and (value is not None or name == "codec"):
                raise UsageError(f"{name}={value!r} must be one of {get_args(choices)}")
        if self.codec != "blosc2" and (self.shuffle, self.inner) != (None, None):
            raise UsageError(f"shuffle and inner are for blosc2, not for {self.codec}")
        if self.level is not None and self.level not in LEVELS[self.codec]:
            levels = LEVELS[self.codec]
            raise UsageError(f"level={self.level}: {self.codec} has {levels[0]} to {levels[-1]}")
        if not is_installed(self.codec):
            raise UsageError(f"compression by {self.codec} {_lacking(self.codec)}")

    def __str__(self) -> str:
        level = "" if self.level is None else f" level {self.level}"
        if self.codec != "blosc2":
            return f"{self.codec}{level}"
        return f"blosc2{level} ({self.inner or 'zstd'}, shuffle by {self.shuffle or 'byte'})"

    def encoding(self, item_nbytes: Sequence[int]) -> Encoding:
        """How a file is stored whose blocks hold items of these sizes, one size a block."""
        encoder: Encoder
        if self.codec == "zstd":
            encoder = frames.Zstd(1 if self.level is None else self.level)
        elif self.codec == "lz4":
            encoder = frames.Lz4(self.level or 0)
        else:
            encoder = chunks.Blosc2(
                item_nbytes,
                level=1 if self.level is None else self.level,
                shuffle=self.shuffle or "byte",
                inner=self.inner or "zstd",
            )
        return Encoding(codec=self.codec, encoder=encoder)


def decoder(codec: Codec) -> Decoder:
    """What decodes the blocks of files of this codec.

    Raises:
        UnsupportedVersion: the package that it needs is not installed.
    """
    if not is_installed(codec):
        raise UnsupportedVersion(f"it is compressed by {codec}, which {_lacking(codec)}")
    if codec == "zstd":
        return frames.Zstd()
    return frames.Lz4() if codec == "lz4" else chunks.Blosc2(())


def is_installed(codec: Codec) -> bool:
    """Whether the package that a codec needs is there."""
    return find_spec(LIBRARIES[codec]) is not None


def max_stored_nbytes(nbytes: int) -> int:
    """The longest that the stored form of a block of `nbytes` may be."""
    return nbytes + nbytes // 128 + 4096


def max_file_nbytes(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """The same for all blocks of a file of `nbytes`."""
    return sum(
        max_stored_nbytes(stop - start) for start, stop in blocks.split(nbytes, block_nbytes)
    )


def _lacking(codec: Codec) -> str:
    return f"needs the package {LIBRARIES[codec]}: pip install 'holdfast[compress]'"
