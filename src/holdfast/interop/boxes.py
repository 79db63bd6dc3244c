"""Finds the elements of stored boxes that a range of a tensor consists of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.format.boxes import Column

_VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""By the bytes of an element, a type that numpy copies bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBox:
    """Elements that a range of a tensor and a stored box share. They are a box themselves.

    Strides and positions count elements.
    """

    shard: int
    """Number of the stored box."""
    first: int
    """Position of its first element in the stored box."""
    length: int
    """Elements of the stored box from its first to its last."""
    at: int
    """Position of its first element in the range."""
    sizes: tuple[int, ...]
    from_strides: tuple[int, ...]
    to_strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether its elements follow each other, in the stored box and in the range."""
        reach = sum(
            (size - 1) * step for size, step in zip(self.sizes, self.to_strides, strict=True)
        )
        return self.length == self.num_elements == reach + 1

    def copy_range(self, read: Any, target: Any, item_nbytes: int) -> None:
        """Copy it from `read`, which has `length` elements, into the bytes of the range."""
        kind = _VIEWS[item_nbytes]
        old = as_strided(read.view(kind), self.sizes, [n * item_nbytes for n in self.from_strides])
        new = as_strided(
            target[self.at * item_nbytes :].view(kind),
            self.sizes,
            [n * item_nbytes for n in self.to_strides],
        )
        new[...] = old


def overlaps(
    shape: Sequence[int], shards: Column, boxes: Column, start: int, stop: int
) -> Iterator[SharedBox]:
    """Yield the parts of stored boxes in which elements [start, stop) of a row-major tensor lie.

    `shards` has the numbers of the boxes, and `boxes` the first and the last coordinates of each,
    as `TensorTable.boxes_of` returns them.
    """
    shape = tuple(shape) or (1,)
    strides = _strides(shape)
    for low, high in _ranges(shape, start, stop):
        first = np.maximum(boxes[:, 0], low)
        last = np.minimum(boxes[:, 1], high)
        for number in np.flatnonzero((first < last).all(axis=1)).tolist():
            sizes = last[number] - first[number]
            own = _strides((boxes[number, 1] - boxes[number, 0]).tolist())
            yield SharedBox(
                shard=int(shards[number]),
                first=int(((first[number] - boxes[number, 0]) * own).sum()),
                length=int(((sizes - 1) * own).sum()) + 1,
                at=int((first[number] * strides).sum()) - start,
                sizes=tuple(sizes.tolist()),
                from_strides=own,
                to_strides=strides,
            )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[number + 1 :]) for number in range(len(shape)))


def _ranges(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of elements into boxes (first coordinates, behind the last), in their order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop,)
        return
    rest = shape[1:]
    row = math.prod(rest)
    head, tail = -(-start // row), stop // row
    if head > tail:  # inside one row
        yield from _split_row(rest, tail, start - tail * row, stop - tail * row)
        return
    yield from _split_row(
        rest, head - 1, start - (head - 1) * row, row if start < head * row else 0
    )
    if head < tail:
        yield (head, *(0 for _ in rest)), (tail, *rest)
    yield from _split_row(rest, tail, 0, stop - tail * row)


def _split_row(
    rest: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for low, high in _ranges(rest, start, stop):
        yield (row, *low), (row + 1, *high)
