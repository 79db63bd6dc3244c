"""Writing the files of an attempt: many blocks on their way to the disk while others are hashed.

Digests and writes are separate jobs for separate threads. Neither waits for the other, so the
disk always has something to do, and a disk that is slower than the hash leaves cores idle rather
than the other way round. Knows keys and bytes, nothing of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from holdfast.engine.workers import Workers, cancel, gather
from holdfast.errors import DeadlineExceeded
from holdfast.format import blocks
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToWrite:
    """One file of an attempt.

    `digests` has an item for each block, None where the digest is still to be taken; without
    items, no block has one. `memory` must not change before the write is over. A file is written
    in pieces where the store can do that, unless it `is_document`: small, and put as a whole.
    """

    key: str
    memory: memoryview
    digests: Sequence[bytes | None] = ()
    is_document: bool = False


def write_files(
    store: Store,
    files: Sequence[FileToWrite],
    *,
    workers: Workers,
    writers: Workers,
    phase: Phase,
    timeout_s: float,
) -> dict[str, bytes]:
    """Write `files`, which are durable when this returns; gives their block digests by key.

    `workers` hash and `writers` write. After an error nobody writes any more, unless the error is
    that some call would not end; what was written is for the caller to remove.

    Raises:
        StoreError: a file could not be written; a sync that failed is not tried again.
        DeadlineExceeded: some file was not done after `timeout_s` seconds.
    """
    digests: dict[str, bytes] = {}
    for first in range(0, len(files), FILES_AT_ONCE):
        batch = _Batch(store, files[first : first + FILES_AT_ONCE], phase, timeout_s)
        digests |= batch.write(workers, writers)
    return digests


class _Batch:
    """Files that are written at once."""

    def __init__(
        self, store: Store, files: Sequence[FileToWrite], phase: Phase, timeout_s: float
    ) -> None:
        self._store = store
        self._files = files
        self._phase = phase
        self._timeout_s = timeout_s
        self._open: dict[str, BlockWriter] = {}
        self._writes: dict[str, list[Future[None]]] = {}
        self._syncs: dict[str, Future[None]] = {}
        self._hashes: dict[str, list[Future[bytes]]] = {}

    def write(self, workers: Workers, writers: Workers) -> dict[str, bytes]:
        """Everything, or nothing."""
        try:
            for file in self._files:
                self._hashes[file.key] = [workers.submit(job) for job in _hashing(file)]
                self._phase.text = f"creating {file.key}"
                self._begin(file, writers)
            for file in self._files:
                self._phase.text = f"writing {file.key}"
                self._wait(file.key, self._writes[file.key])
                if file.key in self._open:
                    # Behind the writes of all files: one journal commit can serve many syncs.
                    self._syncs[file.key] = writers.submit(self._open[file.key].finish)
            return {file.key: self._end(file) for file in self._files}
        except DeadlineExceeded:
            self._give_up(timeout_s=0)
            raise
        except BaseException:
            self._give_up(timeout_s=self._timeout_s)
            raise

    def _begin(self, file: FileToWrite, writers: Workers) -> None:
        if file.is_document or not isinstance(self._store, WritesBlocks):
            whole = partial(self._store.put, file.key, file.memory)
            self._writes[file.key] = [writers.submit(whole)]
            return
        writer = self._open[file.key] = self._store.create(file.key, len(file.memory))
        self._writes[file.key] = [
            writers.submit(partial(writer.write, start, file.memory[start:stop]))
            for start, stop in blocks.split(len(file.memory))
        ]

    def _end(self, file: FileToWrite) -> bytes:
        self._phase.text = f"digesting {file.key}"
        found = gather(
            self._hashes[file.key], timeout_s=self._timeout_s, what=f"digest of {file.key}"
        )
        if file.key in self._syncs:
            self._phase.text = f"writing {file.key} to stable storage"
            self._wait(file.key, [self._syncs[file.key]])
        new = iter(found)
        known = file.digests or [None] * len(found)
        return b"".join(next(new) if digest is None else digest for digest in known)

    def _wait(self, key: str, jobs: Sequence[Future[None]]) -> None:
        gather(jobs, timeout_s=self._timeout_s, what=key)

    def _give_up(self, *, timeout_s: float) -> None:
        jobs: list[Future[bytes] | Future[None]] = [*self._syncs.values()]
        for writes in self._writes.values():
            jobs += writes
        for hashes in self._hashes.values():
            jobs += hashes
        cancel(jobs, timeout_s=timeout_s)
        for writer in self._open.values():
            writer.abort()


def _hashing(file: FileToWrite) -> Iterator[partial[bytes]]:
    """A job for each block without a digest."""
    for number, (start, stop) in enumerate(blocks.split(len(file.memory))):
        if not file.digests or file.digests[number] is None:
            yield partial(blocks.block_digest, file.memory[start:stop])
