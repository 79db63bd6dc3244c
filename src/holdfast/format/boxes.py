"""Shards of tensors as columns: which box of its tensor each one holds, and whether boxes tile.

A box is a range of elements along each dimension. A checkpoint of many ranks has a million of them,
so nothing here makes an object for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np

from holdfast.errors import FormatError

Column: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
_Rows = Sequence[Sequence[int]]

_PRIME = 2**31 - 1  # a product of two residues fits 64 bits
_NUM_MEASURES = 3


def split_rows(num_rows: int, length: int = 1_000_000) -> Iterator[slice]:
    """Divide rows of columns into runs, for work that takes much memory."""
    for start in range(0, num_rows, length):
        yield slice(start, start + length)


def key_of_box(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the name, in the header of a tensor file, of a box that is not its whole tensor."""
    sides = zip(offsets, sizes, strict=True)
    return f"{key}[{','.join(f'{start}:{start + size}' for start, size in sides)}]"


class Ragged(msgspec.Struct, frozen=True, eq=False):
    """Rows of integers of different lengths, one behind the other."""

    values: Column
    first: Column
    """Position in `values` of the first one of each row, and of the end."""

    @classmethod
    def from_lists(cls, rows: _Rows) -> Ragged:
        """Make it of lists."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.fromiter(chain.from_iterable(rows), np.int64, int(first[-1]))
        return cls(values, first)

    @property
    def lengths(self) -> Column:
        """The length of each row."""
        return np.diff(self.first)

    def row(self, number: int) -> tuple[int, ...]:
        """Return one row."""
        return tuple(self.values[self.first[number] : self.first[number + 1]].tolist())

    def select_rows(self, numbers: Column, length: int) -> Column:
        """Return rows of this length, as an array of two dimensions."""
        return np.take(self.values, self.first[numbers][:, None] + np.arange(length))

    def select_ragged(self, numbers: Column) -> Ragged:
        """Return rows of any lengths."""
        lengths = self.first[numbers + 1] - self.first[numbers]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        at = np.arange(first[-1]) + np.repeat(self.first[numbers] - first[:-1], lengths)
        return Ragged(self.values[at], first)

    def lists(self) -> list[list[int]]:
        """Return the rows as lists."""
        values, first = self.values.tolist(), self.first.tolist()
        return [values[start:stop] for start, stop in pairwise(first)]


class Boxes(msgspec.Struct, frozen=True, eq=False):
    """Boxes in the order of their tensors' numbers, an entry for each."""

    tensor: Column
    offsets: Ragged
    """First element of the box in each dimension of the tensor."""
    sizes: Ragged


class Unfit(FormatError):
    """Error: a box does not fit its tensor, or the boxes of a tensor do not tile it."""

    def __init__(self, tensor: int, problem: str) -> None:
        super().__init__(problem)
        self.tensor = tensor


def check_boxes(shapes: _Rows, boxes: Boxes) -> Column:
    """Return the number of elements of each box, when all boxes of each tensor tile it.

    Takes linear time, unlike comparing boxes. It compares measures: every coordinate c of dimension
    d has a random number F_d(c) modulo a prime, and a box the product over d of
    F_d(stop) - F_d(start). That is additive, so a tiling has the measure of the whole. For boxes
    that do not tile, the difference to the whole is a polynomial of degree at most 128 in the F,
    which is zero by chance with probability below 128 / 2**31 (Schwartz and Zippel), and for three
    independent choices of the F below 2**-72.

    Raises:
        Unfit: a box has another number of dimensions or reaches out of its tensor, or the boxes of
            a tensor leave something out, overlap or do not exist.
    """
    whole = Ragged.from_lists(shapes)
    num_dims = whole.lengths[boxes.tensor]
    for of_box in (boxes.offsets, boxes.sizes):
        _expect_none(
            of_box.lengths != num_dims, boxes.tensor, "a shard of another number of dimensions"
        )
    counts = np.ones(len(boxes.tensor), np.int64)
    excess = np.zeros((_NUM_MEASURES, len(shapes)), np.int64)
    for num in np.flatnonzero(np.bincount(whole.lengths)).tolist():
        numbers = np.flatnonzero(num_dims == num)
        tensor = boxes.tensor[numbers]
        start, sizes = (
            boxes.offsets.select_rows(numbers, num),
            boxes.sizes.select_rows(numbers, num),
        )
        shape = whole.select_rows(tensor, num)
        outside: _Flags = np.any((sizes > shape) | (start > shape - sizes), axis=1)
        _expect_none(outside, tensor, "a shard reaches out of the tensor")
        counts[numbers] = sizes.prod(axis=1)
        owners = np.flatnonzero(whole.lengths == num)
        _add_excess(excess, tensor, start, sizes, owners, whole.select_rows(owners, num))
    has_none: _Flags = np.bincount(boxes.tensor, minlength=len(shapes)) == 0
    wrong: _Flags = has_none | (excess % _PRIME).any(axis=0)
    _expect_none(wrong, np.arange(len(shapes)), "its shards do not tile it")
    return counts


def _add_excess(
    excess: Column, tensor: Column, start: Column, sizes: Column, owners: Column, shapes: Column
) -> None:
    """Add the measures of boxes, and subtract those of their whole tensors, `owners`."""
    measures = _measures(
        np.concatenate([start, np.zeros_like(shapes)]), np.concatenate([start + sizes, shapes])
    )
    for of_one, found in zip(excess, measures, strict=True):
        np.add.at(of_one, tensor, found[: len(tensor)])
        of_one[owners] -= found[len(tensor) :]


def _measures(start: Column, stop: Column) -> Column:
    """Compute random measures of boxes, a row for each measure, from rows of first and last."""
    found = np.ones((_NUM_MEASURES, len(start)), np.int64)
    generator = np.random.default_rng()  # seeded by the system: nobody can predict the numbers
    for low, high in zip(start.T, stop.T, strict=True):
        known = np.sort(np.concatenate([low, high]))
        known = known[np.diff(known, prepend=-1) != 0]
        drawn = generator.integers(_PRIME, size=(_NUM_MEASURES, len(known)))
        extent = drawn[:, np.searchsorted(known, high)] - drawn[:, np.searchsorted(known, low)]
        found = found * (extent % _PRIME) % _PRIME
    return found


def _expect_none(wrong: _Flags, of: Column, problem: str) -> None:
    if wrong.any():
        raise Unfit(int(of[np.argmax(wrong)]), problem)
