"""Figures of tensors: many at a time, in pieces, and by codes they are those of each alone."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from holdfast.format.tensors import TensorSpec
from holdfast.interop.comparing.differences import compare_sources
from holdfast.interop.comparing.pairs import PairTally
from holdfast.interop.comparing.statistics import TensorStats, TensorTally, stats_of
from holdfast.interop.opening import open_source
from holdfast.state.leaves import DTYPE_NAMES
from marks import full

RANDOM = torch.Generator().manual_seed(5)


def memory_of(tensor: Tensor) -> memoryview:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return memoryview(bytearray(data))


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec("x", DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def counted(tally: TensorTally) -> tuple[object, ...]:
    """The figures that are whole numbers, or numbers of the tensor."""
    extremes = (tally.min, tally.max)
    counts = (tally.count, tally.zeros, tally.nan, tally.infinite, tally.rows.num_dead)
    return (*extremes, *counts, dict(sorted(tally.exponents.items())))


@given(
    rows=st.lists(st.booleans(), min_size=1, max_size=30),
    length=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 269), max_size=6),
    draw=st.randoms(use_true_random=False),
)
def test_runs_of_a_tensor_merge_to_the_whole(
    rows: list[bool], length: int, cuts: list[int], draw: object
) -> None:
    tensor = torch.zeros(len(rows), length)
    for number, is_alive in enumerate(rows):
        if is_alive:
            tensor[number, draw.randrange(length)] = 1.5  # type: ignore[attr-defined]
    memory, spec = memory_of(tensor), spec_of(tensor)
    places = sorted({0, *(4 * cut for cut in cuts if 4 * cut < memory.nbytes), memory.nbytes})
    runs = []
    for start, stop in pairwise(places):
        runs.append(TensorTally(spec, start))
        runs[-1].add_bytes(memory[start:stop])
    found = runs[0]
    for later in runs[1:]:
        found = found.merged(later)
    assert found.is_whole
    assert found.rows.num_dead == rows.count(False)
    assert (found.zeros, found.count) == (tensor.numel() - sum(rows), tensor.numel())


@pytest.mark.parametrize("num", [200_001, 262_144])
def test_exponents_of_many_numbers_are_those_of_each(num: int) -> None:
    tensor = torch.randn(num, generator=RANDOM) * 10.0 ** torch.randint(-37, 37, (num,))
    tensor[::1000], tensor[5], tensor[num - 1] = 0.0, math.nan, -math.inf
    tensor[7] = 2.0**-140
    tally = TensorTally(spec_of(tensor))
    tally.add_bytes(memory_of(tensor))
    finite = tensor[torch.isfinite(tensor) & (tensor != 0)].double()
    values, counts = (torch.frexp(finite).exponent - 1).unique(return_counts=True)
    expected = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert dict(sorted(tally.exponents.items())) == expected
    assert (tally.zeros, tally.nan, tally.infinite) == (int((tensor == 0).sum()), 1, 1)
    assert tally.squares == pytest.approx(float((finite * finite).sum()), rel=1e-12)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *full(torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint16)],
)
def test_numbers_counted_by_their_codes_have_the_same_figures(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 256, (600, 1000), generator=RANDOM, dtype=torch.uint8)
    if dtype.itemsize == 2:
        tensor = torch.cat([tensor, tensor.flip(0)], 1)
    tensor[3] = tensor[599] = 0
    tensor = tensor.view(dtype)
    memory, spec = memory_of(tensor), spec_of(tensor)
    by_codes, by_parts = TensorTally(spec), TensorTally(spec)
    by_codes.add_bytes(memory)
    for start in range(0, memory.nbytes, 60):
        by_parts.add_bytes(memory[start : start + 60])
    assert counted(by_codes) == counted(by_parts)
    assert by_codes.rows.num_dead == 2
    assert by_codes.sum == pytest.approx(by_parts.sum, rel=1e-9)
    assert by_codes.squares == pytest.approx(by_parts.squares, rel=1e-9)


def small_tensors() -> dict[str, Tensor]:
    """Small tensors of several types, some with figures that need care."""
    odd = torch.randn(4, 5, generator=RANDOM)
    odd[1, 1], odd[2, 2], odd[3] = math.nan, math.inf, 0
    found = {
        "odd": odd,
        "tiny": torch.tensor([2.0**-140, 0.0, -0.0, 1.0]),
        "zeros": torch.zeros(3, 4),
        "bias": torch.zeros(7),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "wide": torch.randn(9, dtype=torch.float64, generator=RANDOM) * 1e200,
        "long": torch.tensor([2**62, -5]),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, 2, dtype=torch.complex64, generator=RANDOM),
    }
    for number in range(60):
        dtype = (torch.float32, torch.bfloat16, torch.float64)[number // 20]
        found[f"w{number:02}"] = torch.randn(number % 7 + 1, 5, generator=RANDOM).to(dtype)
    return found


def test_small_tensors_have_the_figures_of_each_alone(tmp_path: Path) -> None:
    tensors = small_tensors()
    save_file(tensors, tmp_path / "w.safetensors")
    with open_source(str(tmp_path / "w.safetensors")) as source:
        wanted = [("model", key) for key in source.parts["model"].specs]
        found = {one.tensor.removeprefix("model:"): one for one in stats_of(source, wanted)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        alone = TensorTally(spec_of(tensor))
        alone.add_bytes(memory_of(tensor))
        assert figures(found[name]) == (
            alone.zeros,
            alone.nan,
            alone.infinite,
            alone.rows.num_dead,
            dict(sorted(alone.exponents.items())),
            alone.min if alone.count else None,
            alone.max if alone.count else None,
        )
        assert found[name].norm == pytest.approx(math.sqrt(alone.squares), rel=1e-12)
        if alone.count:
            assert found[name].mean == pytest.approx(alone.sum / alone.count, rel=1e-9)


def figures(one: TensorStats) -> tuple[object, ...]:
    return (one.zeros, one.nan, one.infinite, one.dead_rows, one.exponents, one.min, one.max)


def test_small_tensors_differ_as_each_alone(tmp_path: Path) -> None:
    a, b = small_tensors(), small_tensors()
    for number, (name, tensor) in enumerate(b.items()):
        if number % 3 and tensor.numel() and tensor.dtype is not torch.bool:
            b[name] = tensor * 2 + 1
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    with (
        open_source(str(tmp_path / "a.safetensors")) as one,
        open_source(str(tmp_path / "b.safetensors")) as other,
    ):
        result = compare_sources(one, other)
    found = {difference.tensor: difference for difference in result.tensors}
    for name in a:
        alone = PairTally(spec_of(a[name]), spec_of(b[name]))
        if alone.num_left:
            alone.add_numbers(memory_of(a[name]), memory_of(b[name]))
        difference = found.pop(f"model:{name}", None)
        assert (difference is None) == alone.is_equal
        if difference is not None:
            expected = alone.difference(f"model:{name}")
            for field in ("count", "different", "max_abs", "non_finite_a", "unmatched"):
                assert getattr(difference, field) == getattr(expected, field), (name, field)
            for field in ("relative_norm", "cosine"):
                assert getattr(difference, field) == pytest.approx(
                    getattr(expected, field), nan_ok=True
                )
    assert not found
    assert result.num_equal == len(a) - len(result.tensors)
