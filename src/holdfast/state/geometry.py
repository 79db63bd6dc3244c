"""Boxes of tensors: which indices each rank of a mesh holds, as integers.

Pure functions of shapes, coordinates and shardings. Knows nothing of tensors and process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, product
from operator import mul
from typing import NamedTuple, TypeAlias

Span: TypeAlias = tuple[int, int]
"""Indices [start, stop) in one dimension of the global tensor."""


class Box(NamedTuple):
    """An axis-aligned part of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Split(NamedTuple):
    """Sharding of tensor dimension `dim` over mesh dimension `over`, in chunks as of `torch.chunk`.

    A `factor` above 1 cuts the dimension into so many chunks first and shards each of them: the
    placement `_StridedShard`.
    """

    dim: int
    over: int
    factor: int = 1


def spans_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    splits: Sequence[Split],
) -> list[list[Span]]:
    """Compute the indices that one rank holds in each dimension, in the order of its local tensor.

    Args:
        shape: Shape of the global tensor.
        mesh_shape: Number of ranks in each dimension of the mesh.
        coordinate: Position of the rank in the mesh.
        splits: In the order in which they are applied.
    """
    spans = [[(0, size)] for size in shape]
    for dim, over, factor in splits:
        chunks = (_chunk(spans[dim], factor, number) for number in range(factor))
        parts = (_chunk(chunk, mesh_shape[over], coordinate[over]) for chunk in chunks)
        spans[dim] = [span for part in parts for span in part]
    return spans


def _chunk(spans: Sequence[Span], num_chunks: int, number: int) -> list[Span]:
    """Select one chunk of consecutive spans as `torch.chunk` does: the last ones may be empty."""
    size = -(-sum(stop - start for start, stop in spans) // num_chunks)
    kept, skip = [], size * number
    for start, stop in spans:
        first, last = max(start, start + skip), min(stop, start + skip + size)
        if first < last:
            kept.append((first, last))
        skip -= stop - start
    return kept


def in_order(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split]:
    """Turn `_StridedShard` placements into plain shardings in the order in which they were made.

    FSDP2 shards what tensor parallelism has sharded already, over mesh dimensions further right.
    torch notes this by a factor: the number of shards that existed before. A factor that is no
    such number stays.
    """
    ordered: list[Split] = []
    for dim in sorted({split.dim for split in splits}):
        own = [split for split in splits if split.dim == dim]
        ordered += _order_splits(own, mesh_shape) or own
    return ordered


def _order_splits(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split] | None:
    order: list[Split] = []
    for split in reversed(splits):
        shards_before = accumulate((mesh_shape[it.over] for it in order), mul, initial=1)
        place = next((n for n, shards in enumerate(shards_before) if shards == split.factor), None)
        if place is None:
            return None
        order.insert(place, split._replace(factor=1))
    return order


def packed(spans: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Compute where the spans lie in the local tensor, which has nothing between them."""
    sizes = [[stop - start for start, stop in of_dim] for of_dim in spans]
    return [[*pairwise(accumulate(of_dim, initial=0))] for of_dim in sizes]


def boxes_of(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Make a box of each combination of spans, one of each dimension."""
    return [box_of(cell) for cell in product(*spans)]


def box_of(cell: Iterable[Span]) -> Box:
    """Make a box from its span in each dimension."""
    sides = [*cell]
    return Box(tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))


def whole_box(shape: Sequence[int]) -> Box:
    """Make the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def corners(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Compute the positions of a box's first and last element in the row-major tensor.

    They are 0 and -1 in a tensor without elements, which has one box.
    """
    if math.prod(shape) == 0:
        return 0, -1
    first = last = 0
    for extent, offset, size in zip(shape, *box, strict=True):
        first = first * extent + offset
        last = last * extent + offset + size - 1
    return first, last


def box_at(shape: Sequence[int], first: int, last: int) -> Box:
    """Make a box from its corners."""
    if math.prod(shape) == 0:
        return whole_box(shape)
    sides: list[Span] = []
    for extent in shape[:0:-1]:
        first, start = divmod(first, extent)
        last, end = divmod(last, extent)
        sides.append((start, end + 1))
    if shape:  # the first dimension shows what is beyond the end
        sides.append((first, last + 1))
    return box_of(reversed(sides))
