"""One safetensors file as a source: written by the library of that name, and read here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.errors import CorruptData, FormatError, NoCheckpoint, UsageError
from holdfast.interop.opening import open_source
from holdfast.interop.reading import pieces


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
        part = source.part("model")
        read: dict[str, bytes] = dict.fromkeys(part.specs, b"")
        for piece in pieces(source, [("model", key) for key in part.specs]):
            read[piece.key] += bytes(piece.memory)
    assert {*part.leaves} == {*weights}
    for key, tensor in weights.items():
        assert part.specs[key].shape == tuple(tensor.shape)
        assert read[key] == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_file_cut_short_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptData, match=r"w\.safetensors"):
        open_source(str(path))


def test_what_is_not_there_or_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="no such file"):
        open_source(str(tmp_path / "none.safetensors"))
    (tmp_path / "x.bin").write_bytes(b"hello")
    with pytest.raises(FormatError, match="no format"):
        open_source(str(tmp_path / "x.bin"))


def test_an_unknown_component_is_named_with_those_there_are(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    with (
        open_source(str(tmp_path / "w.safetensors")) as source,
        pytest.raises(UsageError, match=r"no component 'optimizer'; it has 'model'"),
    ):
        source.part("optimizer")
