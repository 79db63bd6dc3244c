"""Reads tensors of a source as a stream of pieces, ahead of whoever uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from threading import BoundedSemaphore
from typing import TypeVar

from holdfast.errors import DeadlineExceeded
from holdfast.interop.source import Source
from holdfast.threads.buffers import Buffers
from holdfast.threads.workers import Workers, cancel, gather_results, num_cores

T = TypeVar("T")

PIECE_NBYTES = 4 << 20
"""Most bytes of a piece that is copied, a multiple of every item's size. Bytes that a source lends
are not: such a piece ends where its block does."""
NUM_READERS = 6
"""Threads that read: so many reads at a time keep a disk busy. With 10 on two cores, statistics of
1.25 GB took 1.6 s instead of 1.3 s, and nothing took less."""
NUM_AHEAD = 12
"""Most batches of pieces, of at most a block each, that are read before they are asked for."""
READ_TIMEOUT_S = 600.0
"""Longest wait for one batch: a network file system that hangs must not hang a command."""
_ALIGNMENT = 64
_MAX_PIECES = 256
"""Most pieces of a batch, so that threads share many small tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Bytes of one tensor; valid until the next piece is asked for."""

    component: str
    key: str
    start: int
    memory: memoryview


def read_pieces(
    source: Source, wanted: Iterable[tuple[str, str]]
) -> Generator[TensorPiece, None, None]:
    """Read tensors, given as (component, key), in the order given; each in pieces from its start.

    Where the pieces of a large tensor end depends on how the source stores it.
    A tensor without elements gives one piece of no bytes. A few threads read ahead; none of them
    reads any more once the iterator is exhausted or closed.
    """
    buffers = Buffers()
    jobs = (partial(_read_batch, source, batch, buffers) for batch in _batches(source, wanted))
    with closing(ahead(jobs, source.url)) as batches:
        for found, done in batches:
            yield from found
            done()


def in_batches(
    source: Source,
    wanted: Iterable[tuple[str, str]],
    work: Callable[[Sequence[TensorPiece]], T],
    *,
    num_at_once: int | None = None,
) -> Generator[T, None, None]:
    """Read as `read_pieces` does; yield what `work`, in the reading threads, makes of batches."""
    buffers = Buffers()
    # More at a time are not faster: they evict each other's data from the processor's cache.
    turns = BoundedSemaphore(num_at_once or num_cores())

    def job(batch: list[_Planned]) -> T:
        found, done = _read_batch(source, batch, buffers)
        try:
            if not turns.acquire(timeout=READ_TIMEOUT_S):
                raise DeadlineExceeded(f"{source.url}: no turn within {READ_TIMEOUT_S:.0f} s")
            try:
                return work(found)
            finally:
                turns.release()
        finally:
            done()

    yield from ahead((partial(job, batch) for batch in _batches(source, wanted)), source.url)


def ahead(
    jobs: Iterable[Callable[[], T]], what: str, *, most: int = NUM_AHEAD
) -> Generator[T, None, None]:
    """Run jobs in threads, at most `most` ahead of their use, until the iterator is closed."""
    workers = Workers(NUM_READERS, "holdfast-pieces")
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(workers.submit(job))
            if len(waiting) > most:
                yield _wait_for_read(waiting.popleft(), what)
        while waiting:
            yield _wait_for_read(waiting.popleft(), what)
    finally:
        cancel(waiting, timeout_s=READ_TIMEOUT_S)
        workers.close_pool()


def read_whole(source: Source, component: str, key: str, start: int, memory: memoryview) -> None:
    """Fill `memory` with a tensor's bytes from byte `start`, by several threads if large."""
    if memory.nbytes <= PIECE_NBYTES:
        if memory.nbytes:
            source.read_into(component, key, start, memory)
        return
    workers = Workers(NUM_READERS, "holdfast-pieces")
    try:
        reads = [
            workers.submit(
                partial(
                    source.read_into, component, key, start + at, memory[at : at + PIECE_NBYTES]
                )
            )
            for at in range(0, memory.nbytes, PIECE_NBYTES)
        ]
        gather_results(
            reads, timeout_s=READ_TIMEOUT_S, what=f"{source.url}: reading {component}:{key}"
        )
    finally:
        workers.close_pool()


_Planned = tuple[str, str, int, int, int]
"""Component, key, first byte and number of bytes of a piece, and its place in the buffer."""


def _batches(source: Source, wanted: Iterable[tuple[str, str]]) -> Iterator[list[_Planned]]:
    """Plan the pieces; those of small tensors share a buffer, and those that are lent need none."""
    batch: list[_Planned] = []
    used = 0
    for component, key in wanted:
        nbytes = source.parts[component].specs[key].nbytes
        start = 0
        while start < nbytes or not nbytes:
            most = PIECE_NBYTES
            if nbytes >= PIECE_NBYTES:
                most = source.nbytes_lent(component, key, start) or most
            count = min(most, nbytes - start)
            if len(batch) == _MAX_PIECES or (batch and used + count > PIECE_NBYTES):
                yield batch
                batch, used = [], 0
            batch.append((component, key, start, count, used))
            used += -(-count // _ALIGNMENT) * _ALIGNMENT
            start += count
            if not nbytes:
                break
    if batch:
        yield batch


def _read_batch(
    source: Source, batch: list[_Planned], buffers: Buffers
) -> tuple[list[TensorPiece], Callable[[], object]]:
    """Read the pieces of a batch; return them, and what to call when they are not used any more."""
    if len(batch) == 1:
        component, key, start, count, _ = batch[0]
        if 0 < count <= source.nbytes_lent(component, key, start):
            lent = ExitStack()
            memory = lent.enter_context(source.lent(component, key, start, count))
            return [
                TensorPiece(component=component, key=key, start=start, memory=memory)
            ], lent.close
    buffer = buffers.acquire_buffer(PIECE_NBYTES)
    found = []
    for component, key, start, count, at in batch:
        memory = buffer[at : at + count]
        if count:
            source.read_into(component, key, start, memory)
        found.append(TensorPiece(component=component, key=key, start=start, memory=memory))
    return found, partial(buffers.release_buffer, buffer)


def _wait_for_read(read: Future[T], what: str) -> T:
    try:
        return read.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(
            f"{what}: not read within {READ_TIMEOUT_S:.0f} s; the storage hangs"
        ) from None
