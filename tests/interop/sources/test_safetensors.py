"""One safetensors file as a source: written by the library of that name, and read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from tests.interop.sources.reads import data_of, read, safetensors_bytes, write

from holdfast.errors import CorruptData, FormatError, NoCheckpoint, StoreError, UsageError
from holdfast.interop.opening import open_source
from holdfast.state.leaves import TORCH_DTYPES


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.randn(3, 5),
        "a.bias": torch.randn(3).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
    }


def test_every_tensor_comes_back_with_its_bytes(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    with open_source(str(tmp_path / "w.safetensors")) as source:
        part, found = source.get_component("model"), read(source)
    assert {*part.leaves} == {*weights}
    for key, tensor in weights.items():
        assert part.specs[key].shape == tuple(tensor.shape)
        assert found[key] == data_of(tensor)


@pytest.mark.parametrize("name", sorted({*TORCH_DTYPES} - {"C32", "C128"}))
def test_every_dtype_that_both_know_is_read(tmp_path: Path, name: str) -> None:
    """Also as a scalar and without elements."""
    dtype = TORCH_DTYPES[name]
    matrix = torch.arange(2 * 3 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype)
    saved = {"matrix": matrix.reshape(2, 3), "empty": torch.empty(2, 0, dtype=dtype)}
    if name != "F4_X2":  # of which the library cannot read a scalar
        saved["scalar"] = matrix[1].clone()
    save_file(saved, tmp_path / "w.safetensors")
    with open_source(str(tmp_path / "w.safetensors")) as source:
        specs, found = source.get_component("model").specs, read(source)
    for key, tensor in saved.items():
        assert (specs[key].dtype, specs[key].shape) == (name, tuple(tensor.shape))
        assert found[key] == data_of(tensor)


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}}
    path = write(tmp_path / "w.safetensors", safetensors_bytes(header, bytes(3)))
    with pytest.raises(FormatError, match=rf"tensor 'w': unknown dtype '{dtype}'"):
        open_source(path)


def test_half_a_byte_of_4_bit_floats_is_refused(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}
    path = write(tmp_path / "w.safetensors", safetensors_bytes(header, bytes(3)))
    with pytest.raises(FormatError, match=r"tensor 'w': F4 of shape \[2, 3\].*must be even"):
        open_source(path)


def test_metadata_is_a_component_of_its_own(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, tmp_path / "w.safetensors", {"format": "pt", "note": "a run", "lr": "0.1"})
    with open_source(str(tmp_path / "w.safetensors")) as source:
        assert source.get_component("metadata").tree == {"note": "a run", "lr": "0.1"}
    save_file(weights, tmp_path / "w.safetensors", {"format": "pt"})
    with open_source(str(tmp_path / "w.safetensors")) as source:
        assert {*source.parts} == {"model"}


def test_names_that_save_model_left_out_share_their_tensor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save_model(model, str(tmp_path / "w.safetensors"))
    with open_source(str(tmp_path / "w.safetensors")) as source:
        leaves = source.get_component("model").leaves
    assert {*leaves} == {*model.state_dict()}
    assert leaves["0.weight"].key == leaves["1.weight"].key
    assert {*source.parts} == {"model"}


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, [], "x", {"a": {"b": "c"}}])
def test_metadata_other_than_texts_is_refused(tmp_path: Path, metadata: Any) -> None:
    path = write(tmp_path / "w.safetensors", safetensors_bytes({"__metadata__": metadata}))
    with pytest.raises(FormatError, match="`__metadata__` is not an object of texts"):
        open_source(path)


def test_a_file_cut_short_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match=r"w\.safetensors"):
        open_source(str(path))


def test_a_file_cut_short_while_it_is_open_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights, path)
    with open_source(str(path)) as source:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StoreError, match=r"w\.safetensors: was written to"):
            read(source)


def test_what_is_not_there_or_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="no such file"):
        open_source(str(tmp_path / "none.safetensors"))
    (tmp_path / "x.bin").write_bytes(b"hello")
    with pytest.raises(FormatError, match="no known format"):
        open_source(str(tmp_path / "x.bin"))


def test_an_unknown_component_is_named_with_those_there_are(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    with (
        open_source(str(tmp_path / "w.safetensors")) as source,
        pytest.raises(UsageError, match=r"no component 'optimizer'; it has 'model'"),
    ):
        source.get_component("optimizer")
