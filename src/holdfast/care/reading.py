"""Reading for verification: a few blocks at a time, and twice before damage is believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from functools import partial

from holdfast.engine.loading.blockreading import FileBlocks, decode_block, read_block
from holdfast.engine.roots.documents import read_document
from holdfast.engine.workers import Workers
from holdfast.errors import CorruptData, DeadlineExceeded, FormatError, HoldfastError, StoreError
from holdfast.format.blocks import block_digest, split
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import header_nbytes
from holdfast.store.base import Store

NUM_THREADS = 4
READ_TIMEOUT_S = 600.0
"""Longest wait for one block: a network file system that hangs must not hang the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One stored block. `expected` is its digest, empty where the index is lost."""

    file: str
    number: int
    start: int
    """First byte in the file as it lies there; `stop` is behind the last one."""
    stop: int
    expected: bytes
    plain: tuple[int, int]
    """First byte, and the one behind the last, of the plain block."""
    made_by: FileBlocks | None = None
    """What to decode it with, for one that a codec made; None: it is not decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What reading a block gave: its digest or an error; and whether only the first try failed."""

    block: Block
    digest: bytes = b""
    error: HoldfastError | None = None
    was_transient: bool = False

    @property
    def is_right(self) -> bool:
        """Whether these are the bytes that were written, as far as the index tells."""
        return self.error is None and self.block.expected in (b"", self.digest)


class FolderReader:
    """Reads one checkpoint's folder. Thread-safe."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def names(self) -> tuple[str, ...]:
        """What lies in the folder; folders end with a slash."""
        return self._store.children(self._folder)

    def size(self, file: str) -> int:
        """Length of a file in bytes."""
        return self._store.head(f"{self._folder}/{file}").nbytes

    def document(self, file: str, max_nbytes: int) -> bytes:
        """All bytes of a file that may have at most `max_nbytes`."""
        return read_document(self._store, f"{self._folder}/{file}", max_nbytes=max_nbytes)

    def header(self, file: str, listed: FileEntry, made_by: FileBlocks | None) -> bytes:
        """What comes before the data of a tensor file."""
        first = self.beginning(file, 8, listed, made_by)
        nbytes = header_nbytes(first, file_nbytes=listed.nbytes, what=file)
        return self.beginning(file, nbytes, listed, made_by)

    def beginning(
        self, file: str, nbytes: int, listed: FileEntry, made_by: FileBlocks | None
    ) -> bytes:
        """The first plain bytes of a file, which a codec may have made."""
        nbytes = min(nbytes, listed.nbytes)
        if made_by is None:
            return self._store.get(f"{self._folder}/{file}", 0, nbytes)
        size = made_by.block_nbytes
        data = bytearray(min(-(-nbytes // size) * size, listed.nbytes))
        for number, (start, stop) in enumerate(split(len(data), size)):
            fault = read_block(self._store, made_by, number, memoryview(data)[start:stop])
            if fault:
                raise CorruptData(f"{file}: block {number} {fault}")
        return bytes(data[:nbytes])

    def look(self, block: Block) -> Seen:
        """Read a block, and once more when it is not what it should be."""
        first = self._look_once(block)
        if first.is_right:
            return first
        second = self._look_once(block)
        return replace(second, was_transient=True) if second.is_right else second

    def _look_once(self, block: Block) -> Seen:
        try:
            data = self._store.get(
                f"{self._folder}/{block.file}", block.start, block.stop - block.start
            )
        except (StoreError, FormatError) as error:
            return Seen(block=block, error=error)
        digest = block_digest(data)
        made_by = block.made_by
        if made_by is not None and digest == block.expected:
            plain = memoryview(bytearray(block.plain[1] - block.plain[0]))
            if fault := decode_block(made_by, block.number, memoryview(data), plain):
                return Seen(block=block, digest=digest, error=CorruptData(fault))
        return Seen(block=block, digest=digest)


def look_at(reader: FolderReader, blocks: Sequence[Block]) -> Iterator[Seen]:
    """What is seen of each block, in order; only a few are in memory at a time."""
    workers = Workers(NUM_THREADS, "holdfast-verify")
    waiting: deque[tuple[Block, Future[Seen]]] = deque()
    try:
        for block in blocks:
            waiting.append((block, workers.submit(partial(reader.look, block))))
            if len(waiting) >= 2 * NUM_THREADS:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())
    finally:
        for _, future in waiting:
            future.cancel()
        workers.close()


def _result(block: Block, future: Future[Seen]) -> Seen:
    try:
        return future.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(
            f"{block.file}: reading block {block.number} took longer than {READ_TIMEOUT_S:.0f} s"
        ) from None
