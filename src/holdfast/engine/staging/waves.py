"""Staging in waves: a few blocks at a time, for a state larger than the memory budget.

Some blocks are copied, hashed and written, and their memory is reused for the next ones. The state
must not change before the last block is copied, so training waits until then: less memory costs
the time of the write.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from typing_extensions import override

from holdfast.engine.staging.arena import Arena
from holdfast.engine.staging.image import KnownFile
from holdfast.engine.staging.staged import StagedContent, Transfer
from holdfast.engine.workers import Workers
from holdfast.errors import DeadlineExceeded
from holdfast.format.blocks import block_digest
from holdfast.format.layout import BLOCK_NBYTES


class Pool:
    """Pool of a fixed number of block-sized buffers."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory, in whole blocks.

        Raises:
            OutOfMemory: the system refuses.
        """
        self._arena = Arena(nbytes - nbytes % BLOCK_NBYTES)
        self._bytes = torch.frombuffer(self._arena.memory, dtype=torch.uint8)
        self._free: SimpleQueue[int] = SimpleQueue()
        for number in range(nbytes // BLOCK_NBYTES):
            self._free.put(number)

    def take(self, timeout_s: float) -> int:
        """Wait for a free buffer, and return its number.

        Raises:
            DeadlineExceeded: none was given back in time.
        """
        try:
            return self._free.get(timeout=timeout_s)
        except Empty:
            raise DeadlineExceeded(
                f"memory for a wave: no block was written within {timeout_s:.0f} s"
            ) from None

    def give_back(self, buffer: int) -> None:
        """Return an unused buffer to the pool."""
        self._free.put(buffer)

    def memory(self, buffer: int, nbytes: int) -> memoryview:
        """Return the memory of the first `nbytes` of a buffer."""
        return self._arena.memory[buffer * BLOCK_NBYTES :][:nbytes]

    def bytes(self, buffer: int, start: int, stop: int) -> Tensor:
        """Return bytes `start` to `stop` of a buffer as a tensor view."""
        return self._bytes[buffer * BLOCK_NBYTES + start : buffer * BLOCK_NBYTES + stop]


class WaveTransfer(Transfer):
    """Copies a state block by block, as it is written, and reuses the memory of written blocks."""

    is_early = True

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], pool: Pool) -> None:
        """`tensors`: name of a file → the live tensors of its component."""
        self.pool = pool
        self.waited_s = 0.0
        self._tensors = tensors
        self._is_finished = threading.Event()
        self._lock = threading.Lock()
        """Held while a block is copied, as the live state must not change then."""
        self._error: BaseException | None = None

    @override
    def copy(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        # The thread that writes copies each block when it needs it; training only waits.
        began = time.perf_counter()
        if not self._is_finished.wait(timeout_s):
            raise DeadlineExceeded(f"staging in waves: not done after {timeout_s:.0f} s")
        self.waited_s = time.perf_counter() - began

    @override
    def content(self, known: KnownFile) -> WaveContent:
        tensors = self._tensors[known.file.name]
        known.clear_versions()
        for position in known.large:
            known.note_version(position, tensors[known.file.specs[position].key])
        return WaveContent(known, tensors, self)

    @override
    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error

    @override
    def settle(self, timeout_s: float) -> None:
        """No-op: only the thread that writes the save copies."""

    @override
    def finish(self) -> None:
        self._is_finished.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block `fail` during the `with` block; raise its error if it was called before."""
        with self._lock:
            if self._error is not None:
                raise self._error
            yield


class WaveContent(StagedContent):
    """Content of a tensor file, whose blocks are copied when they are requested."""

    def __init__(
        self, known: KnownFile, tensors: Mapping[str, Tensor], transfer: WaveTransfer
    ) -> None:
        self._known = known
        self._file = known.file
        self._tensors = tensors
        self._transfer = transfer
        self._pool = transfer.pool
        self._buffers: dict[int, int] = {}
        self._half_done: set[int] = set()
        self._lock = threading.Lock()
        self._contiguous: tuple[int, Tensor] | None = None

    @property
    @override
    def nbytes(self) -> int:
        return self._file.nbytes

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        buffer = self._pool.take(timeout_s)
        self._buffers[number] = buffer
        return self.fill(buffer, number)

    @override
    def digest(self, number: int) -> bytes:
        try:
            memory = self._pool.memory(self._buffers[number], self.block_nbytes(number))
            digest = self._known.digests[number] = block_digest(memory)
            return digest
        finally:
            self._release(number)

    @override
    def written(self, number: int) -> None:
        self._release(number)

    @override
    def is_unchanged(self, timeout_s: float) -> bool:
        # There is no copy to compare with, so blocks are hashed, up to the first that differs.
        for number, committed in enumerate([*self._known.digests]):
            self.block(number, timeout_s)
            digest = self.digest(number)
            self.written(number)
            if digest != committed:
                return False
        return True

    def _release(self, number: int) -> None:
        """Free a block's buffer on the second call, when it is both hashed and written."""
        # Called by the thread that hashes and by the one that writes.
        with self._lock:
            if number not in self._half_done:
                self._half_done.add(number)
                return
            buffer = self._buffers.pop(number)
        self._pool.give_back(buffer)

    def block_nbytes(self, number: int) -> int:
        """Return the length of a block."""
        return min(BLOCK_NBYTES, self._file.nbytes - number * BLOCK_NBYTES)

    def fill(self, buffer: int, number: int) -> memoryview:
        """Copy one block, with its parts of the header and the tensors, into a buffer."""
        start = number * BLOCK_NBYTES
        memory = self._pool.memory(buffer, self.block_nbytes(number))
        header = self._file.header[start : start + len(memory)]
        memory[: len(header)] = header
        stop, starts = start + len(memory), self._file.starts
        position = max(bisect_right(starts, start) - 1, 0)
        # Live tensors may require grad, and autograd would record the copy.
        with self._transfer.held(), torch.inference_mode(False), torch.no_grad():
            while position < len(starts) and starts[position] < stop:
                first = starts[position]
                last = first + self._file.specs[position].nbytes
                low, high = max(first, start), min(last, stop)
                if low < high:
                    part = self._flat(position)[low - first : high - first]
                    self._pool.bytes(buffer, low - start, high - start).copy_(part)
                position += 1
        return memory

    def _flat(self, position: int) -> Tensor:
        """Return a tensor's bytes as a flat tensor; a non-contiguous one is copied, and cached."""
        source = self._tensors[self._file.specs[position].key]
        if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
            return source.view(-1).view(torch.uint8)
        if self._contiguous is None or self._contiguous[0] != position:
            copy = torch.empty(source.shape, dtype=source.dtype, device=source.device)
            self._contiguous = (position, copy.copy_(source).view(-1).view(torch.uint8))
        return self._contiguous[1]
