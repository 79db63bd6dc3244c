"""Reads tensors of a source as a stream of pieces, ahead of whoever uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

from holdfast.engine.memory import Buffers
from holdfast.engine.workers import Workers, cancel, gather
from holdfast.errors import DeadlineExceeded
from holdfast.interop.source import Source

PIECE_NBYTES = 4 << 20
"""Most bytes of a piece; a multiple of every item's size."""
NUM_READERS = 10
"""Threads that read: so many reads at a time keep a disk busy."""
NUM_AHEAD = 12
"""Most batches of pieces, of 4 MiB each, that are read before they are asked for."""
READ_TIMEOUT_S = 600.0
"""Longest wait for one batch: a network file system that hangs must not hang a command."""
_ALIGNMENT = 64
_MAX_PIECES = 256
"""Most pieces of a batch, so that threads share many small tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of one tensor; valid until the next piece is asked for."""

    component: str
    key: str
    start: int
    """Position of its first byte in the tensor."""
    memory: memoryview


def pieces(source: Source, wanted: Iterable[tuple[str, str]]) -> Generator[Piece, None, None]:
    """Read tensors, given as (component, key), in the order given; each in pieces from its start.

    A tensor without elements gives one piece of no bytes. A few threads read ahead; none of them
    reads any more once the iterator is exhausted or closed.

    Raises:
        CorruptData, StoreError: as `Source.read_into`.
        DeadlineExceeded: the storage did not answer for `READ_TIMEOUT_S`.
    """
    buffers, workers = Buffers(), Workers(NUM_READERS, "holdfast-pieces")
    waiting: deque[tuple[memoryview, Future[list[Piece]]]] = deque()

    def next_batch() -> Iterator[Piece]:
        buffer, read = waiting.popleft()
        yield from _result(read, source)
        buffers.give_back(buffer)

    try:
        for batch in _batches(source, wanted):
            buffer = buffers.take(PIECE_NBYTES)
            waiting.append((buffer, workers.submit(partial(_read, source, batch, buffer))))
            if len(waiting) > NUM_AHEAD:
                yield from next_batch()
        while waiting:
            yield from next_batch()
    finally:
        cancel([read for _, read in waiting], timeout_s=READ_TIMEOUT_S)
        workers.close()


def read_whole(source: Source, component: str, key: str, start: int, memory: memoryview) -> None:
    """Fill `memory` with bytes of a tensor from its byte `start` on, by several threads if large.

    Raises:
        CorruptData, StoreError: as `Source.read_into`.
        DeadlineExceeded: the storage did not answer for `READ_TIMEOUT_S`.
    """
    if memory.nbytes <= PIECE_NBYTES:
        if memory.nbytes:
            source.read_into(component, key, start, memory)
        return
    workers = Workers(NUM_READERS, "holdfast-pieces")
    try:
        reads = [
            workers.submit(
                partial(
                    source.read_into,
                    component,
                    key,
                    start + at,
                    memory[at : at + PIECE_NBYTES],
                )
            )
            for at in range(0, memory.nbytes, PIECE_NBYTES)
        ]
        gather(reads, timeout_s=READ_TIMEOUT_S, what=f"{source.url}: reading {component}:{key}")
    finally:
        workers.close()


_Planned = tuple[str, str, int, int, int]
"""Component, key, first byte and number of bytes of a piece, and its place in the buffer."""


def _batches(source: Source, wanted: Iterable[tuple[str, str]]) -> Iterator[list[_Planned]]:
    """Plan the pieces; those of small tensors share a buffer."""
    batch: list[_Planned] = []
    used = 0
    for component, key in wanted:
        nbytes = source.parts[component].specs[key].nbytes
        for start in range(0, max(nbytes, 1), PIECE_NBYTES):
            count = min(PIECE_NBYTES, nbytes - start)
            if len(batch) == _MAX_PIECES or (batch and used + count > PIECE_NBYTES):
                yield batch
                batch, used = [], 0
            batch.append((component, key, start, count, used))
            used += -(-count // _ALIGNMENT) * _ALIGNMENT
    if batch:
        yield batch


def _read(source: Source, batch: list[_Planned], buffer: memoryview) -> list[Piece]:
    found = []
    for component, key, start, count, at in batch:
        memory = buffer[at : at + count]
        if count:
            source.read_into(component, key, start, memory)
        found.append(Piece(component=component, key=key, start=start, memory=memory))
    return found


def _result(read: Future[list[Piece]], source: Source) -> list[Piece]:
    try:
        return read.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(
            f"{source.url}: not read within {READ_TIMEOUT_S:.0f} s; the storage hangs"
        ) from None
