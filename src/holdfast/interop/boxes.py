"""Ranges of row-major tensors as boxes: in tensors stored as boxes, and in strided memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.format.boxes import Column

_VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""By the bytes of an element, a type that numpy copies bit by bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBox:
    """Elements that a range of a tensor and a stored box share: a box, measured in elements."""

    shard: int
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
    """Yield the parts of stored boxes with elements [start, stop) of a tensor, see `boxes_of`."""
    shape = tuple(shape) or (1,)
    strides = row_major(shape)
    for low, extent in range_boxes(shape, start, stop):
        first = np.maximum(boxes[:, 0], low)
        last = np.minimum(boxes[:, 1], np.add(low, extent))
        for number in np.flatnonzero((first < last).all(axis=1)).tolist():
            sizes = last[number] - first[number]
            own = row_major((boxes[number, 1] - boxes[number, 0]).tolist())
            yield SharedBox(
                shard=int(shards[number]),
                first=int(((first[number] - boxes[number, 0]) * own).sum()),
                length=int(((sizes - 1) * own).sum()) + 1,
                at=int((first[number] * strides).sum()) - start,
                sizes=tuple(sizes.tolist()),
                from_strides=own,
                to_strides=strides,
            )


ReadInto: TypeAlias = Callable[[int, memoryview], None]
"""Fills memory with bytes of the storage, from a position on."""

SPAN_NBYTES = 16 << 20
"""Most bytes of the storage that are read at once."""
READ_NBYTES = 16 << 10
"""Bytes that are read in the time that one more read takes."""
PIECE_NBYTES = 8 << 20
"""Most bytes that are gathered at once."""
_KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def row_major(shape: Sequence[int], *, is_fortran: bool = False) -> tuple[int, ...]:
    """Strides in elements of a dense array, row-major or the reverse."""
    strides, step = [], 1
    for size in shape if is_fortran else reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(strides if is_fortran else reversed(strides))


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements lie one behind the other, in the order of the tensor."""
    dense = zip(shape, strides, row_major(shape), strict=True)
    return all(size == 1 or stride == plain for size, stride, plain in dense)


def gather_strided(
    read_into: ReadInto,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    offset: int,
    item_nbytes: int,
    start: int,
    memory: memoryview,
) -> None:
    """Fill `memory` with row-major bytes of a tensor from any byte on; strides are in elements."""
    memory = memory.cast("B")
    if is_row_major(shape, strides):
        read_into(offset * item_nbytes + start, memory)
        return
    for begin in range(0, memory.nbytes, PIECE_NBYTES):
        part = memory[begin : begin + PIECE_NBYTES]
        _gather_items(read_into, shape, strides, offset, item_nbytes, start + begin, part)


def _gather_items(
    read_into: ReadInto,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    item_nbytes: int,
    start: int,
    memory: memoryview,
) -> None:
    low = start // item_nbytes
    high = -(-(start + memory.nbytes) // item_nbytes)
    exact = low * item_nbytes == start and (high - low) * item_nbytes == memory.nbytes
    target = memory if exact else memoryview(bytearray((high - low) * item_nbytes))
    dtype = np.dtype(_KINDS.get(item_nbytes, f"V{item_nbytes}"))
    flat = np.frombuffer(target, dtype)
    done = 0
    for firsts, sizes in range_boxes(shape, low, high):
        count = math.prod(sizes)
        first = offset + sum(at * stride for at, stride in zip(firsts, strides, strict=True))
        _gather_elements(read_into, flat[done : done + count].reshape(sizes), first, strides)
        done += count
    if not exact:
        begin = start - low * item_nbytes
        memory[:] = target[begin : begin + memory.nbytes]


def range_boxes(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a range of row-major elements into boxes (first position, sizes), in order."""
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if first == last and (low % row or high - low < row):
        for firsts, sizes in range_boxes(shape[1:], low % row, low % row + high - low):
            yield (first, *firsts), (1, *sizes)
        return
    if low % row:
        yield from range_boxes(shape, low, (first + 1) * row)
        yield from range_boxes(shape, (first + 1) * row, high)
        return
    whole = high // row
    yield (first, *[0] * (len(shape) - 1)), (whole - first, *shape[1:])
    yield from range_boxes(shape, whole * row, high)


def _gather_elements(
    read_into: ReadInto, target: np.ndarray[Any, Any], first: int, strides: tuple[int, ...]
) -> None:
    """Fill an array from the storage's element `first` on, with few reads."""
    item_nbytes, sizes = target.dtype.itemsize, target.shape
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    widest = max(range(len(sizes)), key=lambda dim: (sizes[dim] > 1, strides[dim]), default=0)
    is_near = reach <= 4 * target.size or reach * item_nbytes <= READ_NBYTES * sizes[widest]
    if is_near and reach * item_nbytes <= SPAN_NBYTES:
        span = np.empty(reach, target.dtype)
        read_into(first * item_nbytes, span.view(np.uint8).data)
        steps = [stride * item_nbytes for stride in strides]
        target[...] = as_strided(span, sizes, steps)
        return
    block = 1
    if is_near:
        block = SPAN_NBYTES // (max(strides[widest], 1) * item_nbytes)
        block = max(1, min(block, sizes[widest] // 2))
    for at in range(0, sizes[widest], block):
        part = target[(slice(None),) * widest + (slice(at, at + block),)]
        if block == 1:  # without this dimension
            rest = strides[:widest] + strides[widest + 1 :]
            _gather_elements(read_into, part.squeeze(widest), first + at * strides[widest], rest)
        else:
            _gather_elements(read_into, part, first + at * strides[widest], strides)
