"""Parallel reads of planned blocks: each is read, checked, and copied to its destinations.

Needs memory for 16 blocks, however large the state is. If a block is damaged, others may have been
copied already; so either all of them are checked before, or the caller accepts that the live state
is undefined until a whole load succeeds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import CorruptData, DeadlineExceeded, HoldfastError, Tampered
from holdfast.loading.block_reader import (
    FileBlocks,
    begin_block,
    cached_block,
    check_size,
    is_block,
)
from holdfast.loading.open import Opened
from holdfast.loading.plan import (
    BlockId,
    BlockRead,
    BlockTurn,
    ReadPlan,
    Segment,
    Sharing,
    runs_of,
    windows,
)
from holdfast.loading.staged_blocks import StagedBlock, StagedBlocks
from holdfast.ranks.coordinator import RankTransfer
from holdfast.staging.device import pin
from holdfast.store.base import Store
from holdfast.threads.buffers import Buffers
from holdfast.threads.workers import Threads, Use


class _PinnedBuffer:
    """A pinned buffer, from which a device copies; kept alive until the device unpins it."""

    def __init__(self, buffer: memoryview, device: torch.device) -> None:
        self._buffer = buffer
        pin(torch.frombuffer(buffer, dtype=torch.uint8), self, device)


_NUM_KEPT = 4
"""Most blocks cached from small reads: the next tensors are often in them, too."""
_NUM_SMALL = 2
"""Most blocks of a small read, whose blocks are cached."""
_SEGMENT_NBYTES_MIN = 16 * 1024
"""Least average bytes of the segments that are copied straight from the page cache."""


_NUM_AHEAD = 8
"""Most blocks that are read ahead for other ranks."""
_NUM_TOGETHER = 8
"""Most blocks of one transfer between ranks; two transfers are under way."""


class ReadPipeline:
    """Executes read plans for the tensor files of one checkpoint, on several threads."""

    staged: StagedBlocks | None = None
    """Blocks in shared memory, which are not read from the store."""

    def __init__(
        self,
        store: Store,
        opened: Opened,
        *,
        threads: Threads,
        timeout_s: float,
        verify: bool,
        sharing: Sharing | None = None,
    ) -> None:
        self._store = store
        self._opened = opened
        self._threads = threads
        self._timeout_s = timeout_s
        self._verify = verify
        self._sharing = sharing
        self._block_nbytes = opened.index.block_nbytes
        self._files: dict[str, FileBlocks] = {}
        self._buffers = Buffers()
        self._pinned: dict[int, _PinnedBuffer] = {}
        """`id` of a buffer → its pinned form."""
        self._device: torch.device | None = None
        self._kept: dict[BlockId, memoryview] = {}
        self.failure: BaseException | None = None

    def register_file(self, file: str) -> None:
        """Check that a tensor file exists in full length, and register it for `run`."""
        opened, entry = self._opened, self._opened.manifest.files[file]
        check_size(self._store, f"{opened.folder}/{file}", entry)
        self._files[file] = FileBlocks.from_entries(opened.folder, file, entry, opened.index)

    def pin_for(self, device: torch.device) -> None:
        """Pin buffers from now on, for copies of blocks to a device."""
        self._device = device

    def is_own(self, file: str) -> bool:
        """Whether this rank reads all that it needs of a file by itself."""
        sharing = self._sharing
        return sharing is None or (sharing.is_own is not None and sharing.is_own(file))

    def run(self, plan: ReadPlan) -> None:
        """Read, check and copy all blocks of a plan, and wait for them."""
        reads: Mapping[BlockId, BlockRead] = plan.reads
        if self._sharing is not None and reads:
            reads = self._run_shared(reads, self._sharing)
        given_up = threading.Event()
        # In the order of the files, in which a disk is read fastest.
        blocks = [block for block in sorted(reads) if not self._copy_kept(block, reads[block])]
        is_small = len(blocks) <= _NUM_SMALL
        what = f"reading {self._store.url}/{self._opened.folder}"
        try:
            with self._store.keeping_open():
                self._threads.read_all(
                    [
                        partial(self._read_block, block, reads[block], given_up, keeps=is_small)
                        for block in blocks
                    ],
                    timeout_s=self._timeout_s,
                    what=what,
                )
        except BaseException as error:
            self.failure = error
            # A read that hangs may return much later, and then sees `given_up`. Copies under way
            # are waited for: after this the live tensors no longer change.
            given_up.set()
            for read in reads.values():
                with read.copying:
                    continue
            raise
        while len(self._kept) > _NUM_KEPT:
            self._buffers.release_buffer(self._kept.pop(next(iter(self._kept))))

    def _run_shared(
        self, reads: Mapping[BlockId, BlockRead], sharing: Sharing
    ) -> Mapping[BlockId, BlockRead]:
        """Read and exchange the blocks that other ranks need, too; return the other reads.

        Raises what `run` raises, but only at the end. What this rank cannot read it sends as
        undefined bytes, and no rank uses any, because this one says that it failed.
        """
        needed = sorted(reads)
        if sharing.is_own is not None:
            needed = [block for block in needed if not sharing.is_own(block[0])]
            if not needed:
                return reads
        turns = sharing.agree(runs_of(needed))
        self.exchange_blocks(turns, reads)
        shared = {turn.block for turn in turns}
        return {block: read for block, read in reads.items() if block not in shared}

    def exchange_blocks(
        self, turns: Sequence[BlockTurn], reads: Mapping[BlockId, BlockRead]
    ) -> None:
        """Take part in turns, also in those of blocks that only other ranks need."""
        assert self._sharing is not None, "ranks share what they read"
        end = time.monotonic() + self._sharing.timeout_s
        opened = self._opened
        for file in sorted({turn.block[0] for turn in turns} - self._files.keys()):
            # Unchecked: an error here, before the turns, would let the other ranks wait.
            entry = opened.manifest.files[file]
            self._files[file] = FileBlocks.from_entries(opened.folder, file, entry, opened.index)
        try:
            with self._store.keeping_open():
                _Exchange(self, reads, self._sharing, turns, end).take_turns()
        except BaseException as error:
            self.failure = error
            raise

    def memory_of(self, block: BlockId, read: BlockRead) -> memoryview:
        """Return the memory into which a block is read, of its length."""
        if read.memory is not None:
            return read.memory
        file, number = block
        left = self._opened.manifest.files[file].nbytes - number * self._block_nbytes
        return self._buffer()[: min(self._block_nbytes, left)]

    def submit_block(self, block: BlockId, memory: memoryview) -> Future[None]:
        """Begin to read and check a block."""
        return self._threads.submit_read(partial(self._begin_checked, block, memory))

    def find_fault(self, memories: Sequence[tuple[BlockId, memoryview]]) -> CorruptData | None:
        """Compare blocks that have come from other ranks with their digests."""
        for (file, number), memory in memories if self._verify else ():
            if not is_block(memory, self._files[file].digests, number):
                where = f"{self._opened.folder}/{file}: block {number}"
                return CorruptData(f"{where} arrived from another rank with different bytes")
        return None

    def use_block(self, read: BlockRead, memory: memoryview) -> None:
        """Copy a block that is right to its destinations, and reuse its memory if it may be."""
        _copy_segments(memory, read.segments)
        if read.memory is None:
            self._buffers.release_buffer(memory)

    def drop_buffers(self) -> None:
        """Free the memory of the read buffers."""
        self._buffers = Buffers()

    def _copy_kept(self, block: BlockId, read: BlockRead) -> bool:
        """Copy a block to its destinations from this reader's cache; False if it is not there."""
        kept = self._kept.get(block)
        if kept is None or read.memory is not None:
            return False
        _copy_segments(kept, read.segments)
        return True

    def _read_block(
        self, block: BlockId, read: BlockRead, given_up: threading.Event, *, keeps: bool
    ) -> Use | None:
        """Read a block; return a function that checks and copies it, or None if it is done."""
        if given_up.is_set():
            return None
        if self.staged is not None:
            held = self.staged.find_block(self._files[block[0]], block[1])
            if held is not None:
                return partial(self._use_staged, block, read, given_up, held)
        return self._read_stored(block, read, given_up, keeps=keeps)

    def _use_staged(
        self, block: BlockId, read: BlockRead, given_up: threading.Event, held: StagedBlock
    ) -> None:
        """Copy a block from shared memory to its destinations, or read it if that is damaged."""
        memory = self.memory_of(block, read)
        try:
            with read.copying:
                if given_up.is_set():
                    return
                targets = None if read.memory is not None else _targets(read.segments, memory)
                is_right = held.read_into([memory] if targets is None else targets)
                if is_right and targets is None:
                    _copy_segments(memory, read.segments)
        finally:
            if read.memory is None:
                self._buffers.release_buffer(memory)
        if not is_right and (use := self._read_stored(block, read, given_up, keeps=False)):
            use()

    def _read_stored(
        self, block: BlockId, read: BlockRead, given_up: threading.Event, *, keeps: bool
    ) -> Use | None:
        if read.memory is not None:
            # Not used before the whole plan has succeeded, so a late read does no harm.
            fill = self._begin_checked(block, read.memory)
            return partial(self._copy_block, read, given_up, fill) if read.segments else fill
        file, number = block
        left = self._opened.manifest.files[file].nbytes - number * self._block_nbytes
        buffer = self._buffer()
        memory = buffer[: min(self._block_nbytes, left)]
        use: Use | None = None
        try:
            if keeps or not self._copy_from_page_cache(block, read, memory, given_up):
                fill = self._begin_checked(block, memory)
                use = partial(self._copy_and_free, block, read, given_up, buffer, fill, keeps=keeps)
        finally:
            if use is None:
                self._buffers.release_buffer(buffer)
        return use

    def _copy_block(self, read: BlockRead, given_up: threading.Event, fill: Use) -> None:
        fill()
        assert read.memory is not None
        with read.copying:
            if not given_up.is_set():
                _copy_segments(read.memory, read.segments)

    def _copy_and_free(
        self,
        block: BlockId,
        read: BlockRead,
        given_up: threading.Event,
        buffer: memoryview,
        fill: Use,
        *,
        keeps: bool,
    ) -> None:
        is_kept = False
        try:
            fill()
            with read.copying:
                if not given_up.is_set():
                    _copy_segments(buffer, read.segments)
                    # A component that reads its tensors one by one needs this block again.
                    if keeps:
                        self._kept[block], is_kept = buffer, True
        finally:
            if not is_kept:
                self._buffers.release_buffer(buffer)

    def _copy_from_page_cache(
        self, block: BlockId, read: BlockRead, memory: memoryview, given_up: threading.Event
    ) -> bool:
        """Copy a block, unwanted bytes into `memory`, from the page cache, if possible."""
        targets = _targets(read.segments, memory)
        if targets is None:
            return False
        file, number = block
        fill = cached_block(self._store, self._files[file], number, len(memory))
        if fill is None:
            return False
        with read.copying:
            # Nothing in this block may hang: a load that is given up waits for it.
            return given_up.is_set() or fill(targets, self._verify)

    def _begin_checked(self, block: BlockId, memory: memoryview) -> Use:
        """Read a block; return a function that fills `memory` with its plain, checked bytes."""
        file, number = block
        start = number * self._block_nbytes
        stop = start + len(memory)
        blocks = self._files[file]
        with self._naming_tensors(file, start, stop):
            check = begin_block(
                self._store, blocks, number, memory, verify=self._verify, buffers=self._buffers
            )

        def fill() -> None:
            with self._naming_tensors(file, start, stop):
                fault = check()
            if fault:
                raise CorruptData(
                    f"{self._store.url}/{blocks.key}: block {number} (bytes {start} to {stop}) "
                    f"{fault}; {self._contents(file, start, stop)}"
                )

        return fill

    def _buffer(self) -> memoryview:
        """Return memory for a block, pinned if a device is to copy from it."""
        # Pinning is slow, so it is done once for each buffer, which is reused often.
        buffer = self._buffers.acquire_buffer(self._block_nbytes)
        if self._device is not None and id(buffer) not in self._pinned:
            self._pinned[id(buffer)] = _PinnedBuffer(buffer, self._device)
        return buffer

    @contextmanager
    def _naming_tensors(self, file: str, start: int, stop: int) -> Iterator[None]:
        """Add the names of the tensors to a `Tampered` error that the block raises."""
        try:
            yield
        except Tampered as error:
            raise Tampered(f"{error}; {self._contents(file, start, stop)}") from error

    def _contents(self, file: str, start: int, stop: int) -> str:
        """List the tensors in a byte range of a file, as text for messages."""
        names = [
            f"{component}.{spec.key}"
            for component, table in self._opened.index.components.items()
            for spec, shard in table.shards_in(file)
            if shard.start < stop and shard.start + shard.nbytes > start
        ]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"it holds {', '.join(names[:5]) or 'the header'}{more}"


_Transferred: TypeAlias = tuple[BlockId, memoryview, bool]
"""Block of a transfer, its memory, and whether this rank has read it."""


class _Exchange:
    """Exchange of the blocks of one plan that several ranks need."""

    def __init__(
        self,
        pipeline: ReadPipeline,
        reads: Mapping[BlockId, BlockRead],
        sharing: Sharing,
        turns: Sequence[BlockTurn],
        end: float,
    ) -> None:
        self._pipeline = pipeline
        self._reads = reads
        self._sharing = sharing
        self._turns = turns
        self._end = end
        self._own = iter([turn.block for turn in turns if turn.reader == sharing.rank])
        self._ahead: deque[tuple[memoryview, Future[None]]] = deque()
        self._failure: HoldfastError | None = None

    def take_turns(self) -> None:
        """Take part in all turns; raise the first error when they are over."""
        for _ in range(_NUM_AHEAD):
            self._read_ahead()
        before: tuple[RankTransfer, list[_Transferred]] | None = None
        for window in windows(self._turns, _NUM_TOGETHER):
            begun = self._start_window(window)
            if before is not None:
                self._complete_transfer(*before)
            before = begun
        if before is not None:
            self._complete_transfer(*before)
        if self._failure is not None:
            raise self._failure

    def _read_ahead(self) -> None:
        block = next(self._own, None)
        if block is not None:
            memory = self._pipeline.memory_of(block, self._read_of(block))
            self._ahead.append((memory, self._pipeline.submit_block(block, memory)))

    def _start_window(self, window: Sequence[BlockTurn]) -> tuple[RankTransfer, list[_Transferred]]:
        sends: list[tuple[int, memoryview]] = []
        receives: list[tuple[int, memoryview]] = []
        memories: list[_Transferred] = []
        for turn in window:
            is_own = turn.reader == self._sharing.rank
            if is_own:
                memory = self._next_own()
                sends += [(rank, memory) for rank in turn.receivers]
            else:
                memory = self._pipeline.memory_of(turn.block, self._read_of(turn.block))
                receives.append((turn.reader, memory))
            memories.append((turn.block, memory, is_own))
        return self._sharing.exchange.start_exchange(sends, receives), memories

    def _next_own(self) -> memoryview:
        memory, read = self._ahead.popleft()
        self._read_ahead()
        if self._failure is None:  # else nobody will use it
            try:
                read.result(max(self._end - time.monotonic(), 0.0))
            except FutureTimeout:
                self._failure = DeadlineExceeded("reading a block for other ranks hangs")
            except HoldfastError as error:
                self._failure = error
        return memory

    def _complete_transfer(self, transfer: RankTransfer, memories: list[_Transferred]) -> None:
        """Wait for a transfer, and copy its blocks to their destinations."""
        try:
            transfer.wait_until_done(max(self._end - time.monotonic(), 0.0))
        except HoldfastError as error:
            # The others go on among themselves: a rank that waits for this one is not to blame.
            self._failure = self._failure or error
        if self._failure is None and self._sharing.is_own is not None:
            received = [(block, memory) for block, memory, is_own in memories if not is_own]
            self._failure = self._pipeline.find_fault(received)
        if self._failure is None:
            for block, memory, _ in memories:
                self._pipeline.use_block(self._read_of(block), memory)

    def _read_of(self, block: BlockId) -> BlockRead:
        """Return what this rank does with a block: nothing, if it reads it for others only."""
        return self._reads.get(block, BlockRead())


def _targets(segments: Sequence[Segment], memory: memoryview) -> list[memoryview] | None:
    """Return the destinations of a block's bytes, in order; None if impossible, or slower."""
    if len(segments) * _SEGMENT_NBYTES_MIN > len(memory) + _SEGMENT_NBYTES_MIN:
        return None
    targets: list[memoryview] = []
    done = 0
    for segment in sorted(segments, key=attrgetter("start")):
        # The copy from the cache passes over the block once; other cases need a buffer.
        if segment.start < done or isinstance(segment.target, Tensor):
            return None
        targets += [memory[done : segment.start], memoryview(segment.target)]
        done = segment.start + len(segment.target)
    return [*targets, memory[done:]]


def _copy_segments(memory: memoryview, segments: Sequence[Segment]) -> None:
    source = np.frombuffer(memory, np.uint8)
    for segment in segments:
        values = source[segment.start : segment.start + len(segment.target)]
        if isinstance(segment.target, Tensor):
            segment.target.copy_(torch.from_numpy(values))
        else:
            np.copyto(segment.target, values)
