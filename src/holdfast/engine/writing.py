"""Writing the files of an attempt: many blocks on their way to the disk while others are hashed.

Digests and writes are separate jobs for separate threads. Neither waits for the other, so the
disk always has something to do, and a disk that is slower than the hash leaves cores idle rather
than the other way round. Knows keys and bytes, nothing of a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

from holdfast.engine.workers import Workers, cancel, gather
from holdfast.errors import DeadlineExceeded
from holdfast.format import blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.base import BlockWriter, Store, WritesBlocks

NUM_WRITERS = 8
"""Writes under way at once. They wait for the disk: more of them than cores cost nothing, and
one that ends finds the next already queued."""

FILES_AT_ONCE = 64
"""Each holds up to three descriptors until it is on stable storage."""


class Phase:
    """What a save is doing now, for the errors of those who wait for it."""

    def __init__(self) -> None:
        self.text = "waiting to start"


class Content(Protocol):
    """The bytes of a file, which may come to be while the file is written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        ...

    def block(self, number: int, timeout_s: float) -> memoryview:
        """The memory of a block, when it is there; asked for once, and in order.

        Raises:
            DeadlineExceeded: it was not in time.
        """
        ...

    def digest(self, number: int) -> bytes:
        """The digest of a block that is there, from any thread."""
        ...

    def written(self, number: int) -> None:
        """The memory of a block is not read any more for writing."""
        ...


class Document:
    """A small file whose bytes are there and stay; it is put as a whole."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return len(self.data)

    def digest(self, number: int) -> bytes:
        """See `Content.digest`."""
        start = number * BLOCK_NBYTES
        return blocks.block_digest(memoryview(self.data)[start : start + BLOCK_NBYTES])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """One file of an attempt."""

    key: str
    content: Content | Document


def write_files(
    store: Store,
    files: Iterable[FileToWrite],
    *,
    workers: Workers,
    writers: Workers,
    phase: Phase,
    timeout_s: float,
) -> dict[str, bytes]:
    """Write `files`, which are durable when this returns; gives their block digests by key.

    The next file is asked for while those before it are under way. `workers` hash and `writers`
    write. After an error nobody writes any more, unless the error is that some call would not
    end; what was written is for the caller to remove.

    Raises:
        StoreError: a file could not be written; a sync that failed is not tried again.
        DeadlineExceeded: some file was not done after `timeout_s` seconds.
    """
    digests: dict[str, bytes] = {}
    rest = iter(files)
    while True:
        batch = _Batch(store, phase, timeout_s)
        found = batch.write(islice(rest, FILES_AT_ONCE), workers, writers)
        digests |= found
        if len(found) < FILES_AT_ONCE:
            return digests


class _Batch:
    """Files that are written at once."""

    def __init__(self, store: Store, phase: Phase, timeout_s: float) -> None:
        self._store = store
        self._phase = phase
        self._timeout_s = timeout_s
        self._open: dict[str, BlockWriter] = {}
        self._writes: dict[str, list[Future[None]]] = {}
        self._syncs: dict[str, Future[None]] = {}
        self._hashes: dict[str, list[Future[bytes]]] = {}
        self._failed = False

    def write(
        self, files: Iterable[FileToWrite], workers: Workers, writers: Workers
    ) -> dict[str, bytes]:
        """Everything, or nothing."""
        try:
            for file in files:
                self._phase.text = f"writing {file.key}"
                self._begin(file, workers, writers)
                if self._failed:
                    break
            for key, writes in self._writes.items():
                self._phase.text = f"writing {key}"
                gather(writes, timeout_s=self._timeout_s, what=key)
                if key in self._open:
                    # Behind the writes of all files: one journal commit can serve many syncs.
                    self._syncs[key] = writers.submit(self._open[key].finish)
            return {key: self._end(key) for key in self._writes}
        except DeadlineExceeded:
            self._give_up(timeout_s=0)
            raise
        except BaseException:
            self._give_up(timeout_s=self._timeout_s)
            raise

    def _begin(self, file: FileToWrite, workers: Workers, writers: Workers) -> None:
        content = file.content
        hashes = self._hashes[file.key] = []
        writes = self._writes[file.key] = []
        if isinstance(content, Document):
            writes.append(writers.submit(partial(self._store.put, file.key, content.data)))
            numbers = range(blocks.num_blocks(content.nbytes))
            hashes += [workers.submit(partial(content.digest, number)) for number in numbers]
            return
        writer = self._open[file.key] = _writer(self._store, file.key, content.nbytes)
        for number in range(blocks.num_blocks(content.nbytes)):
            memory = content.block(number, self._timeout_s)
            hashes.append(workers.submit(partial(content.digest, number)))
            writes.append(writers.submit(partial(self._write, writer, content, number, memory)))
            if self._failed:
                return  # the error is in one of the futures

    def _write(
        self,
        writer: BlockWriter,
        content: Content,
        number: int,
        memory: memoryview,
    ) -> None:
        try:
            writer.write(number * BLOCK_NBYTES, memory)
        except BaseException:
            self._failed = True
            raise
        finally:
            content.written(number)

    def _end(self, key: str) -> bytes:
        self._phase.text = f"digesting {key}"
        found = gather(self._hashes[key], timeout_s=self._timeout_s, what=f"digest of {key}")
        if key in self._syncs:
            self._phase.text = f"writing {key} to stable storage"
            gather([self._syncs[key]], timeout_s=self._timeout_s, what=key)
        return b"".join(found)

    def _give_up(self, *, timeout_s: float) -> None:
        jobs: list[Future[bytes] | Future[None]] = [*self._syncs.values()]
        for writes in self._writes.values():
            jobs += writes
        for hashes in self._hashes.values():
            jobs += hashes
        cancel(jobs, timeout_s=timeout_s)
        for writer in self._open.values():
            writer.abort()


def _writer(store: Store, key: str, nbytes: int) -> BlockWriter:
    return (
        store.create(key, nbytes)
        if isinstance(store, WritesBlocks)
        else _Gathered(store, key, nbytes)
    )


class _Gathered:
    """The `BlockWriter` of a store that takes only whole objects."""

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        self._store = store
        self._key = key
        self._data = bytearray(nbytes)

    def write(self, start: int, data: memoryview) -> None:
        """Keep a piece."""
        self._data[start : start + data.nbytes] = data

    def finish(self) -> None:
        """Send them all."""
        self._store.put(self._key, self._data)

    def abort(self) -> None:
        """Nothing was sent."""
