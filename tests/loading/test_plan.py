"""Which tensors of which files a load wants, and in which blocks they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.format.boxes import Boxes, Ragged
from holdfast.format.index import Index, Places, TensorTable
from holdfast.format.tensors import TensorSpec
from holdfast.loading.plan import Wanted, wanted_by_file

FILES = ("model-00000.safetensors", "model-00001.safetensors")


def column(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def wanted(*tensors: tuple[str, tuple[int, ...], int]) -> Wanted:
    """Tensors as (dtype, shape, start)."""
    specs = [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape, _) in enumerate(tensors)]
    return Wanted(
        component="model",
        specs=specs,
        start=column(*(start for *_, start in tensors)),
        nbytes=column(*(spec.nbytes for spec in specs)),
    )


def table() -> TensorTable:
    specs = {key: TensorSpec(key, "U8", (10,)) for key in ("a", "b", "c", "d")}
    places = Places(FILES, column(0, 0, 1, 1), column(0, 10, 5, 20), column(10, 10, 10, 10))
    return TensorTable(specs, places)


def index(of_model: TensorTable) -> Index:
    return Index(blocks={}, components={"model": of_model}, block_nbytes=4096)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 8)], [0]),
        ([(0, 9)], [0, 1]),
        ([(8, 8)], [1]),
        ([(7, 2), (30, 1)], [0, 1, 3]),
        ([(0, 100)], list(range(13))),
        ([(5, 1), (6, 1), (3, 20)], [0, 1, 2]),
        ([(80, 0)], []),
        ([], []),
    ],
)
def test_only_blocks_with_bytes_of_a_tensor_are_read(
    places: list[tuple[int, int]], expected: list[int]
) -> None:
    found = wanted(*(("U8", (nbytes,), start) for start, nbytes in places))
    assert found.find_blocks(8) == expected


def test_tensors_are_sorted_into_files_in_the_order_in_which_they_are_asked_for() -> None:
    found = wanted_by_file(index(table()), {"model": ["d", "b", "a"]})
    assert {file: [spec.key for spec in of.specs] for file, of in found.items()} == {
        FILES[0]: ["b", "a"],
        FILES[1]: ["d"],
    }
    assert found[FILES[0]].start.tolist() == [10, 0]
    everything = wanted_by_file(index(table()), {"model": ["a", "b", "c", "d"]})
    assert everything[FILES[1]].start.tolist() == [5, 20]
    assert wanted_by_file(index(table()), {"model": []}) == {}


def test_whole_tensors_beside_one_in_boxes() -> None:
    columns = (np.array(column) for column in ([0, 0, 1], [0, 4, 8], [4, 4, 8]))
    boxes = Boxes(
        np.array([0, 0, 1]), Ragged.from_lists([[0], [4], [0]]), Ragged.from_lists([[4], [4], [8]])
    )
    specs = {key: TensorSpec(key, "U8", (8,)) for key in ("w", "v")}
    of_model = index(TensorTable(specs, Places(FILES, *columns), boxes))
    (found,) = wanted_by_file(of_model, {"model": ["v"]}).items()
    assert (found[0], found[1].start.tolist()) == (FILES[1], [8])
    with pytest.raises(AssertionError, match="several shards"):
        wanted_by_file(of_model, {"model": ["v", "w"]})
