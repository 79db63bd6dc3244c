"""Turns of ranks that load together: which rank reads a block that several of them need.

Pure planning, the same on each rank: one of those that need a block reads and checks it, and sends
it to the others (decision 0048).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from holdfast.loading.plan import BlockId
from holdfast.ranks.coordinator import Exchange

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
