"""Columnar tables of a component's stored tensors, for bulk copies of many small tensors.

A tensor object, or a record of its place, costs several times a copy of its few bytes. So both are
made only when a tensor is requested by its key; plain live tensors are filled from addresses
(docs/decisions/0024).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from holdfast.format.boxes import Column
from holdfast.format.index import Places
from holdfast.format.tensors import TensorSpec
from holdfast.loading.plan import DIRECT_NBYTES, Packed, Wanted, batches
from holdfast.staging.arena import Arena, check_aligned
from holdfast.state.planning.copying import (
    LazyTensors,
    S_co,
    TensorSource,
    UnreadTensor,
    copy_bytes,
)

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
        """Wrap the wanted tensors of each file in `parts`; `arenas` holds the files' memory.

        Raises `FormatError` where a tensor does not begin at a multiple of its item size.
        """
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
        """List the wanted tensors of each file in `parts`, without reading them.

        Raises `FormatError` where a tensor does not begin at a multiple of its item size.
        """
        super().__init__(parts)
        self._source = source

    def _make(self, numbers: Column) -> list[UnreadTensor]:
        places = self._places.select_shards(numbers)
        columns = (places.file.tolist(), places.start.tolist(), places.nbytes.tolist())
        specs = [self._specs[number] for number in numbers.tolist()]
        return [
            UnreadTensor(
                source=self._source,
                spec=spec,
                file=places.files[file],
                start=start,
                nbytes=nbytes,
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


def _concatenate(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)
