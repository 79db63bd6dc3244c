"""Compression codecs for the blocks of a file (docs/format.md, section 8).

`CODECS` is the only list of them: names, suffixes, levels, defaults and packages are read from it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

from holdfast.errors import UnsupportedVersion, UsageError
from holdfast.format import frames
from holdfast.store.base import Buffer

CodecName = Literal["zstd", "lz4", "blosc2"]
"""The keys of `CODECS`, for type checkers."""
Shuffle = Literal["byte", "bit", "none"]
Inner = Literal["zstd", "lz4"]
Encode: TypeAlias = Callable[[memoryview, int, int, Shuffle, Inner], Buffer]
"""Function that compresses a block to at most `blocks.max_stored_nbytes`, from the plain block,
the level, the bytes of one tensor element, and the filter. Thread-safe."""
Decode: TypeAlias = Callable[[memoryview, memoryview], None]
"""Function that decompresses the first argument into the second, as long as the plain block.

Takes no more memory than a few times the two, whatever the stored bytes say. Raises `CorruptData`
where they are not the stored form of a block of that length. Thread-safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A compression codec: its library, its levels, and its functions."""

    suffix: str
    library: str
    install: str
    """Argument of `pip install` that provides the module."""
    levels: range
    default_level: int
    """The fastest level that still compresses well."""
    encode: Encode
    decode: Decode
    magic: bytes = b""
    """First bytes of each stored block; empty if they vary."""
    filters: Sequence[tuple[Shuffle, Inner]] = ()
    """The pairs of `shuffle` and `inner` that "auto" tries. Empty: the codec has no filters."""


CODECS: Mapping[CodecName, Codec] = types.MappingProxyType(
    {
        "zstd": Codec(
            suffix=".zst",
            library="zstandard",
            install="zstandard",
            levels=range(-100, 23),
            default_level=1,
            encode=frames.encode_zstd,
            decode=frames.decode_zstd,
            magic=b"\x28\xb5\x2f\xfd",
        ),
        "lz4": Codec(
            suffix=".lz4",
            library="lz4",
            install="holdfast-torch[compress]",
            levels=range(-100, 17),
            default_level=0,
            encode=frames.encode_lz4,
            decode=frames.decode_lz4,
            magic=b"\x04\x22\x4d\x18",
        ),
        "blosc2": Codec(
            suffix=".blosc2",
            library="blosc2",
            install="holdfast-torch[compress]",
            levels=range(10),
            default_level=1,
            encode=frames.encode_blosc2,
            decode=frames.decode_blosc2,
            filters=(("bit", "lz4"), ("byte", "zstd")),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Compression settings: codec, level and filters.

    Raises:
        UsageError: a field is wrong, would do nothing, or needs a package that is not installed.
    """

    codec: CodecName = "zstd"
    level: int | None = None
    """A level of the codec (docs/compression.md). None: the codec's default, which is fast."""
    shuffle: Shuffle | None = None
    """For blosc2: group bytes or bits of equal significance first, or not. None: bytes."""
    inner: Inner | None = None
    """For blosc2: codec that compresses the shuffled bytes. None: zstd."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("codec", tuple(CODECS)),
            ("shuffle", get_args(Shuffle)),
            ("inner", get_args(Inner)),
        ):
            value = getattr(self, name)
            if value not in choices and (value is not None or name == "codec"):
                raise UsageError(f"{name}={value!r}: choose from {choices}")
        codec = CODECS[self.codec]
        if not codec.filters and (self.shuffle, self.inner) != (None, None):
            filtering = " and ".join(name for name, each in CODECS.items() if each.filters)
            raise UsageError(f"shuffle and inner are for {filtering}, not for {self.codec}")
        if self.level is not None and self.level not in codec.levels:
            first, last = codec.levels[0], codec.levels[-1]
            raise UsageError(f"level={self.level}: {self.codec} has {first} to {last}")
        if not is_installed(self.codec):
            raise UsageError(f"compression by {self.codec} {_install_hint(codec)}")

    def __str__(self) -> str:
        text = self.codec if self.level is None else f"{self.codec} level {self.level}"
        if not CODECS[self.codec].filters:
            return text
        return f"{text} ({self.inner or 'zstd'}, shuffle by {self.shuffle or 'byte'})"


@dataclass(frozen=True, slots=True)
class Encoding:
    """Compression of the blocks of one file: the settings and its tensors' element sizes."""

    compression: Compression
    item_nbytes: Sequence[int]
    """Bytes of one tensor element, for each block."""

    def encode(self, number: int, plain: memoryview) -> Buffer:
        """Compress `plain`, which is block `number` of the file. Thread-safe."""
        asked = self.compression
        codec = CODECS[asked.codec]
        level = codec.default_level if asked.level is None else asked.level
        size = self.item_nbytes[number]
        return codec.encode(plain, level, size, asked.shuffle or "byte", asked.inner or "zstd")


def decoder(name: CodecName) -> Decode:
    """Return the function that decompresses the blocks of files of this codec."""
    if not is_installed(name):
        raise UnsupportedVersion(f"it is compressed by {name}, which {_install_hint(CODECS[name])}")
    return CODECS[name].decode


def is_installed(name: CodecName) -> bool:
    """Whether the package that a codec needs is installed."""
    return find_spec(CODECS[name].library) is not None


def _install_hint(codec: Codec) -> str:
    return f"needs the package {codec.library}: pip install '{codec.install}'"
