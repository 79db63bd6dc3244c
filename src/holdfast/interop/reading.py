"""Reads tensors of a source as a stream of pieces, ahead of whoever uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.interop.source import Source

PIECE_NBYTES = 8 << 20
"""Most bytes of a piece; a multiple of every item's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of one tensor; valid until the next piece is asked for."""

    component: str
    key: str
    start: int
    """Position of its first byte in the tensor."""
    memory: memoryview


def pieces(source: Source, wanted: Iterable[tuple[str, str]]) -> Iterator[Piece]:
    """Read tensors, given as (component, key), in the order given; each in pieces from its start.

    A tensor without elements gives one piece of no bytes.
    """
    buffer = memoryview(bytearray(PIECE_NBYTES))
    for component, key in wanted:
        nbytes = source.parts[component].specs[key].nbytes
        for start in range(0, max(nbytes, 1), PIECE_NBYTES):
            memory = buffer[: min(PIECE_NBYTES, nbytes - start)]
            source.read_into(component, key, start, memory)
            yield Piece(component=component, key=key, start=start, memory=memory)
