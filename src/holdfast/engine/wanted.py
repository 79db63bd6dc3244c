"""What a load wants of the tensor files: which blocks, and the tensors that lie in them.

Worked out on the columns of the index, in a few passes for however many tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from holdfast.errors import FormatError
from holdfast.format.index import Column, Index
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The tensors that are wanted of one file; three columns with an entry for each."""

    component: str
    specs: Sequence[TensorSpec]
    start: Column
    nbytes: Column

    def blocks(self, block_nbytes: int) -> list[int]:
        """The numbers of the blocks in which they lie, rising."""
        has_bytes = self.nbytes > 0
        start, nbytes = self.start[has_bytes], self.nbytes[has_bytes]
        first, last = start // block_nbytes, (start + nbytes - 1) // block_nbytes
        edges = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, last + 1, -1)
        return np.flatnonzero(np.cumsum(edges)).tolist()  # type: ignore[no-any-return]

    def views(self, memory: memoryview) -> list[torch.Tensor]:
        """The tensors in `memory`, which has the bytes of the file; they keep it alive.

        Raises:
            FormatError: a start is not a multiple of its item size; in our own files it always
                is, because data starts on a page and items come in descending size.
        """
        with torch.inference_mode(False):
            base = torch.frombuffer(memory, dtype=torch.uint8)
            edges = [0, *(np.flatnonzero(self._begins_run()) + 1).tolist(), len(self.specs)]
            runs = pairwise(edges)
            return [view for first, stop in runs for view in self._split(base, first, stop)]

    def _begins_run(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each but the first: a gap before it, or another dtype than the one before."""
        begins = self.start[1:] != (self.start + self.nbytes)[:-1]
        dtypes = [spec.dtype for spec in self.specs]
        if len({*dtypes}) > 1:
            numbers = {dtype: number for number, dtype in enumerate({*dtypes})}
            column = np.fromiter(map(numbers.__getitem__, dtypes), np.int64, len(dtypes))
            begins |= column[1:] != column[:-1]
        return begins

    def _split(self, base: torch.Tensor, first: int, stop: int) -> list[torch.Tensor]:
        """Views of neighbours of one dtype; one call for all of them."""
        specs, start, nbytes = self.specs[first:stop], int(self.start[first]), self.nbytes
        dtype = TORCH_DTYPES[specs[0].dtype]
        if start % dtype.itemsize:
            raise FormatError(f"tensor {specs[0].key!r} starts at byte {start}, not aligned")
        whole = base[start : start + int(nbytes[first:stop].sum())].view(dtype)
        pieces = whole.split_with_sizes((nbytes[first:stop] // dtype.itemsize).tolist())
        return [
            piece if len(spec.shape) == 1 else piece.view(spec.shape)
            for piece, spec in zip(pieces, specs, strict=True)
        ]


def wanted_by_file(index: Index, needed: Mapping[str, Iterable[str]]) -> dict[str, Wanted]:
    """What is wanted of each tensor file. `needed`: component → keys.

    Raises:
        FormatError: a tensor in several shards, which this version cannot load.
    """
    found: dict[str, Wanted] = {}
    for component, of_component in needed.items():
        keys, table = [*of_component], index.components[component]
        if not keys:
            continue
        places = table.places
        if places is None:
            raise FormatError(f"{component}.{keys[0]}: sharded tensors need a newer Holdfast")
        specs = [*table.specs.values()]
        if keys != [*table.specs]:
            numbers = table.numbers(keys)
            places, specs = places.of(numbers), [specs[number] for number in numbers.tolist()]
        for number in np.unique(places.file).tolist():
            here = np.flatnonzero(places.file == number)
            found[places.files[number]] = Wanted(
                component=component,
                specs=specs if len(here) == len(specs) else [specs[i] for i in here],
                start=places.start[here],
                nbytes=places.nbytes[here],
            )
    return found
