"""Tensors as views of the memory of a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import FormatError
from holdfast.format.tensors import TensorSpec
from holdfast.staging.arena import Arena

Place = tuple[str, tuple[int, ...], int]


def views(*tensors: Place, tells_sizes: bool) -> list[torch.Tensor]:
    """Tensors given as (dtype, shape, start), in memory whose bytes are 0, 1, 2, …"""
    arena = Arena(64)
    arena.memory[:] = bytes(range(64))
    specs = [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape, _) in enumerate(tensors)]
    nbytes = np.array([spec.nbytes for spec in specs], np.int64)
    starts = [start for *_, start in tensors]
    return arena.make_tensor_views(specs, starts, nbytes if tells_sizes else None)


@pytest.mark.parametrize("tells_sizes", [False, True])
def test_views_have_the_values_dtypes_and_shapes_of_the_file(tells_sizes: bool) -> None:
    """Neighbours, a gap, another dtype, a scalar, nothing at all."""
    found = views(
        ("I16", (2,), 0),
        ("I16", (1, 2), 4),
        ("I16", (), 12),
        ("U8", (3,), 14),
        ("U8", (0, 4), 17),
        ("U8", (2,), 17),
        tells_sizes=tells_sizes,
    )
    assert [(view.dtype, tuple(view.shape)) for view in found] == [
        (torch.int16, (2,)),
        (torch.int16, (1, 2)),
        (torch.int16, ()),
        (torch.uint8, (3,)),
        (torch.uint8, (0, 4)),
        (torch.uint8, (2,)),
    ]
    assert b"".join(view.numpy().tobytes() for view in found) == bytes([*range(8), *range(12, 19)])
    assert views(tells_sizes=tells_sizes) == []


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    """R29: other writers may place it anywhere."""
    with pytest.raises(FormatError, match="'t0' starts at byte 2, not aligned"):
        views(("F32", (1,), 2), tells_sizes=True)
