"""Exchange of the blocks that several ranks need: each is read by one, and sent to the others.

Which rank reads a block is planned, the same on each rank (decision 0048).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeAlias

from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.loading.plan import BlockId, BlockRead
from holdfast.ranks.coordinator import Exchange, RankTransfer

Run: TypeAlias = tuple[str, int, int]
"""File, first block and the block behind the last one: blocks that follow each other."""
Runs: TypeAlias = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class BlockTurn:
    """Block that several ranks need, and the rank that reads it."""

    block: BlockId
    reader: int
    """Rank that reads it."""
    receivers: tuple[int, ...]
    """Ranks that get it from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The way in which this rank shares what it reads with others."""

    rank: int
    exchange: Exchange
    agree: Callable[[Runs], Sequence[BlockTurn]]
    """Tells the other ranks what this one needs; returns the turns in which it takes part."""
    timeout_s: float


def runs_of(blocks: Iterable[BlockId]) -> Runs:
    """Join sorted blocks to runs."""
    runs: list[Run] = []
    for file, of_file in groupby(blocks, key=lambda block: block[0]):
        for _, number in of_file:
            if runs and runs[-1][0] == file and runs[-1][2] == number:
                runs[-1] = (file, runs[-1][1], number + 1)
            else:
                runs.append((file, number, number + 1))
    return tuple(runs)


def turns_of(rank: int, needs: Sequence[Runs], of_rank: Sequence[int]) -> list[BlockTurn]:
    """Return the turns in which `rank` takes part, in an order that all ranks have in common.

    Args:
        rank: this rank.
        needs: the different needs of ranks.
        of_rank: the number among them of each rank's needs; negative if it needs nothing.

    Blocks go round among the ranks that need the same, so that each of these reads as many.
    """
    members: list[list[int]] = [[] for _ in needs]
    for other, number in enumerate(of_rank):
        if number >= 0:
            members[number].append(other)
    in_need: dict[BlockId, list[int]] = {}
    for number, runs in enumerate(needs):
        for file, start, stop in runs:
            for at in range(start, stop):
                in_need.setdefault((file, at), []).append(number)
    turns: list[BlockTurn] = []
    counts: dict[tuple[int, ...], int] = {}
    everyone: dict[tuple[int, ...], list[int]] = {}
    for block in sorted(in_need):
        kind = tuple(in_need[block])
        if kind not in everyone:
            everyone[kind] = sorted(other for number in kind for other in members[number])
            # Kinds of few blocks must not all begin at the same rank.
            counts[kind] = len(counts)
        ranks = everyone[kind]
        if len(ranks) < 2:
            continue
        reader = ranks[counts[kind] % len(ranks)]
        counts[kind] += 1
        if rank in ranks:
            turns.append(BlockTurn(block, reader, tuple(r for r in ranks if r != reader)))
    return turns


def windows(turns: Sequence[BlockTurn], size: int) -> Iterator[Sequence[BlockTurn]]:
    """Cut turns into windows, each of which is one transfer."""
    for start in range(0, len(turns), size):
        yield turns[start : start + size]


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
