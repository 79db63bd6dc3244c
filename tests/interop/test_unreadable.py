"""Tensors that a reader cannot give are named: an error, unless the caller allows the loss."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import load_file, load_weights
from holdfast.cli.diff import DiffAnswer, diff
from holdfast.errors import UsageError
from holdfast.interop import export_checkpoint, import_checkpoint
from holdfast.interop.opening import open_source


class Subclass(torch.Tensor):
    """A subclass of another program, whose name is not trusted."""


class Loss:
    """An object of another program with a tensor inside."""

    def __init__(self) -> None:
        self.weight = torch.ones(2)


def conjugated() -> torch.Tensor:
    return torch.complex(torch.arange(3.0), torch.ones(3)).conj()


def unreadable() -> dict[str, Any]:
    """Return a value of each kind; torch warns of kinds that are in development."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": torch.eye(3).to_sparse(),
            "compressed": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
            "conjugated": conjugated(),
            "negated": conjugated().imag,
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "jagged": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "big-endian": np.arange(3).astype(">f4"),
            "subclass": torch.ones(3).as_subclass(Subclass),
            "meta": torch.empty(3, device="meta"),
            "storage": torch.ones(3).untyped_storage(),
            "object": Loss(),
            "in a list": [torch.eye(3).to_sparse()],
            "beside an object": [object, torch.ones(2)],
        }


UNREADABLE = unreadable()


def write(path: Path, value: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"model": {"odd": value, "plain": torch.ones(1)}}, path)
    return str(path)


@pytest.fixture(params=UNREADABLE)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write(tmp_path / "w.pt", UNREADABLE[request.param])


def test_a_tensor_that_cannot_be_read_is_named_with_its_component(path: str) -> None:
    with open_source(path) as source:
        assert any(one.tensors_of == "model" for one in source.left_out)


def test_reading_or_converting_it_is_an_error_unless_allowed(path: str, tmp_path: Path) -> None:
    for call in (
        lambda: load_file(path),
        lambda: load_weights(path),
        lambda: import_checkpoint(path, tmp_path / "run", step=1),
        lambda: export_checkpoint(path, tmp_path / "out.safetensors", to="safetensors"),
    ):
        with pytest.raises(UsageError, match=r"model\.odd"):
            call()
    assert [*tmp_path.iterdir()] == [Path(path)]
    with load_file(path, allow_loss=True) as file:
        assert [*file] == ["plain"]
    assert [*load_weights(path, skip=["model.odd"])] == ["plain"]


def test_diff_never_calls_two_files_equal_of_which_it_could_not_read_a_tensor(path: str) -> None:
    answer = diff(path, path)
    assert isinstance(answer.document, DiffAnswer)
    assert not answer.document.equal
    assert answer.code
    assert {one.source for one in answer.document.not_compared} == {"a", "b"}
    assert any("not compared: model.odd" in str(part) for part in answer.parts)
    ignoring = diff(path, path, ignored=["model.odd"]).document
    assert isinstance(ignoring, DiffAnswer)
    assert ignoring.equal


def test_values_without_tensors_may_be_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "w.pt", ["text", object])
    with load_file(path) as file:
        assert [*file] == ["plain"]
        assert file.left_out
    assert diff(path, path).code == 0


def test_a_file_of_another_library_in_place_of_a_checkpoint_says_how_to_load_it(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"load_state_dict\(holdfast\.load_weights"):
        load_weights(tmp_path / "w.pt", model)
