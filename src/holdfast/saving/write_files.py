"""Writes the files of a save: threads write blocks while others hash and encode them.

Digests and writes are separate jobs for separate threads, and neither waits for the other. Encoded
blocks are packed and written in order. After an error nothing may write any more
(tests/saving/test_write_files.py). This module handles keys and bytes, not tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from holdfast.errors import DeadlineExceeded
from holdfast.format import blocks
from holdfast.format.codec import Encoding
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.results import SavePhase, SaveProgress
from holdfast.saving.compression import NUM_PIECES, Encoded, Packer, Throughput
from holdfast.staging.interfaces import BytesContent, Content
from holdfast.store.base import BlockWriter, Store
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import Workers, cancel, gather_results

FILES_AT_ONCE = 64
"""Files written at once; each holds up to three descriptors until it is on stable storage."""

ENCODED_AT_ONCE = 8
"""Most blocks that are encoded and not yet packed; with as many pieces being written, they take
about 140 MiB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """A file of a save to be written: key, content, and encoding if it is compressed."""

    key: str
    content: Content | BytesContent
    encoding: Encoding | None = None
    observer: Callable[[int, memoryview], None] | None = None
    """Callback with the number and the memory of each block of an uncompressed tensor file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A durable file: the digests of its plain blocks, and its stored blocks if compressed."""

    digests: bytes
    stored: StoredBlocks | None = None


def write_files(
    store: Store,
    files: Iterable[FileToWrite],
    *,
    workers: Workers,
    writers: Workers,
    progress: SaveProgress,
    timeout_s: float,
    throughput: Throughput | None = None,
    pieces: LimitedBuffers | None = None,
) -> dict[str, WrittenFile]:
    """Write `files` and wait until they are durable; returns a `WrittenFile` for each key.

    In the save thread. The next file is taken while earlier ones are being written. `workers` hash
    and encode, `writers` write; `throughput` measures the store, and `pieces` is memory for stored
    blocks. After an error no thread writes any more, unless a call did not end in time. The caller
    removes the written files.
    """
    written: dict[str, WrittenFile] = {}
    rest, measured = iter(files), throughput or Throughput()
    while True:
        batch = _Batch(store, workers, writers, pieces, measured, progress, timeout_s)
        of_batch = batch.write_all_files(islice(rest, FILES_AT_ONCE))
        written |= of_batch
        if len(of_batch) < FILES_AT_ONCE:
            return written


class _Batch:
    """Writes up to `FILES_AT_ONCE` files in parallel, and waits until they are durable."""

    def __init__(
        self,
        store: Store,
        workers: Workers,
        writers: Workers,
        pieces: LimitedBuffers | None,
        throughput: Throughput,
        progress: SaveProgress,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._workers = workers
        self._writers = writers
        self._pieces = pieces
        self._throughput = throughput
        self._progress = progress
        self._timeout_s = timeout_s
        self._open: dict[str, BlockWriter] = {}
        self._writes: dict[str, list[Future[None]]] = {}
        self._syncs: dict[str, Future[None]] = {}
        self._hashes: dict[str, list[Future[bytes]]] = {}
        self._packers: dict[str, Packer] = {}
        self._encoding: deque[tuple[Packer, Future[Encoded] | None]] = deque()
        """Blocks that are being encoded, oldest first; None marks the end of a file."""
        self._failed = False

    def write_all_files(self, files: Iterable[FileToWrite]) -> dict[str, WrittenFile]:
        """Write all files, return digests and blocks by key; on an error, cancel all writes.

        In the save thread.
        """
        try:
            for file in files:
                self._progress.enter(SavePhase.WRITING, file.key)
                self._start_file(file)
                if self._failed:
                    break
            self._pack(leave=0)
            for key, writes in self._writes.items():
                self._progress.enter(SavePhase.WRITING, key)
                gather_results(writes, timeout_s=self._timeout_s, what=key)
                if key in self._open:
                    # Behind the writes of all files: one journal commit can serve many syncs.
                    self._syncs[key] = self._writers.submit(partial(self._finish_file, key))
            return {key: self._wait_for(key) for key in self._writes}
        except DeadlineExceeded:
            self._cancel_all(timeout_s=0)
            raise
        except BaseException:
            self._cancel_all(timeout_s=self._timeout_s)
            raise

    def _start_file(self, file: FileToWrite) -> None:
        content = file.content
        hashes = self._hashes[file.key] = []
        writes = self._writes[file.key] = []
        if file.encoding is not None:
            self._begin_encoded(file.key, content, file.encoding)
            return
        if isinstance(content, BytesContent):
            writes.append(self._writers.submit(partial(self._store.put, file.key, content.data)))
            numbers = range(blocks.num_blocks(content.nbytes))
            hashes += [self._workers.submit(partial(content.digest, number)) for number in numbers]
            return
        writer = self._open[file.key] = self._store.create(file.key, content.nbytes)
        for number in range(blocks.num_blocks(content.nbytes)):
            memory = content.block(number, self._timeout_s)
            if file.observer is not None:
                file.observer(number, memory)
            hashes.append(self._workers.submit(partial(content.digest, number)))
            job = partial(self._write_piece, writer, number * BLOCK_NBYTES, memory)
            writes.append(self._writers.submit(partial(job, partial(content.written, number))))
            if self._failed:
                return  # the error is in one of the futures

    def _begin_encoded(self, key: str, content: Content | BytesContent, encoding: Encoding) -> None:
        nbytes = blocks.max_file_nbytes(content.nbytes)
        writer = self._open[key] = self._store.create(key, nbytes, at_most=True)
        pieces = self._pieces = self._pieces or LimitedBuffers(NUM_PIECES, BLOCK_NBYTES)

        def send(start: int, piece: memoryview, used: int) -> None:
            job = partial(self._write_piece, writer, start, piece[:used])
            done = partial(pieces.release_buffer, piece)
            self._writes[key].append(self._writers.submit(partial(job, done)))

        packer = self._packers[key] = Packer(pieces, send, self._timeout_s)
        for number in range(blocks.num_blocks(content.nbytes)):
            memory = content.block(number, self._timeout_s)
            self._hashes[key].append(self._workers.submit(partial(content.digest, number)))
            job = partial(_encode, encoding, content, number, memory)
            self._encoding.append((packer, self._workers.submit(job)))
            self._pack(leave=ENCODED_AT_ONCE)
            if self._failed:
                return
        self._encoding.append((packer, None))

    def _pack(self, *, leave: int) -> None:
        """Pack encoded blocks, oldest first, until `leave` of them are left."""
        while len(self._encoding) > leave and not self._failed:
            packer, block = self._encoding[0]
            if block is None:
                packer.send_rest()
            else:
                packer.append_block(
                    *gather_results([block], timeout_s=self._timeout_s, what="encoding a block")
                )
            self._encoding.popleft()

    def _write_piece(
        self, writer: BlockWriter, start: int, memory: memoryview, done: Callable[[], None]
    ) -> None:
        """Write a block, and free its memory. In a writer thread."""
        try:
            with self._throughput.taking(memory.nbytes):
                writer.write(start, memory)
        except BaseException:
            self._failed = True
            raise
        finally:
            done()

    def _finish_file(self, key: str) -> None:
        """Wait until a file is on stable storage. In a writer thread."""
        packer = self._packers.get(key)
        with self._throughput.taking():
            self._open[key].finish(None if packer is None else packer.packed_blocks.nbytes)

    def _wait_for(self, key: str) -> WrittenFile:
        self._progress.enter(SavePhase.DIGESTING, key)
        found = gather_results(
            self._hashes[key], timeout_s=self._timeout_s, what=f"digest of {key}"
        )
        if key in self._syncs:
            self._progress.enter(SavePhase.SYNCING, key)
            gather_results([self._syncs[key]], timeout_s=self._timeout_s, what=key)
        packer = self._packers.get(key)
        return WrittenFile(
            digests=b"".join(found), stored=None if packer is None else packer.packed_blocks
        )

    def _cancel_all(self, *, timeout_s: float) -> None:
        jobs: list[Future[Any]] = [*self._syncs.values()]
        for writes in self._writes.values():
            jobs += writes
        for hashes in self._hashes.values():
            jobs += hashes
        jobs += [block for _, block in self._encoding if block is not None]
        cancel(jobs, timeout_s=timeout_s)
        for writer in self._open.values():
            writer.abort()


def _encode(
    encoding: Encoding, content: Content | BytesContent, number: int, memory: memoryview
) -> Encoded:
    try:
        data = encoding.encode(number, memory)
        # Digested while it is in the processor's cache.
        return Encoded(data=data, digest=blocks.block_digest(data))
    finally:
        content.written(number)
