"""Statistics of tensors: what torch and plain Python compute of the same numbers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.statistics import TensorStats, TensorTally, figures_of, stats_of
from holdfast.interop.opening import open_source
from holdfast.state.leaves import DTYPE_NAMES

ODD = torch.tensor([[math.nan, math.inf, -math.inf], [0.0, -0.0, 3.0]])


def stats(tensor: torch.Tensor, *, cut: int = 1 << 20) -> TensorStats:
    """Statistics of a tensor whose bytes come in pieces of `cut`."""
    tally = TensorTally(TensorSpec("x", DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    data = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for start in range(0, len(data), cut):
        tally.add_bytes(memoryview(data)[start : start + cut])
    return figures_of(tally, "model:x", ())


def exponents(numbers: list[float]) -> dict[int, int]:
    finite = [abs(number) for number in numbers if math.isfinite(number) and number]
    return dict(sorted(Counter(math.frexp(number)[1] - 1 for number in finite).items()))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int16],
)
def test_statistics_equal_those_of_float64(dtype: torch.dtype) -> None:
    tensor = (torch.randn(70, 1000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    found, wide = stats(tensor), tensor.double()
    assert found.norm == pytest.approx(wide.norm().item(), rel=1e-12)
    assert found.mean == pytest.approx(wide.mean().item(), rel=1e-9, abs=1e-12)
    assert (found.min, found.max) == (wide.min().item(), wide.max().item())
    assert found.zeros == int((wide == 0).sum())
    assert found.exponents == exponents(wide.flatten().tolist())
    assert (found.nan, found.infinite) == (0, 0)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = stats(ODD)
    assert (found.nan, found.infinite, found.zeros) == (1, 2, 2)
    assert (found.norm, found.mean, found.min, found.max) == (3.0, 1.0, -0.0, 3.0)
    assert found.dead_rows == 0
    nothing = stats(torch.full((2,), math.nan))
    assert (nothing.mean, nothing.min, nothing.max) == (None, None, None)


def test_subnormal_numbers_keep_their_exponents() -> None:
    numbers = [2.0**-149, -3 * 2.0**-149, 2.0**-126, 1.0, 0.0]
    assert stats(torch.tensor(numbers)).exponents == exponents(numbers)
    tiny = [5e-324, 2.0**-1022, 0.0]
    assert stats(torch.tensor(tiny, dtype=torch.float64)).exponents == exponents(tiny)


def test_numbers_whose_squares_overflow_float32_have_a_norm() -> None:
    assert stats(torch.full((4,), 1e38)).norm == pytest.approx(2e38, rel=1e-6)
    assert stats(torch.full((4,), 1e-38)).norm == pytest.approx(2e-38, rel=1e-6)


@given(
    rows=st.lists(st.booleans(), min_size=1, max_size=40),
    length=st.integers(1, 9),
    cut=st.integers(1, 50),
    draw=st.randoms(use_true_random=False),
)
def test_dead_rows_are_found_whichever_way_pieces_cut_them(
    rows: list[bool], length: int, cut: int, draw: object
) -> None:
    tensor = torch.zeros(len(rows), length)
    for number, is_alive in enumerate(rows):
        if is_alive:
            tensor[number, draw.randrange(length)] = 1.0  # type: ignore[attr-defined]
    assert stats(tensor, cut=4 * cut).dead_rows == rows.count(False)


def test_dead_rows_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.interop.comparing.numbers.CHUNK_OF_FLOAT32", 7)
    tensor = torch.randn(50, 11)
    tensor[3] = tensor[49] = tensor[0] = 0
    assert stats(tensor).dead_rows == 3


def test_vectors_and_scalars_have_no_rows() -> None:
    assert stats(torch.zeros(3)).dead_rows is None
    assert stats(torch.tensor(0.0)).dead_rows is None
    assert stats(torch.zeros(3, 0)).dead_rows == 0


def test_each_tensor_of_a_source_comes_once(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3, 2), "b": torch.zeros(0, 4), "c": torch.tensor(2.0)}
    save_file(weights, tmp_path / "w.safetensors")
    with open_source(str(tmp_path / "w.safetensors")) as source:
        found = {
            one.tensor: one.norm
            for one in stats_of(source, [("model", key) for key in source.parts["model"].specs])
        }
    assert found == {"model:a": math.sqrt(6), "model:b": 0.0, "model:c": 2.0}
