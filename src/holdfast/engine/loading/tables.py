"""The stored tensors of one component as columns: many small ones are copied without making any.

A tensor object, or a record of where one lies, costs several times what its few bytes do. So both
are made only for who asks for a tensor by its key; what is copied into plain live tensors is
copied from its place in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from holdfast.engine.loading.wanted import Wanted
from holdfast.engine.staging.arena import Arena, check_aligned
from holdfast.format.index import Column
from holdfast.state.copying import copy_bytes
from holdfast.state.unread import LazyTensors, S_co, TensorSource, Unread

IMAGE_NBYTES = 64 << 20
"""How much memory tensors take at a time that are not read into their place, but copied there."""
DIRECT_NBYTES = 32 << 10
"""The least that is copied from the blocks themselves. Each costs as much as a copy of so much."""
_SMALL_NBYTES = 128 << 10
"""Of this size and more torch copies tensors on several threads."""
_key = attrgetter("key")


@dataclass(slots=True)
class Run:
    """Bytes of a file that lie side by side, and where in memory they go."""

    file: str
    start: int
    nbytes: int
    at: int


class Files(TensorSource, Protocol):
    """Where the bytes of tensor files come from."""

    def read_runs(self, runs: Sequence[Run], memory: Any) -> None:
        """Fill `memory`, a numpy array of bytes, with these.

        Raises:
            FormatError, StoreError: they cannot be read.
        """
        ...


class _Columns(LazyTensors[S_co]):
    """Tensors of files; the columns have an entry for each tensor, in the order of `parts`."""

    def __init__(self, parts: Sequence[Wanted]) -> None:
        """Raises `FormatError` where a tensor does not begin at a multiple of its item size."""
        for part in parts:
            check_aligned(part.specs, part.start)
        self._parts = parts

    def __getitem__(self, key: str) -> S_co:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @abstractmethod
    def _make(self, numbers: Column) -> list[S_co]:
        """The tensors with these numbers."""

    def _pairs(self, live: Sequence[Tensor], numbers: Column) -> list[tuple[Tensor, S_co]]:
        return [*zip(live, self._make(numbers), strict=True)]

    @cached_property
    def _made(self) -> Mapping[str, S_co]:
        return dict(zip(self._keys, self._make(np.arange(len(self))), strict=True))

    def _numbers_of(self, keys: Sequence[str]) -> Column:
        if keys == self._keys:
            return np.arange(len(keys))
        numbers = {key: number for number, key in enumerate(self._keys)}
        return np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))

    @cached_property
    def _keys(self) -> list[str]:
        return [*map(_key, self._specs)]

    @cached_property
    def _specs(self) -> list[Any]:
        return [spec for part in self._parts for spec in part.specs]

    @cached_property
    def _file(self) -> Column:
        return np.repeat(np.arange(len(self._parts)), [len(part.specs) for part in self._parts])

    @cached_property
    def _start(self) -> Column:
        return _joined([part.start for part in self._parts])

    @cached_property
    def _nbytes(self) -> Column:
        return _joined([part.nbytes for part in self._parts])


class ReadTensors(_Columns[Tensor]):
    """In the memory into which their files were read."""

    def __init__(self, parts: Sequence[tuple[Wanted, Arena]]) -> None:
        """Raises `FormatError` where a tensor does not begin at a multiple of its item size."""
        super().__init__([wanted for wanted, _ in parts])
        self._arenas = [arena for _, arena in parts]

    def _make(self, numbers: Column) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        first = 0
        for part, arena in zip(self._parts, self._arenas, strict=True):
            stop = first + len(part.specs)
            here = np.sort(numbers[(numbers >= first) & (numbers < stop)]) - first
            specs = [part.specs[number] for number in here.tolist()]
            views = arena.tensors(specs, part.start[here], part.nbytes[here])
            found.update(zip((here + first).tolist(), views, strict=True))
            first = stop
        return [*map(found.__getitem__, numbers.tolist())]

    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """As in `LazyTensors`: the small ones."""
        numbers = self._numbers_of(keys)
        is_small = self._nbytes[numbers] < _SMALL_NBYTES
        small, others = np.flatnonzero(is_small), np.flatnonzero(~is_small)
        at = numbers[small]
        bases = np.array([arena.address for arena in self._arenas], np.int64)
        addresses = bases[self._file[at]] + self._start[at]
        copy_bytes(
            live if len(at) == len(keys) else [live[n] for n in small.tolist()],
            addresses.tolist(),
            self._nbytes[at].tolist(),
        )
        return self._pairs([live[n] for n in others.tolist()], numbers[others])


class UnreadTensors(_Columns[Unread]):
    """Yet to be read from `files`."""

    def __init__(self, files: Files, parts: Mapping[str, Wanted]) -> None:
        """`parts`: file → what is wanted of it.

        Raises `FormatError` where a tensor does not begin at a multiple of its item size.
        """
        super().__init__([*parts.values()])
        self._files = files
        self._names = [*parts]

    def _make(self, numbers: Column) -> list[Unread]:
        columns = (self._file, self._start, self._nbytes)
        rows = zip(*(column[numbers].tolist() for column in columns), strict=True)
        specs = [self._specs[number] for number in numbers.tolist()]
        return [
            Unread(
                source=self._files, spec=spec, file=self._names[file], start=start, nbytes=nbytes
            )
            for spec, (file, start, nbytes) in zip(specs, rows, strict=True)
        ]

    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, Unread]]:
        """As in `LazyTensors`: all of them, where all are small, in the order of the files, so much
        at a time as an image may hold. Otherwise none: each block is to be read once."""
        numbers = self._numbers_of(keys)
        file, start, nbytes = (c[numbers] for c in (self._file, self._start, self._nbytes))
        if not is_all or (nbytes >= DIRECT_NBYTES).any():
            return self._pairs(live, numbers)
        if not len(keys):
            return []
        order = np.lexsort((start, file))
        batch = np.cumsum(nbytes[order]) // IMAGE_NBYTES
        for some in np.split(order, np.flatnonzero(np.diff(batch)) + 1):
            runs, places = _packed(file[some], start[some], nbytes[some])
            self._copy_image(
                [Run(self._names[number], *of_run) for number, *of_run in runs],
                [live[number] for number in some.tolist()],
                places,
                nbytes[some],
            )
        return []

    def _copy_image(
        self, runs: Sequence[Run], live: Sequence[Tensor], places: Column, nbytes: Column
    ) -> None:
        arena = Arena(runs[-1].at + runs[-1].nbytes)
        self._files.read_runs(runs, np.frombuffer(arena.memory, np.uint8))
        copy_bytes(live, (places + arena.address).tolist(), nbytes.tolist())


def _packed(
    file: Column, start: Column, nbytes: Column
) -> tuple[list[tuple[int, int, int, int]], Column]:
    """Runs (file, start, nbytes, place) of tensors in the order of the files, one behind the other
    in memory, and the place of each tensor there."""
    stop = start + nbytes
    begins = np.concatenate(([True], (file[1:] != file[:-1]) | (start[1:] != stop[:-1])))
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(file)) - 1
    lengths = stop[last] - start[first]
    at = np.cumsum(lengths) - lengths
    run = np.cumsum(begins) - 1
    columns = (file[first], start[first], lengths, at)
    runs = [*zip(*(column.tolist() for column in columns), strict=True)]
    return runs, start - start[first][run] + at[run]


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)
