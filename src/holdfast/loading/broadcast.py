"""Exchange of the blocks that several ranks need: each is read by one, and sent to the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.loading.broadcast_plan import BlockTurn, Sharing, windows
from holdfast.loading.plan import BlockId, BlockRead
from holdfast.ranks.coordinator import RankTransfer

_NUM_AHEAD = 8
"""Most blocks that are read ahead for other ranks."""
_NUM_TOGETHER = 8
"""Most blocks of one transfer between ranks; two transfers are under way."""


class BlockSource(Protocol):
    """Reader of blocks that copies their bytes to where they are wanted."""

    def memory_of(self, block: BlockId, read: BlockRead) -> memoryview:
        """Return the memory into which a block is read, of its length."""
        ...

    def submit_block(self, block: BlockId, memory: memoryview) -> Future[None]:
        """Begin to read and check a block."""
        ...

    def use_block(self, read: BlockRead, memory: memoryview) -> None:
        """Copy a block that is right to its destinations, and reuse its memory if it may be."""
        ...


class Exchanging:
    """Exchange of the blocks of one plan that several ranks need."""

    def __init__(
        self,
        source: BlockSource,
        reads: Mapping[BlockId, BlockRead],
        sharing: Sharing,
        turns: Sequence[BlockTurn],
        end: float,
    ) -> None:
        self._source = source
        self._reads = reads
        self._sharing = sharing
        self._turns = turns
        self._end = end
        self._own = iter([turn.block for turn in turns if turn.reader == sharing.rank])
        self._ahead: deque[tuple[memoryview, Future[None]]] = deque()
        self._failure: HoldfastError | None = None

    def exchange_blocks(self) -> None:
        """Take part in all turns; raise the first error when they are over."""
        for _ in range(_NUM_AHEAD):
            self._read_ahead()
        before: tuple[RankTransfer, list[tuple[BlockId, memoryview]]] | None = None
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
            memory = self._source.memory_of(block, self._reads[block])
            self._ahead.append((memory, self._source.submit_block(block, memory)))

    def _start_window(
        self, window: Sequence[BlockTurn]
    ) -> tuple[RankTransfer, list[tuple[BlockId, memoryview]]]:
        sends: list[tuple[int, memoryview]] = []
        receives: list[tuple[int, memoryview]] = []
        memories: list[tuple[BlockId, memoryview]] = []
        for turn in window:
            if turn.reader == self._sharing.rank:
                memory = self._next_own()
                sends += [(rank, memory) for rank in turn.receivers]
            else:
                memory = self._source.memory_of(turn.block, self._reads[turn.block])
                receives.append((turn.reader, memory))
            memories.append((turn.block, memory))
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

    def _complete_transfer(
        self, transfer: RankTransfer, memories: list[tuple[BlockId, memoryview]]
    ) -> None:
        """Wait for a transfer, and copy its blocks to their destinations."""
        try:
            transfer.wait_until_done(max(self._end - time.monotonic(), 0.0))
        except HoldfastError as error:
            # The others go on among themselves: a rank that waits for this one is not to blame.
            self._failure = self._failure or error
        if self._failure is None:
            for block, memory in memories:
                self._source.use_block(self._reads[block], memory)
