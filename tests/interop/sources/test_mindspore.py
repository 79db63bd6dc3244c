"""Checkpoints of MindSpore, which MindSpore itself has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.sources.expected import PEERS, expected, found
from tests.interop.sources.reads import read, write

from holdfast.errors import CorruptData, FormatError, UsageError, WrongKey
from holdfast.interop.opening import open_source
from holdfast.interop.sources import mindspore

FOLDER = PEERS / "mindspore"
KEY = b"0123456789abcdef"
"""The key in make_mindspore.py."""


def message(*fields: tuple[int, Any]) -> bytes:
    """A protobuf message of integers, bytes and texts."""
    data = b""
    for number, value in fields:
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(content)) + content
    return data


def varint(value: int) -> bytes:
    data = bytearray()
    while value >= 128:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def entry(name: str, dtype: str, dims: tuple[int, ...], content: bytes) -> bytes:
    tensor = message(*((1, size) for size in dims), (2, dtype), (3, content))
    return message((1, message((1, name), (2, tensor))))


def as_f32(value: Any) -> Any:
    """MindSpore gives bfloat16 as float32."""
    dtype, shape, data = value
    if dtype != "BF16":
        return value
    wide = np.frombuffer(data, "<u2").astype("<u4") << 16
    return "F32", shape, wide.astype("<u4").tobytes()


@pytest.mark.parametrize("file", ["plain.ckpt", "crc.ckpt", "sliced.ckpt", "few.safetensors"])
def test_every_value_is_as_mindspore_reads_it(file: str) -> None:
    recorded = expected("mindspore", file)
    with open_source(str(FOLDER / file)) as source:
        model = found(source, "model")
        texts = source.parts["state"].tree if "state" in source.parts else {}
    assert {name: as_f32(value) for name, value in model.items()} | texts == recorded
    assert any(value[0] == "BF16" for value in model.values()) == (
        file in ("plain.ckpt", "crc.ckpt")
    )


def test_the_step_of_its_callback_is_told() -> None:
    with open_source(str(FOLDER / "plain.ckpt")) as source:
        assert (source.format, source.step) == ("mindspore", 7)
        assert source.get_component("state").tree == {"note": "häl😀"}
    with open_source(str(FOLDER / "crc.ckpt")) as source:
        assert source.step is None


def test_slices_of_a_tensor_are_read_at_any_position() -> None:
    with open_source(str(FOLDER / "sliced.ckpt")) as source:
        whole = read(source)["big"]
        assert whole == np.arange(500, dtype="<f4").tobytes()
        for start, nbytes in ((0, 2000), (1020, 8), (1023, 1), (1024, 1), (999, 1001), (1999, 1)):
            memory = bytearray(nbytes)
            source.read_into("model", "big", start, memoryview(memory))
            assert memory == whole[start : start + nbytes]


def test_a_wrong_checksum_is_refused_at_the_first_read(tmp_path: Path) -> None:
    data = bytearray((FOLDER / "crc.ckpt").read_bytes())
    position = data.index(b"scalar") + 20
    data[position] ^= 1
    with (
        open_source(write(tmp_path / "x.ckpt", bytes(data))) as source,
        pytest.raises(CorruptData, match=r"x\.ckpt: damaged: expected the checksum"),
    ):
        read(source)


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_file_is_refused_without_its_key(cipher: str) -> None:
    with pytest.raises(
        FormatError, match=rf"encrypted by MindSpore \({cipher}\); .*save it plainly"
    ):
        open_source(str(FOLDER / f"{cipher}.ckpt"))


def test_a_cipher_that_is_not_known_is_refused_with_its_key() -> None:
    with pytest.raises(FormatError, match=r"\(SM4-CBC\); save it plainly"):
        open_source(str(FOLDER / "SM4-CBC.ckpt"), key=KEY)


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC"])
@pytest.mark.parametrize(("name", "plain"), [("", "crc.ckpt"), ("-blocks", "sliced.ckpt")])
def test_an_encrypted_file_is_read_with_its_key(cipher: str, name: str, plain: str) -> None:
    recorded = expected("mindspore", plain)
    with open_source(str(FOLDER / f"{cipher}{name}.ckpt"), key=KEY) as source:
        model = found(source, "model")
    assert {name: as_f32(value) for name, value in model.items()} == recorded


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC"])
@pytest.mark.parametrize("key", [b"0" * 16, b"0" * 32])
def test_a_wrong_key_is_an_error(cipher: str, key: bytes) -> None:
    with pytest.raises(WrongKey, match="the key does not decrypt it"):
        open_source(str(FOLDER / f"{cipher}-blocks.ckpt"), key=key)


def test_a_key_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(UsageError, match="a key of 5 bytes"):
        open_source(str(FOLDER / "AES-GCM.ckpt"), key=b"short")


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC"])
def test_a_damaged_encrypted_file_is_refused(tmp_path: Path, cipher: str) -> None:
    """CBC has no check of its own: there only lengths are certain to be noticed."""
    whole = (FOLDER / f"{cipher}-blocks.ckpt").read_bytes()
    at = range(4, len(whole)) if cipher == "AES-GCM" else range(4, 48)
    missed = []
    for position in [*at][:: 7 if cipher == "AES-GCM" else 1]:
        data = bytearray(whole)
        data[position] ^= 1
        try:
            with open_source(write(tmp_path / "x.ckpt", bytes(data)), key=KEY) as source:
                read(source)
        except (FormatError, WrongKey):
            continue
        missed.append(position)
    # Of the nonce GCM has 4 bytes more than are used; CBC changes 16 bytes of the plain text.
    assert len(missed) <= (2 if cipher == "AES-GCM" else 16)


def test_what_cannot_be_expressed_is_refused_by_name(tmp_path: Path) -> None:
    data = entry("q", "Int4", (4,), bytes(4)) + entry("h", "HiFloat8", (4,), bytes(4))
    with pytest.raises(FormatError, match=r"(?s)'q' has the type 'Int4', .*'h' has the type 'HiFl"):
        open_source(write(tmp_path / "x.ckpt", data))


def test_maps_and_texts_that_are_none_are_listed(tmp_path: Path) -> None:
    data = message((1, message((1, "map"), (3, b""))))
    data += entry("broken", "str", (0,), b"\xff\xff\xff\xff")
    with open_source(write(tmp_path / "x.ckpt", data + entry("w", "Bool", (1,), b"\1"))) as source:
        assert {one.path: one.why for one in source.left_out} == {
            "map": "a map of parameters",
            "broken": "a text that is not Unicode",
        }
        assert read(source) == {"w": b"\1"}


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    once, other = entry("w", "Bool", (1,), b"\1"), entry("v", "Bool", (1,), b"\1")
    with pytest.raises(FormatError, match="'w' is there twice"):
        open_source(write(tmp_path / "x.ckpt", once + other + once))


def test_more_tensors_than_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mindspore, "MAX_VALUES", 2)
    data = b"".join(entry(name, "Bool", (1,), b"\1") for name in "abc")
    with pytest.raises(FormatError, match="more than 2 tensors"):
        open_source(write(tmp_path / "x.ckpt", data))
