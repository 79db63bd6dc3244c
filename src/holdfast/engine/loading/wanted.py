"""The tensors that a load wants of each tensor file, and the blocks in which they lie.

Worked out on the columns of the index, in a few passes for however many tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.errors import FormatError
from holdfast.format.index import Column, Index
from holdfast.format.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The tensors that are wanted of one file; three columns with an entry for each."""

    component: str
    specs: Sequence[TensorSpec]
    start: Column
    nbytes: Column

    def blocks(self, block_nbytes: int) -> list[int]:
        """The numbers of the blocks in which they lie, rising."""
        # +1 where a tensor begins, -1 behind its end: blocks with a positive sum are wanted. A pass
        # over columns, however many tensors there are.
        has_bytes = self.nbytes > 0
        start, nbytes = self.start[has_bytes], self.nbytes[has_bytes]
        first, last = start // block_nbytes, (start + nbytes - 1) // block_nbytes
        edges = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, last + 1, -1)
        return np.flatnonzero(np.cumsum(edges)).tolist()  # type: ignore[no-any-return]


def wanted_by_file(index: Index, needed: Mapping[str, Iterable[str]]) -> dict[str, Wanted]:
    """The wanted tensors of each tensor file. `needed`: component → keys.

    Raises:
        FormatError: a tensor in several shards, which this version cannot load.
    """
    by_file: dict[str, Wanted] = {}
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
        # Not np.unique: when first called it imports numpy.ma, which takes as long as a small load.
        for number in np.flatnonzero(np.bincount(places.file)).tolist():
            in_file = np.flatnonzero(places.file == number)
            by_file[places.files[number]] = Wanted(
                component=component,
                specs=specs if len(in_file) == len(specs) else [specs[i] for i in in_file],
                start=places.start[in_file],
                nbytes=places.nbytes[in_file],
            )
    return by_file
