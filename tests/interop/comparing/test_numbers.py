"""Numbers of every dtype by numpy alone: those that torch finds in the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.interop.comparing.numbers import CHUNK, chunks, floats
from holdfast.state.leaves import DTYPE_NAMES

EIGHT_BITS = [name for name in DTYPE_NAMES.values() if name.startswith("F8")]


def decoded(tensor: torch.Tensor) -> np.ndarray:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(floats(raw, DTYPE_NAMES[tensor.dtype]))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_all_codes_of_eight_bits_are_what_torch_reads(name: str) -> None:
    dtype = next(dtype for dtype, index in DTYPE_NAMES.items() if index == name)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    np.testing.assert_array_equal(decoded(codes), codes.float().numpy())
    zeros = (codes.float() == 0).numpy()
    signs = torch.signbit(codes.float()).numpy()
    assert np.signbit(decoded(codes))[zeros].tolist() == signs[zeros].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_codes_of_sixteen_bits_are_what_torch_reads(dtype: torch.dtype) -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    np.testing.assert_array_equal(decoded(codes), codes.float().numpy())


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPE_NAMES if not (d.is_floating_point or d.is_complex)]
)
def test_integers_and_bools_are_read(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0, 1, 1, 0]).to(dtype)
    assert decoded(values).tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_a_complex_number_is_two(dtype: torch.dtype) -> None:
    values = torch.tensor([1 - 2j, 3 + 4j]).to(dtype)
    assert decoded(values).tolist() == [1.0, -2.0, 3.0, 4.0]


def test_chunks_are_in_order_and_small() -> None:
    values = torch.arange(3 * CHUNK + 5, dtype=torch.int16).bfloat16()
    memory = memoryview(values.view(torch.uint8).numpy())
    found = [chunk.copy() for chunk in chunks(memory, "BF16")]
    assert max(map(len, found)) == CHUNK
    np.testing.assert_array_equal(np.concatenate(found), values.float().numpy())
