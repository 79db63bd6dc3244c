"""Checked blocks of a checkpoint's files, of which a few are kept for the next reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.errors import CorruptData, DeadlineExceeded
from holdfast.interop.files import copy_bytes
from holdfast.loading.block_reader import FileBlocks, begin_block
from holdfast.store.base import Store
from holdfast.threads.buffers import Buffers

KEPT_NBYTES = 64 << 20
"""Most bytes of blocks that are kept while nobody reads from them: more than `reading.pieces` reads
ahead, so that a thread that lags behind still finds its block."""
READ_TIMEOUT_S = 600.0
"""Longest wait for a block that another thread reads."""

_BlockId: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Held:
    """A block that is being read, or was read and checked."""

    memory: memoryview
    """A pooled buffer; the block is its beginning."""
    nbytes: int
    read: Future[None] = field(default_factory=Future)
    num_users: int = 1


class CheckedBlocks:
    """Reads ranges of a checkpoint's files by whole blocks, each checked. Thread-safe."""

    def __init__(
        self,
        store: Store,
        files: Mapping[str, FileBlocks],
        nbytes: Mapping[str, int],
        block_nbytes: int,
    ) -> None:
        """Read `files` of `store`, by name; `nbytes` has their decompressed lengths."""
        self._store = store
        self._files = files
        self._nbytes = nbytes
        self._block_nbytes = block_nbytes
        self._buffers = Buffers()
        self._stored = Buffers()
        self._lock = threading.Lock()
        self._held: dict[_BlockId, _Held] = {}
        """The blocks by the time of their last use."""

    def fill_memory(self, file: str, start: int, memory: memoryview) -> None:
        """Fill `memory` from byte `start` of a file."""
        size, done = self._block_nbytes, 0
        while done < memory.nbytes:
            number, skipped = divmod(start + done, size)
            count = min(size - skipped, memory.nbytes - done)
            with self._hold_block(file, number) as plain:
                copy_bytes(plain[skipped : skipped + count], memory[done : done + count])
            done += count

    def nbytes_lent(self, start: int) -> int:
        """Return the most bytes from byte `start` of a file on that can be lent at once."""
        return self._block_nbytes - start % self._block_nbytes

    @contextmanager
    def lent(self, file: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield bytes of one block of a file where they lie; they stay until the `with` ends."""
        number, skipped = divmod(start, self._block_nbytes)
        with self._hold_block(file, number) as plain:
            yield plain[skipped : skipped + nbytes]

    @contextmanager
    def _hold_block(self, file: str, number: int) -> Iterator[memoryview]:
        held, is_mine = self._hold((file, number))
        try:
            if is_mine:
                self._read_checked_block(file, number, held)
            _wait_for_read(held.read, f"{self._store.url}/{self._files[file].key}: block {number}")
            yield held.memory[: held.nbytes]
        finally:
            self._release_block(held)

    def _hold(self, block: _BlockId) -> tuple[_Held, bool]:
        """Return a block that stays until it is released, and whether the caller must read it."""
        with self._lock:
            held = self._held.pop(block, None)
            if held is not None:
                held.num_users += 1
                self._held[block] = held
                return held, False
            file, number = block
            nbytes = min(self._block_nbytes, self._nbytes[file] - number * self._block_nbytes)
            held = self._held[block] = _Held(
                self._buffers.acquire_buffer(self._block_nbytes), nbytes
            )
            return held, True

    def _read_checked_block(self, file: str, number: int, held: _Held) -> None:
        blocks = self._files[file]
        try:
            check = begin_block(
                self._store,
                blocks,
                number,
                held.memory[: held.nbytes],
                verify=True,
                buffers=self._stored,
            )
            if fault := check():
                raise CorruptData(f"{self._store.url}/{blocks.key}: block {number} {fault}")
        except BaseException as error:
            with self._lock:
                self._held.pop((file, number), None)  # the next who needs it reads it again
            held.read.set_exception(error)
            raise
        held.read.set_result(None)

    def _release_block(self, held: _Held) -> None:
        with self._lock:
            held.num_users -= 1
            unused = [block for block, one in self._held.items() if not one.num_users]
            num_excess = len(unused) - max(1, KEPT_NBYTES // self._block_nbytes)
            for block in unused[: max(num_excess, 0)]:
                self._buffers.release_buffer(self._held.pop(block).memory)


def _wait_for_read(read: Future[None], what: str) -> None:
    try:
        read.result(timeout=READ_TIMEOUT_S)
    except FutureTimeout:
        raise DeadlineExceeded(f"{what} was not read within {READ_TIMEOUT_S:.0f} s") from None
