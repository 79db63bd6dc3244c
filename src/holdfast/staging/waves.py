"""Staging in waves: a few blocks at a time, for a state larger than the memory budget.

The memory of written blocks is reused for the next ones. The state must not change before the last
block is copied, so training waits until then (tests/staging/test_waves.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from holdfast.errors import DeadlineExceeded, time_limit
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.staging.interfaces import KnownFile, StagingTransfer
from holdfast.staging.pool import PooledContent
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import Workers


class WaveTransfer(StagingTransfer):
    """Copies a state block by block, as it is written, and reuses the memory of written blocks."""

    is_early = True

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], pool: LimitedBuffers) -> None:
        """`tensors`: name of a file → the live tensors of its component."""
        self.pool = pool
        self.waited_s = 0.0
        self._tensors = tensors
        self._is_finished = threading.Event()
        self._lock = threading.Lock()
        """Held while a block is copied, as the live state must not change then."""
        self._error: BaseException | None = None

    @override
    def run_copies(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        # The thread that writes copies each block when it needs it; training only waits.
        began = time.perf_counter()
        if not self._is_finished.wait(timeout_s):
            raise DeadlineExceeded(f"staging in waves: not done after {time_limit(timeout_s)}")
        self.waited_s = time.perf_counter() - began

    @override
    def content(self, known: KnownFile) -> WaveContent:
        tensors = self._tensors[known.file.name]
        known.clear_versions()
        for position in known.large:
            known.note_version(position, tensors[known.file.specs[position].key])
        return WaveContent(known, tensors, self)

    @override
    def cancel_copying(self, error: BaseException) -> None:
        with self._lock:
            self._error = error

    @override
    def wait_for_threads(self, timeout_s: float) -> None:
        """No-op: only the thread that writes the save copies."""

    @override
    def release_waiters(self) -> None:
        self._is_finished.set()

    @contextmanager
    def block_failure(self) -> Iterator[None]:
        """Block `cancel_copying` in the `with` block; raise its error if it was called before."""
        with self._lock:
            if self._error is not None:
                raise self._error
            yield


class WaveContent(PooledContent):
    """Content of a tensor file, whose blocks are copied when they are requested."""

    def __init__(
        self, known: KnownFile, tensors: Mapping[str, Tensor], transfer: WaveTransfer
    ) -> None:
        super().__init__(known, transfer.pool)
        self._tensors = tensors
        self._transfer = transfer
        self._contiguous: tuple[str, Tensor] | None = None

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        buffer = self._buffers[number] = self._pool.acquire_buffer(timeout_s)
        return self.fill(buffer, number)

    def fill(self, buffer: memoryview, number: int) -> memoryview:
        """Copy one block, with its parts of the header and the tensors, into a buffer."""
        memory = buffer[: self.block_nbytes(number)]
        # Live tensors may require grad, and autograd would record the copy.
        with self._transfer.block_failure(), torch.inference_mode(False), torch.no_grad():
            for spec, first, part in self._file.fill_block(number * BLOCK_NBYTES, memory):
                flat = self._get_flat_bytes(spec.key)
                target = torch.frombuffer(part, dtype=torch.uint8)
                target.copy_(flat[first : first + len(part)])
        return memory

    def _get_flat_bytes(self, key: str) -> Tensor:
        """Return a tensor's bytes as a flat tensor; a non-contiguous one is copied, and cached."""
        source = self._tensors[key]
        if source.is_contiguous() and not (source.is_conj() or source.is_neg()):
            return source.view(-1).view(torch.uint8)
        if self._contiguous is None or self._contiguous[0] != key:
            copy = torch.empty(source.shape, dtype=source.dtype, device=source.device)
            self._contiguous = (key, copy.copy_(source).view(-1).view(torch.uint8))
        return self._contiguous[1]
