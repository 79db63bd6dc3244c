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
from holdfast.state.copying import LARGE_NBYTES, copy_bytes, copy_tensors
from holdfast.state.unread import S_co, Source, Table, Unread

IMAGE_NBYTES = 64 << 20
"""How much memory tensors take at a time that are not read into their place, but copied there."""
_key = attrgetter("key")


@dataclass(slots=True)
class Run:
    """Bytes of a file that lie side by side, and where in memory they go."""

    file: str
    start: int
    nbytes: int
    at: int


class Files(Source, Protocol):
    """Where the bytes of tensor files come from."""

    def read_runs(self, runs: Sequence[Run], memory: Any) -> None:
        """Fill `memory`, a numpy array of bytes, with these.

        Raises:
            FormatError, StoreError: they cannot be read.
        """
        ...


class _Columns(Table[S_co]):
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

    @property
    @abstractmethod
    def _made(self) -> Mapping[str, S_co]:
        """All of them, made at the first call."""

    @abstractmethod
    def _copy_small(self, live: Sequence[Tensor], numbers: Column) -> None:
        """Copy the tensors with these numbers, none of which is large."""

    def copy_into(self, live: Sequence[Tensor], keys: Sequence[str]) -> None:
        """As in `Table`: large ones as `copying` and `Source` do it, the others in bulk."""
        numbers = np.arange(len(keys)) if keys == self._keys else self._numbers_of(keys)
        is_large = self._nbytes[numbers] >= LARGE_NBYTES
        if is_large.any():
            large = np.flatnonzero(is_large).tolist()
            copy_tensors([(live[number], self[keys[number]]) for number in large])
            small = np.flatnonzero(~is_large)
            live, numbers = [live[number] for number in small.tolist()], numbers[small]
        if len(numbers):
            self._copy_small(live, numbers)

    def _numbers_of(self, keys: Sequence[str]) -> Column:
        numbers = {key: number for number, key in enumerate(self._keys)}
        return np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))

    @cached_property
    def _keys(self) -> list[str]:
        return [*map(_key, self._specs)]

    @cached_property
    def _specs(self) -> list[Any]:
        return [spec for part in self._parts for spec in part.specs]

    @cached_property
    def _nbytes(self) -> Column:
        return _joined([part.nbytes for part in self._parts])


class ReadTensors(_Columns[Tensor]):
    """In the memory into which their files were read."""

    def __init__(self, parts: Sequence[tuple[Wanted, Arena]]) -> None:
        """Raises `FormatError` where a tensor does not begin at a multiple of its item size."""
        super().__init__([wanted for wanted, _ in parts])
        self._arenas = [arena for _, arena in parts]

    @cached_property
    def _made(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part, arena in zip(self._parts, self._arenas, strict=True):
            views = arena.tensors(part.specs, part.start, part.nbytes)
            found.update(zip(map(_key, part.specs), views, strict=True))
        return found

    def _copy_small(self, live: Sequence[Tensor], numbers: Column) -> None:
        parts = zip(self._parts, self._arenas, strict=True)
        addresses = _joined([part.start + arena.address for part, arena in parts])
        copy_bytes(live, addresses[numbers].tolist(), self._nbytes[numbers].tolist())


class UnreadTensors(_Columns[Unread]):
    """Yet to be read from `files`."""

    def __init__(self, files: Files, parts: Mapping[str, Wanted]) -> None:
        """`parts`: file → what is wanted of it.

        Raises `FormatError` where a tensor does not begin at a multiple of its item size.
        """
        super().__init__([*parts.values()])
        self._files = files
        self._names = [*parts]

    @cached_property
    def _made(self) -> Mapping[str, Unread]:
        return {
            spec.key: Unread(source=self._files, spec=spec, file=file, start=start, nbytes=nbytes)
            for file, part in zip(self._names, self._parts, strict=True)
            for spec, start, nbytes in zip(
                part.specs, part.start.tolist(), part.nbytes.tolist(), strict=True
            )
        }

    def _copy_small(self, live: Sequence[Tensor], numbers: Column) -> None:
        """In the order of the files, so much at a time as an image may hold."""
        lengths = [len(part.specs) for part in self._parts]
        file = np.repeat(np.arange(len(lengths)), lengths)[numbers]
        start = _joined([part.start for part in self._parts])[numbers]
        nbytes = self._nbytes[numbers]
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
