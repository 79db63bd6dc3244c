"""The plan of a sharded save: which rank writes which box, into which tensor file.

Integers in columns, a row a box; the same for every order of the rows. Knows nothing of tensors,
of messages between ranks or of bytes on disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from holdfast.errors import UnsupportedState
from holdfast.format.boxes import split_rows
from holdfast.format.layout import MAX_TENSOR_FILE_NBYTES, MAX_TENSORS_PER_FILE
from holdfast.state.shards import Box, box_at, box_of, corners, whole_box

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
_NUM_EXPLAINED = 10
SMALL_NBYTES = 64 << 10
"""Least bytes that any of several holders may write. Smaller boxes of the same holders are put
together to as many; the rest comes from the first holder."""
_BLOCK_ROWS = 1_000_000
"""Rows whose geometry is computed at once: bounds the memory for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafTable:
    """The leaves of a state, which all ranks number alike."""

    paths: Sequence[str]
    """Names for messages."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the global tensors."""
    item_nbytes: Ints
    """Bytes of an element of each leaf."""
    component: Ints
    """Number of the component of each leaf."""
    has_choice: Flags
    """Whether any rank that holds a copy of a box of the leaf may write it; else the first one
    does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxTable:
    """Boxes that ranks hold, those of one rank or of all, each as its two `corners`."""

    leaf: Ints
    """Number of the leaf."""
    rank: Ints
    first: Ints
    last: Ints

    @classmethod
    def from_boxes(
        cls, rank: int, shapes: Sequence[tuple[int, ...]], boxes: Sequence[Sequence[Box]]
    ) -> BoxTable:
        """Make the table of one rank from its boxes of each leaf."""
        counts = [len(of_leaf) for of_leaf in boxes]
        by_leaf = zip(shapes, boxes, strict=True)
        ends = [corners(shape, box) for shape, of_leaf in by_leaf for box in of_leaf]
        columns = np.array(ends, np.int64).reshape(-1, 2)
        return cls(
            leaf=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            rank=np.full(len(ends), rank, np.int32),
            first=columns[:, 0],
            last=columns[:, 1],
        )

    @classmethod
    def concatenate(cls, tables: Sequence[BoxTable]) -> BoxTable:
        """Put the rows of several tables one after the other."""
        return cls(
            leaf=np.concatenate([table.leaf for table in tables]),
            rank=np.concatenate([table.rank for table in tables]),
            first=np.concatenate([table.first for table in tables]),
            last=np.concatenate([table.last for table in tables]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """The boxes to be written, each once, in the order of leaf and position."""

    row: Ints
    """Row of the `BoxTable`: the copy of the rank that writes the box."""
    nbytes: Ints
    file: Ints
    """Number of the tensor file in the leaf's component; no two ranks have the same."""
    apart: Flags
    """Whether the box is in a file of small boxes."""
    box: Ints
    """Number of the distinct box in each row of the `BoxTable`."""
    copied: Flags
    """Whether several ranks hold the box, for each row of the `BoxTable`."""


def plan_writes(leaves: LeafTable, boxes: BoxTable, hosts: Ints) -> WritePlan:
    """Choose one writer for each distinct box, and number the tensor files of all writers.

    Bytes are balanced over hosts and over the ranks of each. A writer has consecutive numbers in a
    component: one file, or as many as its bytes need, and last one of the small boxes that more
    ranks hold than its other boxes: each of these ranks reads them when it resumes.

    Args:
        leaves: The leaves.
        boxes: The boxes of all ranks.
        hosts: Number of the host of each rank.
    """
    # 32 bits, here and below: 16 million rows are to be planned in a gigabyte.
    order = np.lexsort((boxes.rank, boxes.last, boxes.first, boxes.leaf)).astype(np.int32)
    begins = _first_copies(boxes, order)
    row, nbytes = _choose_copies(leaves, boxes, hosts, order, begins)
    counts = np.diff(begins, append=np.int32(len(order)))
    group = _group_by_writer(leaves, boxes, row, nbytes, counts)
    file = _number_files(leaves, boxes, row, nbytes, group)
    box, copied = np.empty(len(order), np.int32), np.empty(len(order), np.bool_)
    number = np.zeros(len(order), np.int32)
    number[begins[1:]] = 1
    np.cumsum(number, out=number)
    box[order], copied[order] = number, (counts > 1)[number]
    apart = group % 2 == 1
    return WritePlan(row=row, nbytes=nbytes, file=file, apart=apart, box=box, copied=copied)


def _choose_copies(
    leaves: LeafTable, boxes: BoxTable, hosts: Ints, order: Ints, begins: Ints
) -> tuple[Ints, Ints]:
    """Choose the copy of each distinct box that is written: its row and its bytes.

    Boxes with few holders come first, so that those with many fill what the others leave.

    Args:
        leaves: The leaves.
        boxes: The boxes of all ranks.
        hosts: Number of the host of each rank.
        order: The rows, sorted so that copies of a box come together.
        begins: Where in `order` each distinct box begins.
    """
    row = order[begins]
    nbytes = _measure(leaves, boxes, row)
    counts = np.diff(begins, append=np.int32(len(order)))
    loads = _Loads(hosts)
    has_choice = (counts > 1) & leaves.has_choice[boxes.leaf[row]]
    for part in split_rows(len(row), _BLOCK_ROWS):
        loads.add_all(boxes.rank[row[part]], np.where(has_choice[part], 0, nbytes[part]))
    for num_copies in np.unique(counts[has_choice]).tolist():
        numbers = np.flatnonzero(has_choice & (counts == num_copies)).astype(np.int32)
        numbers = numbers[np.argsort(-nbytes[numbers], kind="stable")]
        copies = order[begins[numbers, None] + np.arange(num_copies, dtype=np.int32)]
        holders = boxes.rank[copies]
        for some in _alike(holders):
            bundle, sizes, rest = _bundle(nbytes[numbers[some]])
            loads.add_nbytes(int(holders[some[0], 0]), rest)
            places = np.array([*loads.spread(holders[some[0]].tolist(), sizes), 0])
            row[numbers[some]] = copies[some, places[bundle]]
    return row, nbytes


def _bundle(nbytes: Ints) -> tuple[Ints, list[int], int]:
    """Put small boxes together, as their sizes fall.

    Returns the bundle of each box, the sizes of the bundles, and that of the last one if it is too
    small to be counted.
    """
    num_large = int(np.searchsorted(-nbytes, -SMALL_NBYTES, side="right"))
    small = nbytes[num_large:]
    bundle = np.arange(len(nbytes))
    bundle[num_large:] = num_large + (np.cumsum(small) - small) // max(SMALL_NBYTES, 1)
    sizes = np.bincount(bundle, nbytes).astype(np.int64).tolist()
    rest = sizes.pop() if sizes and sizes[-1] < SMALL_NBYTES else 0
    return bundle, sizes, rest


def _first_copies(boxes: BoxTable, order: Ints) -> Ints:
    """Find where in the sorted rows each distinct box begins."""
    is_first = np.zeros(len(order), np.bool_)
    is_first[:1] = True
    for column in (boxes.leaf, boxes.first, boxes.last):
        in_order = column[order]
        is_first[1:] |= in_order[1:] != in_order[:-1]
    return np.flatnonzero(is_first).astype(np.int32)


def _measure(leaves: LeafTable, boxes: BoxTable, rows: Ints) -> Ints:
    """Compute bytes of distinct boxes, sorted by leaf, whose boxes must tile it as a grid."""
    extents, strides = _grids(leaves.shapes)
    nbytes = np.empty(len(rows), np.int64)
    wrong: list[int] = []
    for some, part in _cut_leaf_blocks(boxes.leaf[rows], len(leaves.shapes)):
        leaf = boxes.leaf[rows[part]]
        first, last = boxes.first[rows[part]], boxes.last[rows[part]]
        nbytes[part] = np.where(first <= last, leaves.item_nbytes[leaf], 0)
        num_cells = np.ones(len(some), np.int64)
        for dim in range(extents.shape[1]):
            extent, stride = extents[leaf, dim], strides[leaf, dim]
            start, end = first // stride, np.maximum(last, 0) // stride
            if dim:  # else a box beyond the end would not be noticed
                start, end = start % extent, end % extent
            nbytes[part] *= end - start + 1
            num_cells *= _count_intervals(leaf - some.start, start, end + 1, extent, len(some))
        found = np.bincount(leaf - some.start, minlength=len(some))
        wrong += (np.flatnonzero(found != num_cells) + some.start).tolist()
    if wrong:
        raise _not_tiled(leaves, boxes, rows, wrong)
    return nbytes


def text_nbytes(leaves: LeafTable, boxes: BoxTable, plan: WritePlan) -> int:
    """Compute about how many bytes the written boxes take in the text of an index."""
    extents, strides = _grids(leaves.shapes)
    num_dims = np.array([*map(len, leaves.shapes)], np.int64)
    total = 0
    for part in split_rows(len(plan.row), _BLOCK_ROWS):
        row = plan.row[part]
        leaf, first, last = boxes.leaf[row], boxes.first[row], np.maximum(boxes.last[row], 0)
        # Signs of tensor, file, start and both lists; starts have up to 10 digits.
        total += int((_num_digits(leaf) + _num_digits(plan.file[part]) + 17).sum())
        for dim in range(extents.shape[1]):
            has_dim = num_dims[leaf] > dim
            start, end = (
                corner[has_dim] // strides[leaf[has_dim], dim] % extents[leaf[has_dim], dim]
                for corner in (first, last)
            )
            total += int((_num_digits(start) + _num_digits(end - start + 1) + 2).sum())
    return total


def _num_digits(numbers: Ints) -> Ints:
    return np.searchsorted(10 ** np.arange(1, 19), numbers, side="right") + 1


def _grids(shapes: Sequence[tuple[int, ...]]) -> tuple[Ints, Ints]:
    """Make tables of leaves' extents and strides, padded; a leaf without elements has one."""
    extents = np.ones((len(shapes), max([1, *map(len, shapes)])), np.int64)
    for row, shape in zip(extents, shapes, strict=True):
        row[: len(shape)] = shape if 0 not in shape else 1
    strides = np.ones_like(extents)
    for dim in reversed(range(extents.shape[1] - 1)):
        strides[:, dim] = strides[:, dim + 1] * extents[:, dim + 1]
    return extents, strides


def _cut_leaf_blocks(leaf: Ints, num_leaves: int) -> Iterator[tuple[range, slice]]:
    """Cut sorted rows into blocks of whole leaves: the leaves and the rows of each."""
    stops = np.cumsum(np.bincount(leaf, minlength=num_leaves))
    begin, row = 0, 0
    while begin < num_leaves:
        end = max(begin + 1, int(np.searchsorted(stops, row + _BLOCK_ROWS, side="right")))
        yield range(begin, end), slice(row, int(stops[end - 1]))
        begin, row = end, int(stops[end - 1])


def _count_intervals(leaf: Ints, start: Ints, stop: Ints, extent: Ints, num_leaves: int) -> Ints:
    """Count the intervals into which boxes cut a dimension, by leaf; 0 if they do not tile it."""
    counts = np.ones(num_leaves, np.int64)
    counts[leaf[(start != 0) | (stop != extent)]] = 0
    is_cut = counts[leaf] == 0
    leaf, start, stop, extent = leaf[is_cut], start[is_cut], stop[is_cut], extent[is_cut]
    order = np.lexsort((stop, start, leaf))
    leaf, start, stop, extent = leaf[order], start[order], stop[order], extent[order]
    opens = np.diff(leaf, prepend=-1) != 0
    is_new = opens | (np.diff(start, prepend=-1) != 0) | (np.diff(stop, prepend=-1) != 0)
    leaf, start, stop, extent = leaf[is_new], start[is_new], stop[is_new], extent[is_new]
    opens = opens[is_new]
    closes = np.roll(opens, -1)
    before = np.where(opens, 0, np.roll(stop, 1))
    is_wrong = (start != before) | (stop <= start) | (closes & (stop != extent))
    counts += np.bincount(leaf, minlength=num_leaves)
    counts[leaf[is_wrong]] = 0
    return counts


def _not_tiled(
    leaves: LeafTable, boxes: BoxTable, rows: Ints, wrong: Sequence[int]
) -> UnsupportedState:
    reasons = ["its boxes do not tile it"] * len(wrong)
    leaf = boxes.leaf[rows]
    for number, at in enumerate(wrong[:_NUM_EXPLAINED]):
        shape, of_leaf = leaves.shapes[at], rows[leaf == at]
        ends = zip(boxes.first[of_leaf].tolist(), boxes.last[of_leaf].tolist(), strict=True)
        reasons[number] = _explain(shape, [box_at(shape, *of_box) for of_box in ends])
    return UnsupportedState([*zip((leaves.paths[at] for at in wrong), reasons, strict=True)])


def _explain(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Explain why boxes do not tile a shape, by a box that overlaps or one that is missing."""
    if not boxes:
        return _describe_box("no rank holds the box", whole_box(shape))
    sides = []
    for dim, extent in enumerate(shape):
        held = {(box.offsets[dim], box.offsets[dim] + box.sizes[dim]): box for box in boxes}
        covered = 0
        for start, stop in [*sorted(held), (extent, extent + 1)]:
            if start > covered:
                hole = [(0, whole) for whole in shape]
                hole[dim] = (covered, start)
                return _describe_box("no rank holds the box", box_of(hole))
            if (start, stop) in held and not covered <= start < stop <= extent:
                return _describe_box(
                    "it has an empty, overlapping or too large box", held[start, stop]
                )
            covered = stop
        sides.append(sorted(held))
    known = set(boxes)
    missing = (box for box in map(box_of, product(*sides)) if box not in known)
    return _describe_box("no rank holds the box", next(missing))


def _describe_box(what: str, box: Box) -> str:
    return f"{what} with offsets {box.offsets} and sizes {box.sizes}"


def _alike(rows: Ints) -> Iterator[Ints]:
    """Group the numbers of equal rows of a matrix, in the order of the rows."""
    big = np.ascontiguousarray(rows, ">i4")
    whole = big.view(f"V{big.strides[0]}")[:, 0]
    order = np.argsort(whole, kind="stable")
    yield from np.split(order, np.flatnonzero(whole[order[1:]] != whole[order[:-1]]) + 1)


class _Loads:
    """Bytes that each rank and each host writes."""

    def __init__(self, hosts: Ints) -> None:
        self._hosts = hosts.tolist()
        self._of_rank = [0] * len(hosts)
        self._of_host = [0] * (max(self._hosts, default=0) + 1)
        self._num_ranks = np.bincount(hosts).tolist()

    def add_all(self, ranks: Ints, sizes: Ints) -> None:
        """Add boxes without a choice."""
        for rank, nbytes in enumerate(np.bincount(ranks, sizes, len(self._hosts)).tolist()):
            self.add_nbytes(rank, int(nbytes))

    def spread(self, ranks: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Give each box to the rank with the least to write: its position in `ranks`."""
        heap = [(*self._compute_load(rank), place) for place, rank in enumerate(ranks)]
        heapq.heapify(heap)
        chosen = []
        for size in sizes:
            place = self._least(heap, ranks)
            self.add_nbytes(ranks[place], size)
            chosen.append(place)
        return chosen

    def _least(self, heap: list[tuple[int, int, int]], ranks: Sequence[int]) -> int:
        # Loads only grow, so an entry that is still true is the least of all.
        while heap[0] != (now := (*self._compute_load(ranks[heap[0][2]]), heap[0][2])):
            heapq.heapreplace(heap, now)
        return heap[0][2]

    def _compute_load(self, rank: int) -> tuple[int, int]:
        """Bytes of the host for each of its ranks, then those of the rank."""
        host = self._hosts[rank]
        return self._of_host[host] // self._num_ranks[host], self._of_rank[rank]

    def add_nbytes(self, rank: int, nbytes: int) -> None:
        """Add to what a rank writes."""
        self._of_rank[rank] += nbytes
        self._of_host[self._hosts[rank]] += nbytes


def _group_by_writer(
    leaves: LeafTable, boxes: BoxTable, row: Ints, nbytes: Ints, counts: Ints
) -> Ints:
    """Number the writers of each component by twos: odd for small boxes that lie apart."""
    group = leaves.component.astype(np.int32)[boxes.leaf[row]]
    group *= int(boxes.rank.max(initial=0)) + 1
    group += boxes.rank[row]
    least = np.full(int(group.max(initial=0)) + 1, np.iinfo(counts.dtype).max, counts.dtype)
    np.minimum.at(least, group, counts)
    apart = (nbytes < SMALL_NBYTES) & (counts > least[group])
    group *= 2
    group += apart
    return group


def _number_files(leaves: LeafTable, boxes: BoxTable, row: Ints, nbytes: Ints, group: Ints) -> Ints:
    """Number each component's files by group; long elements first, as `lay_out` does.

    Otherwise boxes come in the order of the rows, which is that of their writer.
    """
    order = np.lexsort((row, -leaves.item_nbytes[boxes.leaf[row]], group))
    ends = np.flatnonzero(np.diff(group[order])) + 1
    file = np.empty(len(row), np.int32)
    number, of_component = 0, -1
    for some in np.split(order, ends) if len(order) else ():
        component = int(leaves.component[boxes.leaf[row[some[0]]]])
        if component != of_component:
            number, of_component = 0, component
        for part in _cut_into_files(nbytes[some]):
            file[some[part]] = number
            number += 1
    return file


def _cut_into_files(nbytes: Ints) -> Iterator[slice]:
    """Cut the boxes of a writer into runs that fit one file by bytes and by number."""
    stops = np.cumsum(nbytes)
    begin = 0
    while begin < len(nbytes):
        most = stops[begin] - nbytes[begin] + MAX_TENSOR_FILE_NBYTES
        end = min(int(np.searchsorted(stops, most, side="right")), begin + MAX_TENSORS_PER_FILE)
        yield slice(begin, max(begin + 1, end))
        begin = max(begin + 1, end)
