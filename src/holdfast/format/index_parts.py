"""An index in parts: the root document, and parts that are read when they are needed.

The root has the grid of boxes of each tensor, and the file of each box. A part has the digests of
the files of some writers. Where a box begins in its file follows from the root
(docs/format.md, section 5).
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from typing_extensions import override

from holdfast.errors import FormatError, LimitExceeded, UsageError
from holdfast.format import layout
from holdfast.format.boxes import Boxes, Column, Ragged, split_rows
from holdfast.format.index import (
    MAX_INDEX_VALUES,
    Count,
    Index,
    IndexDocument,
    Places,
    Shape,
    StoredBlocks,
    StoredColumns,
    TensorTable,
    check_file_lists,
    check_places,
    decode_blocks,
    decode_document,
    decode_index,
    decode_specs,
    decode_stored,
    encode_document,
    estimate_nbytes,
)
from holdfast.format.index import files_of_index as files_of_document
from holdfast.format.layout import BLOCK_NBYTES, DATA_ALIGNMENT, FORMAT_VERSION, MAX_INDEX_NBYTES
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    FileEntry,
    check_block_nbytes,
)
from holdfast.format.strictjson import PARTS, describe_once
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.store.base import Buffer

MAX_FILES = 4096
MAX_BOXES = 1_000_000
"""Most tensor files and boxes of an index that is one document."""
PART_WRITERS = 256
PART_NBYTES = 32 << 20
"""Most writers of a part, and bytes of its digests from which it takes no further writer."""
MAX_PART_BOXES = 1 << 20
MAX_ALL_BOXES = 1 << 26
"""Most boxes of a part and of a checkpoint: a short root may describe any number."""

_ENTRY_NBYTES, _STORED_NBYTES, _SEALED_NBYTES = 200, 170, 150
"""About the bytes of a file in a manifest, with its name in the list of the component; more if it
is compressed; and more, in the inner and in the visible list, if the checkpoint is encrypted."""
_CUT_NBYTES, _FILE_NBYTES = 12, 6
"""About the bytes of a box in a cut and of a file in a grid, of which each distinct one counts."""
_MAX_SUM = 2.0**62
_ADVICE = (
    "Nothing was written. Shard each tensor over fewer ranks, as HSDP does, or join small tensors"
)
T = TypeVar("T")
IntColumn: TypeAlias = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
ReadDocument: TypeAlias = Callable[[str], Buffer]
"""Function that returns a file of the checkpoint by name, checked against the manifest."""


class _Grid(msgspec.Struct):
    """Distinct boxes and files of a tensor."""

    cuts: Shape
    """Number of the cut of each dimension; limited, as their product is computed."""
    files: list[Count]
    """Number of the file of each box, the boxes in row-major order."""


class _Component(msgspec.Struct):
    files: list[str]
    parts: list[Count]
    """Number of files up to the end of each part."""
    names: list[str]
    dtypes: list[str]
    shapes: list[Shape]
    grids: list[Count]


class _Root(IndexDocument, omit_defaults=True):
    requires: list[str]
    block_nbytes: int
    blocks: dict[str, str]
    cuts: list[list[Count]]
    """Places at which a dimension is cut."""
    grids: list[_Grid]
    components: dict[str, _Component]
    stored: dict[str, StoredColumns] = msgspec.field(default_factory=dict)


class _PartDocument(IndexDocument, omit_defaults=True):
    part: int
    blocks: dict[str, str]
    starts: dict[str, list[Count]] = msgspec.field(default_factory=dict)
    """First byte of each box of a file in which this does not follow from the root."""
    stored: dict[str, StoredColumns] = msgspec.field(default_factory=dict)


def needs_parts(num_files: int, num_boxes: int) -> bool:
    """Whether an index of so many tensor files and boxes is in parts."""
    return num_files > MAX_FILES or num_boxes > MAX_BOXES


def check_size(
    specs: Sequence[TensorSpec],
    tensor: IntColumn,
    corners: Sequence[IntColumn],
    file: IntColumn,
    *,
    num_files: int,
    num_of_writer: int,
) -> None:
    """Raise `LimitExceeded` if an index in parts will be too large, before it exists.

    Args:
        specs: All tensors.
        tensor: Number of the tensor of each box, ascending.
        corners: Positions of the first and of the last element of each box.
        file: Number of the file of each box in its component.
        num_files: Number of the tensor files of all components.
        num_of_writer: Most boxes of one writer.
    """
    nbytes = sum(map(estimate_nbytes, specs)) + _ENTRY_NBYTES * num_files
    num_values = 4 * num_files + sum(5 + len(spec.shape) for spec in specs)
    known: set[int] = set()
    ends = np.searchsorted(tensor, np.arange(len(specs) + 1)).tolist()
    for first, stop in pairwise(ends):
        cuts = b"".join(one[first:stop].tobytes() for one in corners)
        for column, width in (
            (cuts, _CUT_NBYTES),
            (cuts + file[first:stop].tobytes(), _FILE_NBYTES),
        ):
            if (key := hash(column)) not in known:
                known.add(key)
                nbytes += width * (stop - first)
                num_values += stop - first
    if (
        len(tensor) > MAX_ALL_BOXES
        or num_of_writer > MAX_PART_BOXES
        or nbytes > MAX_INDEX_NBYTES
        or num_values > MAX_INDEX_VALUES
    ):
        raise LimitExceeded(
            f"{len(specs):,} tensors in {len(tensor):,} boxes, {num_of_writer:,} of one rank: at "
            f"most {MAX_ALL_BOXES:,} and {MAX_PART_BOXES:,} are accepted. Their index takes "
            f"{num_values:,} values and about {nbytes:,} bytes; at most {MAX_INDEX_VALUES:,} and "
            f"{MAX_INDEX_NBYTES:,} are accepted. {_ADVICE}"
        )


def check_num_files(num_files: int, *, is_compressed: bool, is_encrypted: bool) -> None:
    """Raise `LimitExceeded` if a manifest of so many tensor files will be too large."""
    of_file = _ENTRY_NBYTES + is_compressed * _STORED_NBYTES
    if is_encrypted:
        of_file = (of_file + _SEALED_NBYTES) * 4 // 3 + _SEALED_NBYTES
    if num_files * of_file > MAX_MANIFEST_NBYTES:
        kind = f"{'compressed and ' * is_compressed}encrypted" if is_encrypted else "compressed"
        how = f", {kind}" if is_compressed or is_encrypted else ""
        raise LimitExceeded(
            f"{num_files:,} tensor files{how}: their manifest takes about {num_files * of_file:,} "
            f"bytes; at most {MAX_MANIFEST_NBYTES:,} are accepted. {_ADVICE}"
        )


def open_index(
    data: Buffer, read: ReadDocument, *, files: Mapping[str, FileEntry], what: str
) -> Index:
    """Decode the index in `data`, and check it against the manifest's `files`.

    Parts are read as digests and places of their files are asked for.
    """
    if layout.part_name(1) not in files:
        return decode_index(data, files=files, what=what)
    root = decode_document(data, _Root, what=what)
    if PARTS not in root.requires:
        raise FormatError(f"{what}: is not in parts, and the manifest lists parts")
    check_block_nbytes(root.block_nbytes, what=what)
    lists = {name: component.files for name, component in root.components.items()}
    check_file_lists(lists, files, what=what)
    of_tensors = {name for of_component in lists.values() for name in of_component}
    others = {
        name: entry
        for name, entry in files.items()
        if name not in of_tensors and not layout.is_index_name(name)
    }
    parts = IndexParts(root, files, read, what=what)
    size = root.block_nbytes
    return Index(
        blocks=_Blocks(decode_blocks(root.blocks, others, size, what=what), parts),
        components=parts.tables,
        block_nbytes=size,
        stored=_Stored(decode_stored(root.stored, others, size, what=what), parts),
    )


def files_of_index(data: Buffer, *, what: str) -> tuple[str, ...]:
    """List the files of a checkpoint but its index, by that index alone."""
    try:
        with describe_once(_Requires):
            requires = msgspec.json.decode(bytes(data), type=_Requires).requires
    except (msgspec.MsgspecError, ValueError, RecursionError):
        requires = []
    if PARTS not in requires:
        return files_of_document(data, what=what)
    root = decode_document(data, _Root, what=what)
    num_parts = max((len(of_one.parts) for of_one in root.components.values()), default=0)
    of_tensors = (name for of_one in root.components.values() for name in of_one.files)
    return (*root.blocks, *of_tensors, *map(layout.part_name, range(1, num_parts + 1)))


class _Requires(msgspec.Struct):
    requires: list[str] = []


class _OfFiles(Mapping[str, T]):
    """Digests by file: those of trees are in the root, those of tensor files in their part."""

    def __init__(self, of_root: Mapping[str, T], parts: IndexParts) -> None:
        self._of_root = of_root
        self._parts = parts

    def __getitem__(self, file: str) -> T:
        if file in self._of_root:
            return self._of_root[file]
        return self._select(self._parts.part_of(file))[file]

    def __iter__(self) -> Iterator[str]:
        yield from self._of_root
        for number in self._parts.numbers:
            yield from self._select(self._parts.get_part(number))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @abstractmethod
    def _select(self, part: _Part) -> Mapping[str, T]:
        """Return the digests of the files of a part."""


class _Blocks(_OfFiles[bytes]):
    @override
    def _select(self, part: _Part) -> Mapping[str, bytes]:
        return part.blocks


class _Stored(_OfFiles[StoredBlocks]):
    @override
    def _select(self, part: _Part) -> Mapping[str, StoredBlocks]:
        return part.stored


class _Part:
    """A part that was read: digests and stored blocks of its files."""

    def __init__(
        self, document: _PartDocument, files: Mapping[str, FileEntry], size: int, *, what: str
    ) -> None:
        self.blocks = decode_blocks(document.blocks, files, size, what=what)
        self.stored = decode_stored(document.stored, files, size, what=what)
        if odd := sorted(document.starts.keys() - files.keys()):
            raise FormatError(f"{what}: `starts` of {odd[0][:200]!r}, which is not in this part")
        self.starts = document.starts
        self.what = what
        self.places: dict[str, _PartPlaces] = {}
        """By component."""


class _PartPlaces(msgspec.Struct, frozen=True):
    """Boxes of one component in a part, sorted by number."""

    numbers: Column
    file: Column
    start: Column
    nbytes: Column


class IndexParts:
    """The parts of an index, each read once, when it is needed. Thread-safe."""

    def __init__(
        self,
        root: _Root,
        files: Mapping[str, FileEntry],
        read: ReadDocument,
        *,
        what: str,
    ) -> None:
        """Check the root against the manifest's `files`."""
        self._files, self._read, self._what = files, read, what
        self._block_nbytes = root.block_nbytes
        num_parts = sum(layout.parse_part(name) is not None for name in files)
        self.numbers = range(1, num_parts + 1)
        grids = _Grids(root, what=what)
        self.tables: dict[str, PartedTable] = {}
        self._part_of: dict[str, int] = {}
        for name, component in root.components.items():
            where = f"{what}, component {name!r}"
            self.tables[name] = PartedTable.decode(name, component, grids, self, what=where)
            begin = 0
            for number, end in enumerate(component.parts, 1):
                self._part_of |= dict.fromkeys(component.files[begin:end], number)
                begin = end
        # Before any column over boxes is made: a grid of n boxes for each of n tensors takes only
        # 2 n numbers here.
        counts = np.zeros(num_parts, np.int64)
        for table in self.tables.values():
            counts += table.count_boxes()
        if counts.max() > MAX_PART_BOXES or counts.sum() > MAX_ALL_BOXES:
            raise LimitExceeded(
                f"{what}: {counts.sum():,} boxes, {counts.max():,} in one part; at most "
                f"{MAX_ALL_BOXES:,} and {MAX_PART_BOXES:,} are accepted"
            )
        self._parts: dict[int, _Part] = {}
        self._lock = threading.RLock()

    def lengths_of(self, names: Sequence[str]) -> Column:
        """Return the lengths of files."""
        return np.array([self._files[name].nbytes for name in names], np.int64)

    def part_of(self, file: str) -> _Part:
        """Return the part with a tensor file; `KeyError` if the checkpoint has no such file."""
        return self.get_part(self._part_of[file])

    def get_part(self, number: int) -> _Part:
        """Return a part, read now if it was not read before."""
        with self._lock:
            if number not in self._parts:
                self._parts[number] = self._read_part(number)
            return self._parts[number]

    def places(self, number: int, table: PartedTable) -> _PartPlaces:
        """Return the boxes of a component in a part."""
        with self._lock:
            part = self.get_part(number)
            if table.component not in part.places:
                found = table.place_boxes(number, part.starts, what=part.what)
                part.places[table.component] = found
            return part.places[table.component]

    def _read_part(self, number: int) -> _Part:
        name = layout.part_name(number)
        what = f"{self._what.removesuffix(layout.INDEX)}{name}"
        document = decode_document(self._read(name), _PartDocument, what=what)
        if document.part != number:
            raise FormatError(f"{what}: it is part {document.part}")
        of_part = [file for file, part in self._part_of.items() if part == number]
        files = {file: self._files[file] for file in of_part}
        return _Part(document, files, self._block_nbytes, what=what)


class _Grids:
    """Distinct grids as columns."""

    def __init__(self, root: _Root, *, what: str) -> None:
        for cut in root.cuts:
            if any(one >= other for one, other in zip([0, *cut], cut, strict=False)):
                raise FormatError(f"{what}: a cut is not in ascending order from 1")
        for grid in root.grids:
            if any(cut >= len(root.cuts) for cut in grid.cuts):
                raise FormatError(f"{what}: a cut that does not exist")
            if math.prod(len(root.cuts[cut]) + 1 for cut in grid.cuts) != len(grid.files):
                raise FormatError(f"{what}: a grid has different numbers of files and boxes")
        self.begins = Ragged.from_lists([[0, *cut] for cut in root.cuts])
        """First element of each interval of each cut."""
        self.cuts = Ragged.from_lists([grid.cuts for grid in root.grids])
        self.files = Ragged.from_lists([grid.files for grid in root.grids])


class PartedTable(TensorTable):
    """Tensors of one component of an index in parts; places of boxes are read with their parts.

    The shards of a tensor are numbered in row-major order.
    """

    def __init__(
        self,
        component: str,
        specs: Mapping[str, TensorSpec],
        *,
        files: Sequence[str],
        lengths: Column,
        ends: Column,
        grid: Column,
        grids: _Grids,
        parts: IndexParts | None,
    ) -> None:
        self.component = component
        self.specs = specs
        self._files, self._lengths, self._ends = files, lengths, ends
        self._grid, self._grids = grid, grids
        self._parts = parts
        self._shapes = Ragged.from_lists([spec.shape for spec in specs.values()])
        self._item_nbytes = np.array([ITEM_NBYTES[spec.dtype] for spec in specs.values()], np.int64)
        first = self._grids.files.first
        self._num_cells = first[grid + 1] - first[grid]
        self.num_boxes = int(self._num_cells.sum())
        """Number of the boxes of all tensors."""

    @classmethod
    def decode(
        cls, name: str, found: _Component, grids: _Grids, parts: IndexParts, *, what: str
    ) -> PartedTable:
        """Check a component of the root; `parts` are those of its index."""
        specs, _ = decode_specs(found.names, found.dtypes, found.shapes, what=what)
        if len(found.grids) != len(specs):
            raise FormatError(f"{what}: `names` and `grids` differ in length")
        if max(found.grids, default=-1) >= len(grids.files.first) - 1:
            raise FormatError(f"{what}: a grid that does not exist")
        ends = found.parts
        if len(ends) != len(parts.numbers) or sorted(ends) != ends or ends[-1] != len(found.files):
            raise FormatError(f"{what}: `parts` does not divide its files among the parts")
        grid = np.array(found.grids, np.int64)
        table = cls(
            name,
            specs,
            files=found.files,
            lengths=parts.lengths_of(found.files),
            ends=np.array(ends, np.int64),
            grid=grid,
            grids=grids,
            parts=parts,
        )
        table.check_grids(what=what)
        return table

    def check_grids(self, *, what: str) -> None:
        """Raise `FormatError` unless the grid of each tensor fits its shape and names its files."""
        grid, cuts, files = self._grid, self._grids.cuts, self._grids.files
        num_dims = np.diff(self._shapes.first)
        wrong = cuts.first[grid + 1] - cuts.first[grid] != num_dims
        self._expect_none(wrong, f"{what}: a grid with a different number of dimensions")
        begins, of_dims = self._grids.begins, cuts.select_ragged(grid).values
        last = begins.values[begins.first[of_dims + 1] - 1]
        tensor = np.repeat(np.arange(len(grid)), num_dims)
        is_beyond = (last > 0) & (last >= self._shapes.values)
        wrong = np.bincount(tensor[is_beyond], minlength=len(grid)) > 0
        self._expect_none(wrong, f"{what}: a cut outside of the tensor")
        if len(grid):
            most = np.maximum.reduceat(files.values, files.first[:-1])
            wrong = most[grid] >= len(self._files)
            self._expect_none(wrong, f"{what}: a shard in a file that does not exist")

    def count_boxes(self) -> Column:
        """Return the number of boxes in the files of each part."""
        files, num_users = self._grids.files, np.diff(self._tensors_of_grids.first)
        part = np.searchsorted(self._ends, files.values, side="right")
        users = np.repeat(num_users, np.diff(files.first))
        counts = np.bincount(part[users > 0], users[users > 0], len(self._ends))
        return counts.astype(np.int64)

    def _expect_none(self, wrong: np.ndarray[Any, np.dtype[np.bool_]], problem: str) -> None:
        if wrong.any():
            name = [*self.specs][int(np.argmax(wrong))]
            raise FormatError(f"{problem} (tensor {name[:200]!r})")

    @property
    @override
    def files(self) -> Sequence[str]:
        return self._files

    @property
    @override
    def has_boxes(self) -> bool:
        return self.num_boxes > len(self.specs)

    @property
    @override
    def shards(self) -> Places:
        return self._all_shards

    @property
    @override
    def boxes(self) -> Boxes | None:
        return self._all_boxes

    @cached_property
    def _all_shards(self) -> Places:
        """Positions of all shards; reads all parts."""
        assert self._parts is not None
        file, start, nbytes = (np.empty(self.num_boxes, np.int64) for _ in range(3))
        for number in self._parts.numbers:
            found = self._parts.places(number, self)
            file[found.numbers], start[found.numbers] = found.file, found.start
            nbytes[found.numbers] = found.nbytes
        return Places(self._files, file, start, nbytes)

    @cached_property
    def _all_boxes(self) -> Boxes | None:
        if not self.has_boxes:
            return None
        tensor = np.repeat(np.arange(len(self.specs)), self._num_cells)
        return Boxes(tensor, *self._select_boxes(np.arange(self.num_boxes)))

    @override
    def locate(self, numbers: Column) -> Places:
        assert self._parts is not None
        tensor, cell = self._cells(numbers)
        grids = self._grids.files
        file = grids.values[grids.first[self._grid[tensor]] + cell]
        of_part = np.searchsorted(self._ends, file, side="right") + 1
        start, nbytes = np.empty_like(file), np.empty_like(file)
        for number in np.flatnonzero(np.bincount(of_part)).tolist():
            rows = np.flatnonzero(of_part == number)
            found = self._parts.places(number, self)
            at = np.searchsorted(found.numbers, numbers[rows])
            start[rows], nbytes[rows] = found.start[at], found.nbytes[at]
        return Places(self._files, file, start, nbytes)

    @override
    def _select_boxes(self, numbers: Column) -> tuple[Ragged, Ragged]:
        tensor, cell = self._cells(numbers)
        num_dims = np.diff(self._shapes.first)[tensor]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_dims)])
        offsets, sizes = np.empty(first[-1], np.int64), np.empty(first[-1], np.int64)
        for some in split_rows(len(numbers)):
            for rows, dim, start, size in self._sides(tensor[some], cell[some]):
                place = first[:-1][some][rows] + dim
                offsets[place], sizes[place] = start, size
        return Ragged(offsets, first), Ragged(sizes, first)

    @override
    def _numbers_in(self, file: int) -> Column:
        assert self._parts is not None
        part = int(np.searchsorted(self._ends, file, side="right")) + 1
        found = self._parts.places(part, self)
        rows = np.flatnonzero(found.file == file)
        return found.numbers[rows[np.lexsort((found.nbytes[rows], found.start[rows]))]]

    @cached_property
    def _first(self) -> Column:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._num_cells)])

    def _cells(self, numbers: Column) -> tuple[Column, Column]:
        """Return the tensor of each shard, and its number in the tensor's grid."""
        tensor = np.searchsorted(self._first, numbers, side="right") - 1
        return tensor, numbers - self._first[tensor]

    def _sides(
        self, tensor: Column, cell: Column
    ) -> Iterator[tuple[Column, Column, Column, Column]]:
        """Yield, from the last dimension to the first, rows with that many, offsets and sizes."""
        shapes, cuts, begins = self._shapes, self._grids.cuts, self._grids.begins
        rows, rest = np.arange(len(tensor)), cell
        num_dims = np.diff(shapes.first)[tensor]
        for back in range(1, int(num_dims.max(initial=0)) + 1):
            has_dim = num_dims[rows] >= back
            rows, rest = rows[has_dim], rest[has_dim]
            dim = num_dims[rows] - back
            of_tensor = tensor[rows]
            cut = cuts.values[cuts.first[self._grid[of_tensor]] + dim]
            begin, end = begins.first[cut], begins.first[cut + 1]
            at = begin + rest % (end - begin)
            rest = rest // (end - begin)
            start = begins.values[at]
            stop = begins.values[np.minimum(at + 1, len(begins.values) - 1)]
            extent = shapes.values[shapes.first[of_tensor] + dim]
            yield rows, dim, start, np.where(at + 1 == end, extent, stop) - start

    def place_boxes(
        self, number: int, starts: Mapping[str, Sequence[int]], *, what: str
    ) -> _PartPlaces:
        """Compute where the boxes in the files of a part lie; `starts`: exceptions, by file."""
        # Per part, as this takes some 100 bytes a box.
        numbers, file = self._boxes_in(number)
        tensor, cell = self._cells(numbers)
        item_nbytes = self._item_nbytes[tensor]
        nbytes = item_nbytes.copy()
        for rows, _, _, size in self._sides(tensor, cell):
            nbytes[rows] *= size
        lengths = self._lengths
        # Sums of hostile sizes may be beyond 64 bits.
        if (np.bincount(file, nbytes) > _MAX_SUM).any() or (nbytes > lengths[file]).any():
            raise FormatError(f"{what}: a file is shorter than its shards")
        # Long elements first, as in section 4 of the format; then in the order of the numbers.
        order = np.argsort((-item_nbytes).astype(np.int8), kind="stable")
        order = order[np.argsort(file[order], kind="stable")]
        in_order, ends = file[order], np.cumsum(nbytes[order])
        is_last = np.ones(len(order), np.bool_)
        is_last[:-1] = in_order[1:] != in_order[:-1]
        last = np.zeros(len(lengths), np.int64)
        last[in_order[is_last]] = ends[is_last]
        start = np.empty(len(order), np.int64)
        start[order] = lengths[in_order] - (last[in_order] - (ends - nbytes[order]))
        for name in starts.keys() & self._file_numbers.keys():
            rows = np.flatnonzero(file == self._file_numbers[name])
            if len(rows) != len(starts[name]):
                raise FormatError(f"{what}: `starts` of {name} has another length")
            start[rows] = starts[name]
            check_places(
                Places(self._files, file, start, nbytes).select_shards(rows), lengths, what=what
            )
        if (start < DATA_ALIGNMENT).any():
            raise FormatError(f"{what}: a file is shorter than its shards")
        return _PartPlaces(numbers, file, start, nbytes)

    def _boxes_in(self, part: int) -> tuple[Column, Column]:
        """Return the numbers of the boxes in the files of a part, ascending, and their files."""
        low, high = (0, *self._ends.tolist())[part - 1 : part + 1]
        files = self._grids.files
        place = np.flatnonzero((files.values >= low) & (files.values < high))
        grid = np.searchsorted(files.first, place, side="right") - 1
        users = self._tensors_of_grids.select_ragged(grid)
        row = np.repeat(np.arange(len(place)), np.diff(users.first))
        cell = place[row] - files.first[grid[row]]
        numbers = self._first[users.values] + cell
        order = np.argsort(numbers)
        return numbers[order], files.values[place[row[order]]]

    @cached_property
    def _tensors_of_grids(self) -> Ragged:
        """The tensors of each grid."""
        counts = np.bincount(self._grid, minlength=len(self._grids.files.first) - 1)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Ragged(np.argsort(self._grid, kind="stable"), first)


def encode_in_parts(
    tables: Mapping[str, TensorTable],
    blocks: Mapping[str, bytes],
    lengths: Mapping[str, int],
    writers: Mapping[str, Sequence[int]],
    block_nbytes: int = BLOCK_NBYTES,
    *,
    stored: Mapping[str, StoredBlocks],
) -> dict[str, bytes]:
    """Encode an index in parts: its documents by name.

    Args:
        tables: By component. The boxes of each tensor must be a grid.
        blocks: Block digests of all files.
        lengths: Plain lengths of all files.
        writers: By component, the number of tensor files of each writer, in the order of the files.
        block_nbytes: Length of a block.
        stored: Stored blocks of the compressed files.
    """
    # Grids first: a tensor whose boxes are not one must fail before anything is encoded.
    made = _GridMaker()
    made_grids = {name: made.add(table) for name, table in tables.items()}
    of_tensors = {file for table in tables.values() for file in table.files}
    nbytes = {file: 2 * len(digests) for file, digests in blocks.items()}
    for file, one in stored.items():
        nbytes[file] += 2 * len(one.digests) + sum(len(str(length)) + 1 for length in one.lengths)
    num_boxes = {
        file: count
        for table in tables.values()
        for file, count in zip(
            table.files,
            np.bincount(table.shards.file, minlength=len(table.files)).tolist(),
            strict=True,
        )
    }
    files = {name: table.files for name, table in tables.items()}
    ends = _divide_writers(files, writers, nbytes, num_boxes)
    root = _Root(
        holdfast=FORMAT_VERSION,
        requires=[PARTS],
        block_nbytes=block_nbytes,
        blocks={name: digests.hex() for name, digests in blocks.items() if name not in of_tensors},
        cuts=made.cuts,
        grids=made.grids,
        components={
            name: _Component(
                files=[*table.files],
                parts=ends[name],
                names=[*table.specs],
                dtypes=[spec.dtype for spec in table.specs.values()],
                shapes=[spec.shape for spec in table.specs.values()],
                grids=made_grids[name][0],
            )
            for name, table in tables.items()
        },
        stored={name: one.columns() for name, one in stored.items() if name not in of_tensors},
    )
    documents: dict[str, bytes] = {}
    grids = _Grids(root, what=layout.INDEX)
    parted = {
        name: PartedTable(
            name,
            table.specs,
            files=table.files,
            lengths=np.array([lengths[file] for file in table.files], np.int64),
            ends=np.array(ends[name], np.int64),
            grid=np.array(made_grids[name][0], np.int64),
            grids=grids,
            parts=None,
        )
        for name, table in tables.items()
    }
    for number in range(1, 1 + max(map(len, ends.values()), default=0)):
        of_part: list[str] = []
        starts: dict[str, list[int]] = {}
        for name, table in tables.items():
            first, stop = [0, *ends[name]][number - 1 : number + 1]
            of_part += table.files[first:stop]
            found = parted[name].place_boxes(number, {}, what=layout.part_name(number))
            start = table.shards.start[made_grids[name][1][found.numbers]]
            for file in np.flatnonzero(np.bincount(found.file[start != found.start])).tolist():
                starts[table.files[file]] = start[found.file == file].tolist()
        # Starts are left out where the reader finds the same ones, which is checked by its code.
        part = _PartDocument(
            holdfast=FORMAT_VERSION,
            part=number,
            blocks={file: blocks[file].hex() for file in of_part},
            starts=starts,
            stored={file: stored[file].columns() for file in of_part if file in stored},
        )
        what = layout.part_name(number)
        documents[what] = encode_document(part, what=what)
    documents[layout.INDEX] = encode_document(root, what=layout.INDEX)
    return documents


class _GridMaker:
    """Makes the grids of tensors, each distinct one once."""

    def __init__(self) -> None:
        self.cuts: list[list[int]] = []
        self.grids: list[_Grid] = []
        self._known_cuts: dict[bytes, int] = {}
        self._known_grids: dict[tuple[tuple[int, ...], bytes], int] = {}

    def add(self, table: TensorTable) -> tuple[list[int], Column]:
        """Return the number of the grid of each tensor, and its shards in the order of the grid."""
        numbers: list[int] = []
        order = np.empty(len(table.shards.file), np.int64)
        boxes, stop = table.boxes, 0
        counts = np.ones(len(table), np.int64)
        if boxes is not None:
            counts = np.bincount(boxes.tensor, minlength=len(table))
        for spec, count in zip(table.specs.values(), counts.tolist(), strict=True):
            first, stop = stop, stop + count
            begins = [np.zeros(1, np.int64) for _ in spec.shape]
            rows = np.arange(first, stop)
            if count > 1:
                assert boxes is not None
                offsets, sizes = (
                    one.select_rows(rows, len(spec.shape)) for one in (boxes.offsets, boxes.sizes)
                )
                begins, in_grid = _find_grid(spec, offsets, sizes)
                rows = rows[in_grid]
            order[first:stop] = rows
            file = table.shards.file[rows]
            cuts = tuple(self._number_cut(one[1:]) for one in begins)
            key = (cuts, file.tobytes())
            if key not in self._known_grids:
                self._known_grids[key] = len(self.grids)
                self.grids.append(_Grid(cuts, file.tolist()))
            numbers.append(self._known_grids[key])
        return numbers, order

    def _number_cut(self, places: Column) -> int:
        number = self._known_cuts.setdefault(places.tobytes(), len(self.cuts))
        if number == len(self.cuts):
            self.cuts.append(places.tolist())
        return number


def _find_grid(spec: TensorSpec, offsets: Column, sizes: Column) -> tuple[list[Column], Column]:
    """Return where the intervals of each dimension begin, and the boxes in row-major order."""
    cell = np.zeros(len(offsets), np.int64)
    begins: list[Column] = []
    is_grid = True
    for start, size, extent in zip(offsets.T, sizes.T, spec.shape, strict=True):
        begin = np.sort(start)
        begin = begin[np.diff(begin, prepend=-1) != 0]
        at = np.searchsorted(begin, start)
        is_grid &= bool((size == np.append(begin[1:], extent)[at] - start).all())
        cell = cell * len(begin) + at
        begins.append(begin)
    order = np.argsort(cell)
    num_cells = math.prod(map(len, begins))
    if not is_grid or num_cells != len(cell) or (cell[order] != np.arange(num_cells)).any():
        raise UsageError(f"tensor {spec.key!r}: its boxes are not a grid, as an index in parts has")
    return begins, order


def _divide_writers(
    files: Mapping[str, Sequence[str]],
    writers: Mapping[str, Sequence[int]],
    nbytes: Mapping[str, int],
    num_boxes: Mapping[str, int],
) -> dict[str, list[int]]:
    """Divide the writers among parts; return the files of each component up to each part's end."""
    ends: dict[str, list[int]] = {name: [] for name in files}
    position = dict.fromkeys(files, 0)
    num_writers = in_part = boxes_in_part = 0
    for counts in zip(*(writers[name] for name in files), strict=True):
        own = [
            file
            for name, count in zip(files, counts, strict=True)
            for file in files[name][position[name] : position[name] + count]
        ]
        boxes_of_writer = sum(map(num_boxes.__getitem__, own))
        if (
            num_writers == PART_WRITERS
            or in_part > PART_NBYTES
            or boxes_in_part + boxes_of_writer > MAX_PART_BOXES
        ):
            for name, at in position.items():
                ends[name].append(at)
            num_writers = in_part = boxes_in_part = 0
        num_writers += 1
        in_part += sum(map(nbytes.__getitem__, own))
        boxes_in_part += boxes_of_writer
        for name, count in zip(files, counts, strict=True):
            position[name] += count
    for name, at in position.items():
        ends[name].append(at)
    return ends
