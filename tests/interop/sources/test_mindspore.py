"""Checkpoints of MindSpore, which MindSpore itself has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.interop.sources.expected import PEERS, expected, found
from tests.interop.sources.reads import read, write

from holdfast.errors import CorruptData, FormatError
from holdfast.interop.opening import open_source
from holdfast.interop.sources import mindspore

FOLDER = PEERS / "mindspore"


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
        assert source.part("state").tree == {"note": "häl😀"}
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
        pytest.raises(CorruptData, match=r"x\.ckpt: damaged: its bytes have the checksum"),
    ):
        read(source)


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_file_is_refused_with_what_to_do(cipher: str) -> None:
    with pytest.raises(FormatError, match=rf"encrypted by MindSpore \({cipher}\); save it plainly"):
        open_source(str(FOLDER / f"{cipher}.ckpt"))


def test_what_cannot_be_expressed_is_refused_by_name(tmp_path: Path) -> None:
    data = entry("q", "Int4", (4,), bytes(4)) + entry("h", "HiFloat8", (4,), bytes(4))
    with pytest.raises(FormatError, match=r"'q' has the type 'Int4', .*; 'h' has the type 'HiFl"):
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
