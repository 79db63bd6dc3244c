"""Block and file digests."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptData
from holdfast.format import blocks


@given(nbytes=st.integers(0, 10_000), block=st.integers(1, 4096))
def test_blocks_cover_a_file_exactly_once(nbytes: int, block: int) -> None:
    """D15: no byte of a file is outside the blocks, none is in two."""
    parts = blocks.list_blocks(nbytes, block)
    assert [byte for start, stop in parts for byte in (start, stop)] == sorted(
        byte for start, stop in parts for byte in (start, stop)
    )
    assert sum(stop - start for start, stop in parts) == nbytes
    assert len(parts) == blocks.num_blocks(nbytes, block)
    assert all(stop - start == block for start, stop in parts[:-1])


def test_digests_are_those_of_the_format_page() -> None:
    data = bytes(range(256)) * 40
    digests = blocks.digest_blocks(data, 4096)
    assert digests == b"".join(
        blake3(data[i : i + 4096]).digest() for i in range(0, len(data), 4096)
    )
    expected = blake3(
        len(data).to_bytes(8, "little") + digests, derive_key_context="holdfast 1 file"
    )
    assert blocks.file_digest(len(data), digests) == f"blake3:{expected.hexdigest()}"


def test_an_empty_file_has_no_block_and_a_digest() -> None:
    assert blocks.list_blocks(0) == []
    assert blocks.digest_blocks(b"") == b""
    assert blocks.file_digest(0, b"").startswith("blake3:")


def test_length_and_order_of_blocks_are_part_of_the_file_digest() -> None:
    """D14: swapped blocks, or a file of another length, have another digest."""
    one, two = blocks.block_digest(b"1"), blocks.block_digest(b"2")
    known = blocks.file_digest(2, one + two)
    assert known != blocks.file_digest(2, two + one)
    assert known != blocks.file_digest(3, one + two)
    assert known != "blake3:" + blake3((2).to_bytes(8, "little") + one + two).hexdigest()


def check_one_flipped_bit_is_found() -> None:
    data = bytearray(1000)
    digest = blocks.block_digest(data)
    blocks.check_block(data, digest, what="w")
    data[999] ^= 1
    with pytest.raises(CorruptData, match=r"model\.safetensors"):
        blocks.check_block(data, digest, what="model.safetensors")
    with pytest.raises(CorruptData):
        blocks.check_block(data[:999], digest, what="w")


def test_one_flipped_bit_is_found() -> None:
    """D14: a wrong bit in a block is an error that names the file."""
    check_one_flipped_bit_is_found()


def test_buffers_of_every_kind_have_the_same_digest() -> None:
    array = np.arange(3000, dtype=np.float32)
    raw = array.tobytes()
    assert blocks.digest_blocks(memoryview(array), 4096) == blocks.digest_blocks(raw, 4096)
    assert blocks.block_digest(bytearray(raw)) == blocks.block_digest(memoryview(raw))


def test_digesting_lets_other_threads_run() -> None:
    """A block's digest is taken without the GIL: another thread is at work in the middle of it."""
    data = bytes(32 * 1024 * 1024)
    stamps: list[float] = []
    done = threading.Event()

    def stamp() -> None:
        while not done.is_set():
            stamps.append(time.perf_counter())

    def is_interleaved() -> bool:
        stamps.clear()
        start = time.perf_counter()
        blocks.block_digest(data)
        stop = time.perf_counter()
        quarter = (stop - start) / 4
        return any(start + quarter < at < stop - quarter for at in stamps)

    thread = threading.Thread(target=stamp)
    thread.start()
    try:
        assert any(is_interleaved() for _ in range(50))
    finally:
        done.set()
        thread.join(10)
