"""Reads strided tensors as row-major bytes, any part of them and in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from holdfast.interop.pickles.parts import row_major

ReadInto: TypeAlias = Callable[[int, memoryview], None]
"""Fills memory with bytes of the storage, from a position on."""

SPAN_NBYTES = 16 << 20
"""Most bytes of the storage that are read at once."""
READ_NBYTES = 16 << 10
"""Bytes that are read in the time that one more read takes."""
PIECE_NBYTES = 8 << 20
"""Most bytes that are gathered at once."""
_KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


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
    """Fill `memory` with row-major bytes of a strided tensor from its byte `start` on.

    `offset` and `strides` are in elements of the storage. The range need not begin or end with
    an element.
    """
    for begin in range(0, memory.nbytes, PIECE_NBYTES):
        part = memory.cast("B")[begin : begin + PIECE_NBYTES]
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
    for firsts, sizes in boxes(shape, low, high):
        count = math.prod(sizes)
        first = offset + sum(at * stride for at, stride in zip(firsts, strides, strict=True))
        _gather_elements(read_into, flat[done : done + count].reshape(sizes), first, strides)
        done += count
    if not exact:
        begin = start - low * item_nbytes
        memory[:] = target[begin : begin + memory.nbytes]


def boxes(
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
        for firsts, sizes in boxes(shape[1:], low % row, low % row + high - low):
            yield (first, *firsts), (1, *sizes)
        return
    if low % row:
        yield from boxes(shape, low, (first + 1) * row)
        yield from boxes(shape, (first + 1) * row, high)
        return
    whole = high // row
    yield (first, *[0] * (len(shape) - 1)), (whole - first, *shape[1:])
    yield from boxes(shape, whole * row, high)


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
        target[...] = np.lib.stride_tricks.as_strided(span, sizes, steps)
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
