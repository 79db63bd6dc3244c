"""Differences of two sources: structure, dtypes, numbers and plain values, across formats."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.interop import source as source_module
from holdfast.interop.comparing.differences import SourceDifference, compare_sources
from holdfast.interop.comparing.pairs import TensorDifference, differences
from holdfast.interop.opening import open_source


def files(tmp_path: Path, a: dict[str, Tensor], b: dict[str, Tensor]) -> SourceDifference:
    """Differences of two safetensors files."""
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return between(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def between(a: object, b: object, *components: str) -> SourceDifference:
    with open_source(str(a)) as source_a, open_source(str(b)) as source_b:
        return compare_sources(source_a, source_b, components)


def one(tmp_path: Path, a: Tensor, b: Tensor) -> TensorDifference:
    (found,) = files(tmp_path, {"x": a}, {"x": b}).tensors
    return found


def saved(root: Path, *states: dict[str, Any]) -> Path:
    with CheckpointManager(root, states[0], preflight=False, sinks=()) as manager:
        manager.save(1).wait()
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_differences_equal_those_of_float64(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.randn(300, 700)
    b = a.to(dtype) + (0.01 * torch.randn(300, 700)).to(dtype)
    a = a.to(dtype)
    found, wide_a, wide_b = one(tmp_path, a, b), a.double(), b.double()
    apart = wide_a - wide_b
    assert found.max_abs == apart.abs().max().item()
    assert found.relative_norm == pytest.approx((apart.norm() / wide_a.norm()).item(), rel=1e-10)
    cosine = torch.cosine_similarity(wide_a.flatten(), wide_b.flatten(), dim=0)
    assert found.cosine == pytest.approx(cosine.item(), rel=1e-10)
    assert (found.count, found.different) == (a.numel(), int((a != b).sum()))


def test_one_bit_in_many_pieces_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "PIECE_NBYTES", 4096)
    a = torch.zeros(10_000)
    b = a.clone()
    b[7_777] = 0.5
    found = one(tmp_path, a, b)
    assert (found.different, found.max_abs, found.unmatched) == (1, 0.5, 0)


def test_equal_tensors_are_counted(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "nan": torch.tensor([math.nan]), "empty": torch.empty(0, 2)}
    found = files(tmp_path, weights, weights)
    assert (found.tensors, found.values, found.num_equal, found.num_unread) == ((), (), 3, 0)


def test_a_zero_of_the_other_sign_differs_by_nothing(tmp_path: Path) -> None:
    found = one(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.different, found.max_abs) == (1, 0.0)
    assert found.is_within(0.0)


def test_another_dtype_is_compared_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "PIECE_NBYTES", 4096)
    a = torch.randn(9000)
    found = one(tmp_path, a, a.bfloat16())
    assert (found.what, found.a, found.b) == ("dtype", "F32 9000", "BF16 9000")
    assert found.max_abs == (a.double() - a.bfloat16().double()).abs().max().item()
    same = one(tmp_path, torch.ones(3), torch.ones(3).bfloat16())
    assert (same.what, same.different, same.max_abs) == ("dtype", 0, 0.0)


def test_what_is_not_finite_is_counted_and_matched(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, inf, 1.0, inf, 2.0, 3.0])
    b = torch.tensor([nan, inf, nan, -inf, 2.0, 3.5])
    found = one(tmp_path, a, b)
    assert (found.non_finite_a, found.non_finite_b, found.unmatched) == (3, 4, 2)
    assert (found.max_abs, found.different) == (0.5, 3)
    assert not found.is_within(1.0)


def test_long_integers_differ_by_one(tmp_path: Path) -> None:
    big = 2**62
    assert one(tmp_path, torch.tensor([big]), torch.tensor([big + 1])).max_abs == 1.0
    far = one(tmp_path, torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]))
    assert far.max_abs == float(2**64 - 1)


def test_shapes_and_missing_tensors_are_structure(tmp_path: Path) -> None:
    a = {"x": torch.zeros(2, 3), "only a": torch.zeros(1)}
    b = {"x": torch.zeros(3, 2), "only b": torch.zeros(1)}
    found = {one.tensor: one.what for one in files(tmp_path, a, b).tensors}
    assert found == {
        "model:only a": "only in a",
        "model:only b": "only in b",
        "model:x": "shape",
    }


def test_a_checkpoint_and_a_file_of_its_weights_are_equal(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    root = saved(tmp_path / "run", {"model": model, "extra": {"n": 1}})
    save_file(dict(model.state_dict()), tmp_path / "w.safetensors")
    found = between(root, tmp_path / "w.safetensors", "model")
    assert (found.tensors, found.values, found.num_equal) == ((), (), 2)
    whole = between(root, tmp_path / "w.safetensors")
    assert {value.path for value in whole.values} == {"extra", "rng"}


def test_equal_files_are_not_read(tmp_path: Path) -> None:
    state = {"tree": {"w": torch.randn(50), "lr": 1.0}}
    a, b = (saved(tmp_path / name, state) for name in "ab")
    for path in b.glob("step-*/tree-00000.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))  # it would not pass if it were read
    found = between(a, b, "tree")
    assert (found.num_equal, found.num_unread, found.tensors) == (1, 1, ())


def test_plain_values_are_compared(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"tree": {"lr": 1.0, "names": ["x", "y"], "n": 1}})
    b = saved(tmp_path / "b", {"tree": {"lr": 2.0, "names": ["x"], "n": True, "new": {}}})
    found = {value.path: (value.a, value.b) for value in between(a, b, "tree").values}
    assert found == {
        "tree:lr": ("1.0", "2.0"),
        "tree:names.1": ("'y'", None),
        "tree:n": ("1", "True"),
        "tree:new": (None, "{}"),
    }


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (math.nan, math.nan, True),
        (0.0, -0.0, False),
        (1, 1.0, False),
        ((1, 2), [1, 2], False),
        ({1, 2}, {2, 1}, True),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (b"x", b"y", False),
        (None, {}, False),
    ],
)
def test_values_are_the_same_in_type_and_bits(a: Any, b: Any, is_same: bool) -> None:
    assert (not [*differences({"v": a}, {"v": b}, "tree:", lambda _: False)]) == is_same


def test_an_unknown_component_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    path = tmp_path / "w.safetensors"
    with pytest.raises(UsageError, match="no component 'modle'; there are 'model'"):
        between(path, path, "modle")


def test_a_complex_and_a_real_tensor_differ_in_shape(tmp_path: Path) -> None:
    found = one(tmp_path, torch.zeros(3, dtype=torch.complex64), torch.zeros(3))
    assert (found.what, found.a, found.b) == ("shape", "C64 3", "F32 3")
    assert not found.is_within(1.0)
