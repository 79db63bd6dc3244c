"""Strided tensors, read as row-major bytes from any byte on and with few reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast.interop import boxes as gathering
from holdfast.interop.boxes import gather_strided, range_boxes

VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(420.0).reshape(21, 20).t(),
    "permuted": lambda: torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
    "every seventh": lambda: torch.arange(5000, dtype=torch.int16)[3::7],
    "every thousandth": lambda: torch.arange(30_000)[5::1000],
    "a column": lambda: torch.arange(4900).reshape(70, 70)[:, 17],
    "expanded": lambda: torch.arange(7).expand(5, 7),
    "expanded at the end": lambda: torch.arange(7).reshape(7, 1).expand(7, 6),
    "windows": lambda: torch.arange(100).unfold(0, 10, 3),
    "a box": lambda: torch.arange(4096, dtype=torch.uint8).reshape(16, 16, 16)[3:9, 2:5, 7:12],
    "complex": lambda: torch.randn(6, 5, dtype=torch.complex128).t(),
    "one": lambda: torch.arange(9)[4],
    "rows of one": lambda: torch.arange(12).reshape(3, 4)[:, 1:2],
}


@pytest.mark.parametrize("span", [64, 4096, 16 << 20])
@pytest.mark.parametrize("name", VIEWS)
def test_any_range_is_that_of_the_contiguous_tensor(
    monkeypatch: pytest.MonkeyPatch, name: str, span: int
) -> None:
    monkeypatch.setattr(gathering, "SPAN_NBYTES", span)
    monkeypatch.setattr(gathering, "PIECE_NBYTES", 1000)
    tensor = VIEWS[name]()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage = raw.numpy().tobytes()
    whole = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def read(start: int, memory: memoryview) -> None:
        assert 0 <= start <= len(storage) - memory.nbytes
        memory[:] = storage[start : start + memory.nbytes]

    rng = np.random.default_rng(1)
    ranges = [(0, len(whole)), *rng.integers(0, len(whole), (6, 2))]
    for first, last in ranges:
        low, high = sorted((int(first), int(last)))
        memory = memoryview(bytearray(high - low))
        gather_strided(
            read,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            offset=tensor.storage_offset(),
            item_nbytes=tensor.element_size(),
            start=low,
            memory=memory,
        )
        assert bytes(memory) == whole[low:high]


def test_a_transposed_matrix_is_read_in_bounded_memory_and_few_reads() -> None:
    reads: list[int] = []
    memory = memoryview(bytearray(4 * 4096 * 64))

    def read(start: int, memory: memoryview) -> None:
        reads.append(memory.nbytes)

    gather_strided(read, (4096, 4096), (1, 4096), offset=0, item_nbytes=4, start=0, memory=memory)
    assert max(reads) <= gathering.SPAN_NBYTES
    assert len(reads) <= 4096
    assert sum(reads) <= 4096 * 4096 * 4


def test_boxes_cover_a_range_in_order() -> None:
    shape = (3, 4, 5)
    for low in range(60):
        for high in range(low, 61):
            found = []
            for first, sizes in range_boxes(shape, low, high):
                block = np.arange(60).reshape(shape)[
                    tuple(slice(f, f + s) for f, s in zip(first, sizes, strict=True))
                ]
                found += block.reshape(-1).tolist()
            assert found == [*range(low, high)]
