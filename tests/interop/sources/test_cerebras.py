"""Checkpoints of Cerebras, which its own code has written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.interop.sources.expected import PEERS, expected, found
from tests.interop.sources.reads import read

from holdfast.errors import CorruptData, FormatError
from holdfast.interop.opening import open_source

FOLDER = PEERS / "cerebras"
PICKLE = "a pickled object, which is not opened"


def damaged(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes((FOLDER / name).read_bytes())
    return path


def test_every_value_is_as_cerebras_reads_it() -> None:
    recorded = expected("cerebras", "state.mdl")
    with open_source(str(FOLDER / "state.mdl")) as source:
        assert (source.format, source.step) == ("cerebras", 3)
        own = {name: found(source, name) for name in ("model", "optimizer", "shared")}
        values = found(source, "state") | own
        assert [(one.path, one.why) for one in source.left_out] == [("object", PICKLE)]
        assert source.get_component("model").kind == "module"
        leaves = source.get_component("shared").leaves
        assert leaves["0"].key == leaves["1"].key
    del recorded["object"]
    assert values == recorded


@pytest.mark.parametrize(("name", "shape"), [("lz4.mdl", (300, 130)), ("gzip.mdl", (6, 10))])
def test_chunks_are_decoded_as_they_were_written(name: str, shape: tuple[int, int]) -> None:
    array = np.arange(shape[0] * shape[1], dtype=np.int16).reshape(shape) // 64
    with open_source(str(FOLDER / name)) as source:
        data = read(source, "state")
        assert data == {"array": array.tobytes(), "scalar": np.float64(2.5).tobytes()}
        for start, nbytes in ((0, 1), (19_999, 3), (len(data["array"]) - 1, 1), (5_000, 9_000)):
            if start + nbytes <= len(data["array"]):
                memory = bytearray(nbytes)
                source.read_into("state", "array", start, memoryview(memory))
                assert memory == data["array"][start : start + nbytes]
        assert [(one.path, one.why) for one in source.left_out] == [("object", PICKLE)]


def test_a_file_that_was_written_in_part_is_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path, "state.mdl")
    with h5py.File(path, "a") as file:
        del file.attrs["__SUCCESS__"]
    with pytest.raises(CorruptData, match="incomplete"):
        open_source(str(path))


@pytest.mark.parametrize("name", ["lz4.mdl", "gzip.mdl"])
def test_a_damaged_chunk_is_refused(tmp_path: Path, name: str) -> None:
    path = damaged(tmp_path, name)
    with h5py.File(path, "r") as file:
        place = file["array"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    for position in range(place.byte_offset, place.byte_offset + 24):
        data[position] ^= 0xFF
    path.write_bytes(data)
    with (
        open_source(str(path)) as source,
        pytest.raises(CorruptData, match=r"dataset 'array': a .*chunk"),
    ):
        read(source, "state")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "lzf"}, "compressed by lzf; LZ4 and gzip are known"),
        ({"compression": "gzip", "shuffle": True}, "compressed by shuffle, gzip"),
        ({"fletcher32": True}, "compressed by fletcher32"),
    ],
)
def test_another_filter_is_refused_by_name(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with h5py.File(tmp_path / "x.mdl", "w") as file:
        written = file.create_dataset("w", data=np.arange(100.0), chunks=(10,), **options)
        written.attrs.update({"__NUMPY__": True, "__TYPE__": "NumpyArraySerializer"})
    with pytest.raises(FormatError, match=message):
        open_source(str(tmp_path / "x.mdl"))


def test_the_plugins_of_hdf5_are_where_they_were() -> None:
    before = [h5py.h5pl.get(number) for number in range(h5py.h5pl.size())]
    open_source(str(FOLDER / "lz4.mdl")).close()
    assert [h5py.h5pl.get(number) for number in range(h5py.h5pl.size())] == before
