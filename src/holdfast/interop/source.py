"""The seam of all tools: a checkpoint or a file of weights of any format, opened for reading.

`pieces_of` and its like read tensors of a source as a stream of pieces, ahead of their user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import BoundedSemaphore
from typing import Any, TypeVar

import msgspec
from typing_extensions import Self

from holdfast.errors import DeadlineExceeded, FormatError, UsageError, listing
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.threads.buffers import Buffers
from holdfast.threads.workers import Workers, cancel, gather_results, num_cores


class LeftOut(msgspec.Struct, frozen=True):
    """A value of a source that cannot be carried over, and why."""

    path: str
    """Where it is in the source, such as "training_args.bin" or "trainer.callbacks.EMA"."""
    why: str
    """The reason."""
    tensors_of: str = ""
    """Component of which tensors are lost with it; empty if the value holds none. Reading or
    converting such a source is an error unless the caller allows the loss."""


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """Digests of the blocks of a tensor, which prove equality; the outer ones may hold others."""

    block_nbytes: int
    offset: int
    """Where in its first block the tensor begins."""
    digests: tuple[bytes, ...]

    def edges(self, other: object, nbytes: int) -> list[tuple[int, int]] | None:
        """Return the ranges in outer blocks if all between are equal; else None."""
        if not isinstance(other, BlockDigests) or len(self.digests) < 3:
            return None
        if (self.block_nbytes, self.offset) != (other.block_nbytes, other.offset):
            return None
        if self.digests[1:-1] != other.digests[1:-1]:
            return None
        first = self.block_nbytes - self.offset
        last = first + (len(self.digests) - 2) * self.block_nbytes
        return [(0, first), (last, nbytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComponent:
    """A component of a source: its typed tree, and the tensors that the tree names.

    `kind`, and what the tree looks like, are those of docs/format.md, section 6. `specs` are by key
    and in the order of their bytes in the source, so that reading in this order is sequential.
    """

    kind: str
    tree: Any
    specs: Mapping[str, TensorSpec]
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Path of each parameter of which the source has only a digest -> dtype, sizes and digest."""

    @property
    def leaves(self) -> dict[str, TensorRef | ArrayRef]:
        """The tensors and arrays of the tree by path, in the tree's order.

        A path joins keys and positions by dots; where two would be alike, the dots in the keys of
        the later one are written as slashes. Tied tensors have several paths and one key.
        """
        found: dict[str, TensorRef | ArrayRef] = {}
        for path, ref in _leaves(self.tree, ()):
            name = ".".join(path)
            if name in found:
                name = ".".join(part.replace(".", "/") for part in path)
            while name in found:
                name += "'"
            found[name] = ref
        return found


class Source(ABC):
    """A checkpoint or a file of weights, opened for reading. Use it in a `with` statement.

    Nothing in it is trusted, and no code in it is run. Several threads may call `read_into`.
    """

    format: str
    """Name of the format, such as "safetensors"."""
    url: str
    """Path or URL that was opened, for messages."""
    parts: Mapping[str, SourceComponent]
    left_out: Sequence[LeftOut] = ()
    step: int | None = None
    """Completed optimizer steps, if the source tells."""

    @abstractmethod
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        """Fill `memory` with bytes of a tensor, from its byte `start` on.

        The bytes are those of the contiguous row-major tensor, little-endian. Of a checkpoint of
        this library every byte is checked first.

        Raises:
            CorruptData: the bytes are damaged, or the file ends before them.
            StoreError: they cannot be read.
        """

    def nbytes_lent(self, component: str, key: str, start: int) -> int:
        """Return how many bytes `lent` gives of a tensor from `start` on; 0 if only by copies."""
        return 0

    def lent(
        self, component: str, key: str, start: int, nbytes: int
    ) -> AbstractContextManager[memoryview]:
        """Yield up to `nbytes_lent` bytes where they lie, until the `with` ends."""
        raise NotImplementedError

    def fingerprint(self, component: str, key: str) -> object | None:
        """Return digests that only equal tensors share, or None if reading is needed."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close files and threads; the source cannot be read any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close the source if what is done in the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def get_component(self, component: str) -> SourceComponent:
        """Return a component."""
        found = self.parts.get(component)
        if found is None:
            has = ", ".join(map(repr, self.parts)) or "none"
            raise UsageError(f"{self.url}: no component {component!r}; it has {has}")
        return found


def expect_none_wrong(what: str, wrong: Sequence[str]) -> None:
    """Raise `FormatError` with all that is wrong in a file or folder, if anything is."""
    if wrong:
        raise FormatError(f"{what}:\n{listing(wrong)}")


def lost_tensors(source: Source, components: Collection[str] = ()) -> list[LeftOut]:
    """Return the values with tensors that these components, all if empty, lack."""
    return [
        left
        for left in source.left_out
        if left.tensors_of and (not components or left.tensors_of in components)
    ]


def lost_parameters(source: Source, components: Collection[str] = ()) -> list[LeftOut]:
    """Return the parameters of these components, all if empty, that have only a digest."""
    return [
        LeftOut(path=f"{name}.{path}", why="only its digest was saved", tensors_of=name)
        for name in components or source.parts
        for path in source.get_component(name).frozen
    ]


def expect_no_loss(
    source: Source, components: Collection[str], *, allow_loss: bool, needs_frozen: bool = True
) -> None:
    """Raise `UsageError` if a tensor of these components, or any, is left out, unless allowed."""
    digests = lost_parameters(source, components) if needs_frozen else []
    if digests and not allow_loss:
        raise UsageError(
            f"{source.url}: {len(digests)} frozen parameters were saved by digest, such as "
            f"{digests[0].path}. Write the adapter with --to peft, all weights with --to hf --base "
            "FOLDER, or skip them with --allow-loss (allow_loss=True). Or make the model on the "
            "same base, call holdfast.load_weights(ROOT, model), and save the model, with PEFT by "
            "model.merge_and_unload().save_pretrained(FOLDER)"
        )
    lost = lost_tensors(source, components)
    if lost and not allow_loss:
        raise UsageError(
            f"{source.url}: holds tensors that cannot be read. Save them as dense tensors "
            "in a state_dict, or skip them with --allow-loss (allow_loss=True):\n"
            + listing([f"{left.path}: {left.why}" for left in lost])
        )


def _leaves(
    node: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], TensorRef | ArrayRef]]:
    if isinstance(node, TensorRef | ArrayRef):
        yield path, node
    elif isinstance(node, Mapping):
        for key, inner in node.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for number, inner in enumerate(node):
            yield from _leaves(inner, (*path, str(number)))
    elif isinstance(node, msgspec.Struct):  # a generator's members, an enum's value
        for name in ("members", "value"):
            yield from _leaves(getattr(node, name, None), path)


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
