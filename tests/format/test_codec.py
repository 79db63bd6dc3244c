"""Codecs: there and back, readable by other tools, and never more than was declared."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import get_args

import lz4.frame
import numpy as np
import pytest
import zstandard
from tests.each import each

from holdfast.errors import CorruptData, UnsupportedVersion, UsageError
from holdfast.format import codec
from holdfast.format.blocks import max_stored_nbytes
from holdfast.format.codec import CODECS, CodecName, Compression, Encoding, decoder

MIB = 1 << 20
DOCS = Path(__file__).resolve().parents[2] / "docs"
COMPRESSIONS = [
    Compression(codec="zstd"),
    Compression(codec="zstd", level=-5),
    Compression(codec="zstd", level=19),
    Compression(codec="lz4"),
    Compression(codec="lz4", level=9),
    *(
        Compression(codec="blosc2", shuffle=shuffle, inner=inner)
        for shuffle in ("byte", "bit", "none")
        for inner in ("zstd", "lz4")
    ),
    Compression(codec="blosc2", level=0),
]
ALL = tuple(CODECS)


def plain_blocks() -> Iterator[tuple[str, bytes]]:
    chance = random.Random(1)
    numbers = np.random.default_rng(1).standard_normal(100_000).astype(np.float32) * 0.02
    yield "weights", numbers.tobytes()
    for nbytes in (1, 3, 16, 33, 4097, MIB + 5):
        yield f"noise {nbytes}", chance.randbytes(nbytes)
    yield "zeros", bytes(MIB)
    yield "one byte", b"\x07" * 5000


def encoder_of(compression: Compression, item_nbytes: int = 4) -> Encoding:
    return Encoding(compression, [item_nbytes])


def decoded(name: CodecName, stored: bytes, nbytes: int) -> bytes:
    plain = memoryview(bytearray(nbytes))
    decoder(name)(memoryview(stored), plain)
    return bytes(plain)


def is_refused(name: CodecName, stored: bytes, nbytes: int) -> bool:
    try:
        decoded(name, stored, nbytes)
    except CorruptData:
        return True
    return False


@each("item_nbytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_every_block_comes_back(compression: Compression, item_nbytes: int) -> None:
    """Also from memory that cannot be written, and never longer than the format allows."""
    encoder = encoder_of(compression, item_nbytes)
    for name, plain in plain_blocks():
        stored = bytes(encoder.encode(0, memoryview(plain)))
        assert 1 <= len(stored) <= max_stored_nbytes(len(plain)), name
        assert decoded(compression.codec, stored, len(plain)) == plain, name


@pytest.mark.full
def test_what_does_not_shrink_hardly_grows() -> None:
    """Issue 5: incompressible blocks are stored raw inside the frame."""
    noise = random.Random(2).randbytes(8 * MIB)
    for compression in COMPRESSIONS:
        stored = encoder_of(compression).encode(0, memoryview(noise))
        assert len(stored) < len(noise) + 1024, compression


def test_the_same_block_is_stored_the_same_way() -> None:
    """A write that is tried again, and an encoder on several threads, give the same bytes."""
    plain = dict(plain_blocks())["weights"]
    for compression in COMPRESSIONS:
        encoder = encoder_of(compression)
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(encoder.encode, 0, memoryview(plain)) for _ in range(8)]
        found = {bytes(job.result()) for job in jobs}
        assert len(found) == 1


def test_zstd_blocks_are_a_file_that_zstd_reads() -> None:
    """Issue 5: several frames, one behind the other, as `zstd -d` takes them."""
    blocks = [data for _, data in plain_blocks()]
    encoder = encoder_of(Compression(codec="zstd"))
    stored = b"".join(bytes(encoder.encode(0, memoryview(data))) for data in blocks)
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(stored), read_across_frames=True)
    assert reader.read() == b"".join(blocks)


def test_lz4_blocks_are_a_file_that_lz4_reads() -> None:
    blocks = [data for _, data in plain_blocks()]
    encoder = encoder_of(Compression(codec="lz4"))
    stored = b"".join(bytes(encoder.encode(0, memoryview(data))) for data in blocks)
    with lz4.frame.open(io.BytesIO(stored)) as file:
        assert file.read() == b"".join(blocks)


def check_another_length_is_refused() -> None:
    for compression in COMPRESSIONS:
        for name, plain in plain_blocks():
            stored = bytes(encoder_of(compression).encode(0, memoryview(plain)))
            for nbytes in (len(plain) - 1, len(plain) + 1, 2 * len(plain), 8 * MIB):
                assert nbytes == 0 or is_refused(compression.codec, stored, nbytes), name


def test_another_length_is_refused() -> None:
    """R29, D14: the declared length is the only one that is taken."""
    check_another_length_is_refused()


def check_no_frame_has_another_length() -> None:
    """Found by the frame's own word, before anything is decoded."""
    for name in ("zstd", "lz4"):
        stored = bytes(encoder_of(Compression(codec=name)).encode(0, memoryview(bytes(5000))))
        for nbytes in (1, 4999, 5001):
            with pytest.raises(CorruptData, match=f"5,000 bytes where {nbytes:,} are expected"):
                decoded(name, stored, nbytes)


def test_no_frame_has_another_length() -> None:
    """R29, D14."""
    check_no_frame_has_another_length()


def test_the_table_lists_the_codecs_that_type_checkers_know() -> None:
    assert set(CODECS) == set(get_args(CodecName))


def rows(page: str) -> list[list[str]]:
    """The rows of a page's tables that begin with a codec's name."""
    lines = (DOCS / page).read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] in {f"`{name}`" for name in CODECS}]


def test_the_pages_list_each_codec_as_the_table_does() -> None:
    assert rows("compression.md") == [
        [
            f"`{name}`",
            f"`{codec.suffix}`",
            f"{codec.levels[0]} to {codec.levels[-1]}",
            str(codec.default_level),
            f"`{codec.install}`",
        ]
        for name, codec in CODECS.items()
    ]
    suffixes = {name: codec.suffix for name, codec in CODECS.items()}
    assert {row[0].strip("`"): row[1].strip("`") for row in rows("format.md")} == suffixes


@pytest.mark.parametrize("name", ALL)
def test_what_is_cut_or_has_more_behind_it_is_refused(name: CodecName) -> None:
    plain = dict(plain_blocks())["weights"]
    stored = bytes(encoder_of(Compression(codec=name)).encode(0, memoryview(plain)))
    for cut in (0, 1, 4, 16, 31, 32, len(stored) // 2, len(stored) - 1):
        assert is_refused(name, stored[:cut], len(plain)), cut
    assert is_refused(name, stored + stored, len(plain))
    assert is_refused(name, stored + b"more of it", len(plain))
    assert is_refused(name, random.Random(3).randbytes(len(stored)), len(plain))


def zstd_bomb() -> bytes:
    """A frame of 1 GiB of zeros that says that it has 8 MiB."""
    bomb = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30)))
    at = bomb.index((1 << 30).to_bytes(4, "little"))
    bomb[at : at + 4] = (8 * MIB).to_bytes(4, "little")
    return bytes(bomb)


def lz4_bomb() -> bytes:
    """The same as an LZ4 frame."""
    with lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB) as compressor:
        head = compressor.begin(source_size=8 * MIB)
        zeros = bytes(16 * MIB)
        return bytes(head + b"".join(compressor.compress(zeros) for _ in range(64)))


def blosc2_bomb() -> bytes:
    """A chunk of 1 GiB of zeros."""
    import blosc2

    return bytes(blosc2.compress2(bytes(1 << 30), typesize=4, nthreads=1))


BOMBS = {"zstd": zstd_bomb, "lz4": lz4_bomb, "blosc2": blosc2_bomb}
CHILD = """
import resource, sys
from tests.format.test_codec import decoder
from holdfast.errors import CorruptData
name, stored = sys.argv[1], sys.stdin.buffer.read()
decode, plain = decoder(name), memoryview(bytearray(8 << 20))
try:
    decode(memoryview(b"x"), plain)
except CorruptData:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode(memoryview(stored), plain)
except CorruptData:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ALL)
def test_a_bomb_takes_no_more_memory_than_was_declared(name: CodecName) -> None:
    """R29, D14, invariant 5: 1 GiB behind a few bytes; refused within a few times 8 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, name], input=BOMBS[name](), capture_output=True, check=True
    )
    assert int(done.stdout) < 64 * 1024


def check_a_chunk_of_another_kind_is_refused() -> None:
    plain = dict(plain_blocks())["weights"]
    stored = bytes(encoder_of(Compression(codec="blosc2")).encode(0, memoryview(plain)))
    changes = {
        "another compressor": (2, 0b11000101),
        "a simple header": (2, 0b10000001),
        "delta": (17, 3),
        "a filter from a plug-in": (16, 160),
        "a filter of a user": (21, 255),
        "a dictionary": (31, 1),
        "lazy": (31, 8),
        "uninitialised": (31, 64),
        "no blocks": (8, 0),
    }
    for what, (at, value) in changes.items():
        changed = bytearray(stored)
        changed[at] = value
        if what == "no blocks":
            changed[8:12] = bytes(4)
        assert is_refused("blosc2", bytes(changed), len(plain)), what


def test_a_chunk_of_another_kind_is_refused() -> None:
    """R29."""
    check_a_chunk_of_another_kind_is_refused()


def check_no_plugin_is_asked_for() -> None:
    stored = bytes(encoder_of(Compression(codec="blosc2")).encode(0, memoryview(bytes(5000))))
    with pytest.raises(CorruptData, match="filters that are not allowed"):
        decoded("blosc2", stored[:16] + b"\xa0" + stored[17:], 5000)


def test_no_plugin_is_asked_for() -> None:
    """R29, invariant 5: the library would look for it, and run it."""
    check_no_plugin_is_asked_for()


@pytest.mark.parametrize("name", ALL)
def test_changed_blocks_are_refused_or_decode_to_the_declared_length(name: CodecName) -> None:
    """R29: nothing but CorruptData ever comes of them, and no byte outside the memory changes."""
    chance = random.Random(4)
    plain = dict(plain_blocks())["weights"][:50_000]
    stored = bytes(encoder_of(Compression(codec=name)).encode(0, memoryview(plain)))
    decode = decoder(name)
    for _ in range(2000):
        changed = bytearray(stored)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.choice((chance.randrange(64), chance.randrange(len(stored))))] ^= (
                1 << chance.randrange(8)
            )
        arena = bytearray(b"\xa5" * (len(plain) + 2048))
        with suppress(CorruptData):
            decode(memoryview(bytes(changed)), memoryview(arena)[1024:-1024])
        assert arena[:1024] == arena[-1024:] == b"\xa5" * 1024


@each(
    ("options", "message"),
    [
        ({"codec": "gzip"}, "codec='gzip'"),
        ({"codec": None}, "codec=None"),
        ({"level": 23}, "zstd has -100 to 22"),
        ({"codec": "blosc2", "level": 10}, "blosc2 has 0 to 9"),
        ({"shuffle": "bit"}, "for blosc2"),
        ({"codec": "lz4", "inner": "lz4"}, "for blosc2"),
        ({"codec": "blosc2", "shuffle": "delta"}, "shuffle='delta'"),
    ],
)
def test_a_wrong_option_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Compression(**options)  # type: ignore[arg-type]


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lacks it does not take the checkpoint for damaged."""
    monkeypatch.setattr(codec, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"lz4 needs the package lz4.*holdfast-torch\[compress\]"):
        Compression(codec="lz4")
    with pytest.raises(
        UnsupportedVersion, match=r"needs the package blosc2.*holdfast-torch\[compress\]"
    ):
        decoder("blosc2")
