"""Loaded tensors in memory: whole ones as columns, others assembled from boxes (slices).

A tensor object, or a record of its place, costs several times a copy of its few bytes. So both are
made only when a tensor is requested by its key; plain live tensors are filled from addresses
(docs/decisions/0024).

Elements that follow each other in the file and in the held tensor are copied as bytes from the
block that was read. Others are read with what lies between them, and then copied by strides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from holdfast.errors import OutOfMemory
from holdfast.format.boxes import Column
from holdfast.format.index import Index, Places, TensorTable
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.loading.plan import DIRECT_NBYTES, Packed, Wanted, batches
from holdfast.staging.arena import Arena, check_aligned
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.planning.copying import (
    LazyTensors,
    S_co,
    TensorSource,
    UnreadTensor,
    bytes_of,
    copy_bytes,
    copy_tensors,
)
from holdfast.state.shards import LocalShards

_SMALL_NBYTES = 128 << 10
"""Least bytes of a tensor that is copied on several threads, by `state.copying`."""
_key = attrgetter("key")


class PackedSource(TensorSource, Protocol):
    """Source of unread tensors that can read many small ones together."""

    def read_packed(self, packed: Packed) -> None:
        """Read tensors into packed memory."""
        ...


class _Columns(LazyTensors[S_co]):
    """Mapping of keys to stored tensors, kept as columns; `parts`: file → its wanted tensors."""

    def __init__(self, parts: Mapping[str, Wanted]) -> None:
        for part in parts.values():
            check_aligned(part.specs, part.start)
        self._files = [*parts]
        self._parts = [*parts.values()]

    def __getitem__(self, key: str) -> S_co:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @abstractmethod
    def _make(self, numbers: Column) -> list[S_co]:
        """Create the tensor objects at these positions in the table."""

    def _pairs(self, live: Sequence[Tensor], numbers: Column) -> list[tuple[Tensor, S_co]]:
        return [*zip(live, self._make(numbers), strict=True)]

    @cached_property
    def _made(self) -> Mapping[str, S_co]:
        return dict(zip(self._keys, self._make(np.arange(len(self))), strict=True))

    def _numbers_of(self, keys: Sequence[str]) -> Column:
        # A load of a whole container requests all keys in their order.
        if keys == self._keys:
            return np.arange(len(keys))
        numbers = {key: number for number, key in enumerate(self._keys)}
        return np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))

    @cached_property
    def _keys(self) -> list[str]:
        return [*map(_key, self._specs)]

    @cached_property
    def _specs(self) -> list[TensorSpec]:
        return [spec for part in self._parts for spec in part.specs]

    @cached_property
    def _places(self) -> Places:
        counts = [len(part.specs) for part in self._parts]
        return Places(
            self._files,
            np.repeat(np.arange(len(counts)), counts),
            _concatenate([part.start for part in self._parts]),
            _concatenate([part.nbytes for part in self._parts]),
        )


class FreshTensors(_Columns[Tensor]):
    """Stored tensors that were read from their files into newly allocated memory."""

    def __init__(self, parts: Mapping[str, Wanted], arenas: Sequence[Arena]) -> None:
        """Wrap the wanted tensors of files in `arenas`; `FormatError` if one is not aligned."""
        super().__init__(parts)
        self._arenas = arenas

    def _make(self, numbers: Column) -> list[Tensor]:
        made: dict[int, Tensor] = {}
        first = 0
        for part, arena in zip(self._parts, self._arenas, strict=True):
            stop = first + len(part.specs)
            # Sorted, since adjacent tensors are made by one call.
            of_part = np.sort(numbers[(numbers >= first) & (numbers < stop)]) - first
            specs = [part.specs[number] for number in of_part.tolist()]
            views = arena.make_tensor_views(specs, part.start[of_part], part.nbytes[of_part])
            made.update(zip((of_part + first).tolist(), views, strict=True))
            first = stop
        return [*map(made.__getitem__, numbers.tolist())]

    @override
    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Copy small tensors in bulk; return the others, for the threads of `state.copying`."""
        numbers = self._numbers_of(keys)
        is_small = self._places.nbytes[numbers] < _SMALL_NBYTES
        small, others = np.flatnonzero(is_small), np.flatnonzero(~is_small)
        places = self._places.select_shards(numbers[small])
        bases = np.array([arena.address for arena in self._arenas], np.int64)
        copy_bytes(
            live if len(small) == len(keys) else [live[n] for n in small.tolist()],
            (bases[places.file] + places.start).tolist(),
            places.nbytes.tolist(),
        )
        return self._pairs([live[n] for n in others.tolist()], numbers[others])


class UnreadTensors(_Columns[UnreadTensor]):
    """Stored tensors that are read from `source` when they are copied."""

    def __init__(self, source: PackedSource, parts: Mapping[str, Wanted]) -> None:
        """List the wanted tensors of each file, unread; `FormatError` if one is not aligned."""
        super().__init__(parts)
        self._source = source

    def _make(self, numbers: Column) -> list[UnreadTensor]:
        places = self._places.select_shards(numbers)
        columns = (places.file.tolist(), places.start.tolist(), places.nbytes.tolist())
        specs = [self._specs[number] for number in numbers.tolist()]
        return [
            UnreadTensor(
                source=self._source, spec=spec, file=places.files[file], start=start, nbytes=nbytes
            )
            for spec, file, start, nbytes in zip(specs, *columns, strict=True)
        ]

    @override
    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, UnreadTensor]]:
        """Read and copy all tensors in bulk if all are small; otherwise return them all."""
        # Beside large tensors or other containers `TensorSource.copy` gets all of them at once,
        # and so reads each block once.
        numbers = self._numbers_of(keys)
        places = self._places.select_shards(numbers)
        if not is_all or (places.nbytes >= DIRECT_NBYTES).any():
            return self._pairs(live, numbers)
        for some in batches(places, places.nbytes):
            packed = Packed(places.select_shards(some))
            self._source.read_packed(packed)
            copy_bytes(
                [live[number] for number in some.tolist()],
                (packed.starts + packed.arena.address).tolist(),
                packed.nbytes.tolist(),
            )
        return []


HeldBoxes: TypeAlias = Mapping[str, Mapping[str, LocalShards | None]]
"""By component and key what is needed of a tensor; None: all of it."""

_BITS = {1: "U8", 2: "I16", 4: "I32", 8: "I64", 16: "C128"}
"""By the bytes of an element, a dtype that torch copies bit by bit."""


class Assembly:
    """Tensors to be put together, and the pieces of stored boxes that go into each.

    A piece is a row: the elements that a stored box and a held box share, and the bytes of a file
    from the first of them to the last.
    """

    def __init__(self, index: Index, held: HeldBoxes) -> None:
        """Plan the pieces; allocates no memory for tensors."""
        files: list[str] = []
        pieces: list[_Pieces] = []
        self._targets: list[tuple[str, TensorSpec, tuple[int, ...]]] = []
        for component, of_component in held.items():
            table = index.components[component]
            for key, local in of_component.items():
                spec = table.specs[key]
                pieces.append(_Pieces(table, spec, local, first_file=len(files)))
                shape = spec.shape if local is None else local.local_shape
                self._targets.append((component, spec, shape))
            files += table.files
        self._counts = [len(of_tensor.start) for of_tensor in pieces]
        self._owner = np.repeat(np.arange(len(pieces)), self._counts).tolist()
        self._strides = [row for of_tensor in pieces for row in of_tensor.strides.tolist()]
        self._sizes = [row for of_tensor in pieces for row in of_tensor.sizes.tolist()]
        self._at = [at for of_tensor in pieces for at in of_tensor.at.tolist()]
        self.places = Places(
            files,
            _concatenate([of_tensor.file for of_tensor in pieces]),
            _concatenate([of_tensor.start for of_tensor in pieces]),
            _concatenate([of_tensor.nbytes for of_tensor in pieces]),
        )
        """File and bytes of each piece."""
        self.is_run = _concatenate([of_tensor.is_run for of_tensor in pieces]).astype(np.bool_)
        """Whether the bytes of each piece follow each other in the tensor, too."""
        self._bytes: list[Any] = []
        self._bits: list[Tensor] = []

    @property
    def tensor_files(self) -> list[str]:
        """The tensor files that hold the pieces."""
        numbers = np.flatnonzero(np.bincount(self.places.file)).tolist()
        return [self.places.files[number] for number in numbers]

    def find_adjacent(self) -> dict[str, dict[str, Wanted]]:
        """Return the tensors of each component by file, with the specs of what is held of them.

        Only of components in which the bytes of each tensor follow each other in one file.
        """
        rows: dict[str, dict[str, list[tuple[TensorSpec, int, int]]]] = {}
        apart, number = set[str](), 0
        for (component, spec, shape), count in zip(self._targets, self._counts, strict=True):
            held = TensorSpec(spec.key, spec.dtype, shape)
            files = rows.setdefault(component, {})
            if count == 1 and self.is_run[number] and self.places.nbytes[number] == held.nbytes:
                file = self.places.files[self.places.file[number]]
                row = held, int(self.places.start[number]), held.nbytes
                files.setdefault(file, []).append(row)
            else:
                apart.add(component)
            number += count
        return {
            component: {file: _tabulate_rows(component, of_file) for file, of_file in files.items()}
            for component, files in rows.items()
            if component not in apart
        }

    def allocate(self) -> dict[str, dict[str, Tensor]]:
        """Allocate the tensors, by component and key, with undefined values."""
        tensors: dict[str, dict[str, Tensor]] = {}
        for component, spec, shape in self._targets:
            tensor = tensors.setdefault(component, {})[spec.key] = _empty(spec, shape)
            self._bytes.append(bytes_of(tensor))
            self._bits.append(tensor.view(TORCH_DTYPES[_bits_of(spec)]))
        return tensors

    def find_memory(self, number: int) -> Any:
        """Return the memory of a piece whose bytes follow each other in its tensor."""
        owner = self._owner[number]
        start = self._at[number] * self._bits[owner].itemsize
        return self._bytes[owner][start : start + int(self.places.nbytes[number])]

    def scatter(self, numbers: Column, packed: Packed) -> None:
        """Copy pieces from packed memory to their places in the tensors."""
        chosen = numbers.tolist()
        specs = []
        for number, nbytes in zip(chosen, packed.nbytes.tolist(), strict=True):
            spec = self._targets[self._owner[number]][1]
            specs.append(TensorSpec(spec.key, _bits_of(spec), (nbytes // ITEM_NBYTES[spec.dtype],)))
        values = packed.arena.make_tensor_views(specs, packed.starts, packed.nbytes)
        copy_tensors(
            [
                (self._view(number), value.as_strided(self._sizes[number], self._strides[number]))
                for number, value in zip(chosen, values, strict=True)
            ]
        )

    def _view(self, number: int) -> Tensor:
        bits = self._bits[self._owner[number]]
        strides = bits.stride() or (1,)
        view: Tensor = bits.as_strided(self._sizes[number], strides, self._at[number])
        return view


class _Pieces:
    """The pieces of one tensor as columns: where each lies in a file, and in the held tensor."""

    def __init__(
        self, table: TensorTable, spec: TensorSpec, local: LocalShards | None, *, first_file: int
    ) -> None:
        assert local is None or local.shape == spec.shape, spec.key
        shards, stored = table.boxes_of(spec.key)
        held, places, local_shape = _locate_boxes(spec, local)
        of_held, of_stored = _overlaps(held, stored)
        low = np.maximum(held[of_held, 0], stored[of_stored, 0])
        high = np.minimum(held[of_held, 1], stored[of_stored, 1])
        self.sizes: Column = high - low
        """Elements in each dimension, a row for each piece."""
        self.strides: Column = _strides(np.diff(stored, axis=1)[of_stored, 0])
        """Strides of these elements in the file, in elements; a row for each piece."""
        of_local = _strides(np.array([local_shape], np.int64))
        first = ((low - stored[of_stored, 0]) * self.strides).sum(axis=1)
        self.at: Column = ((low - held[of_held, 0] + places[of_held]) * of_local).sum(axis=1)
        """Position of the first element in the held tensor."""
        length = ((self.sizes - 1) * self.strides).sum(axis=1) + 1
        at_length = ((self.sizes - 1) * of_local).sum(axis=1) + 1
        count = self.sizes.prod(axis=1)
        self.is_run = (length == count) & (at_length == count)
        item_nbytes, at = ITEM_NBYTES[spec.dtype], table.locate(shards[of_stored])
        check_aligned([spec] * len(at.start), at.start)
        self.file: Column = at.file + first_file
        self.start: Column = at.start + first * item_nbytes
        self.nbytes: Column = length * item_nbytes


def _locate_boxes(
    spec: TensorSpec, local: LocalShards | None
) -> tuple[Column, Column, tuple[int, ...]]:
    """Return the held boxes as (start, stop), where each begins, and its shape."""
    if local is None:
        boxes, places, shape = [((0,) * len(spec.shape), spec.shape)], None, spec.shape
    else:
        boxes, places, shape = [*local.boxes], local.places, local.local_shape
    rows = np.array([(start, size) for start, size in boxes], np.int64)
    rows = rows.reshape(len(boxes), 2, len(spec.shape))
    if not spec.shape:
        rows, shape = np.tile(np.array([[[0], [1]]]), (len(boxes), 1, 1)), (1,)
        return rows, np.zeros((len(boxes), 1), np.int64), shape
    rows[:, 1] += rows[:, 0]
    if places is None:
        return rows, rows[:, 0], shape
    begins = np.array([place.offsets for place in places], np.int64)
    return rows, begins.reshape(len(boxes), len(spec.shape)), shape


def _overlaps(held: Column, stored: Column) -> tuple[Column, Column]:
    """Find the pairs of boxes that share elements: their numbers in `held` and in `stored`.

    Both have an entry (start, stop) for each box. Not quadratic for the boxes of a grid: along the
    dimension that is cut most often, only boxes at the same place are compared.
    """
    starts = np.sort(stored[:, 0], axis=0)
    dim = int(np.argmax((starts[1:] != starts[:-1]).sum(axis=0)))
    order = np.argsort(stored[:, 0, dim], kind="stable")
    ends = np.maximum.accumulate(stored[order, 1, dim])
    first = np.searchsorted(ends, held[:, 0, dim], side="right")
    stop = np.searchsorted(stored[order, 0, dim], held[:, 1, dim], side="left")
    counts = np.maximum(stop - first, 0)
    of_held = np.repeat(np.arange(len(held)), counts)
    skipped = np.repeat(np.cumsum(counts) - counts - first, counts)
    of_stored = order[np.arange(len(of_held)) - skipped]
    low = np.maximum(held[of_held, 0], stored[of_stored, 0])
    high = np.minimum(held[of_held, 1], stored[of_stored, 1])
    shared = np.flatnonzero((low < high).all(axis=1))
    return of_held[shared], of_stored[shared]


def _strides(sizes: Column) -> Column:
    """Compute the row-major strides of boxes, in elements, from the sizes of each."""
    strides = np.ones_like(sizes)
    np.cumprod(sizes[:, :0:-1], axis=1, out=strides[:, -2::-1])
    return strides


def _bits_of(spec: TensorSpec) -> str:
    return _BITS[ITEM_NBYTES[spec.dtype]]


def _tabulate_rows(component: str, rows: Sequence[tuple[TensorSpec, int, int]]) -> Wanted:
    specs, *columns = zip(*rows, strict=True)
    start, nbytes = (np.array(column, np.int64) for column in columns)
    return Wanted(component=component, specs=specs, start=start, nbytes=nbytes)


def _empty(spec: TensorSpec, shape: Sequence[int]) -> Tensor:
    try:
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])
    except RuntimeError as error:
        raise OutOfMemory(
            f"tensor {spec.key!r}: a part of shape {tuple(shape)} cannot be allocated: {error}"
        ) from error


def _concatenate(columns: Sequence[Any]) -> Any:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)
