"""Plan of a read: which blocks are read, and to which memory the bytes of each are copied.

A destination is any memory for a contiguous range of a file's bytes: fresh memory laid out as the
file, a live tensor, memory with packed small tensors, or a row of a box of a tensor, one of
several. The plan only records them; `pipeline.ReadPipeline` carries it out. The wanted bytes of
each file are computed on the columns of the index, in a few passes for any number of tensors.

Of ranks that load together, one reads and checks a block that several of them need, and sends it to
the others. Each rank computes the same turns (decision 0048).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from holdfast.format.boxes import Column
from holdfast.format.index import Index, Places
from holdfast.format.tensors import TensorSpec
from holdfast.ranks.coordinator import Exchange
from holdfast.staging.arena import Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The tensors to read from one file, in three columns with an entry for each tensor."""

    component: str
    specs: Sequence[TensorSpec]
    start: Column
    nbytes: Column

    def find_blocks(self, block_nbytes: int) -> list[int]:
        """Return the numbers of the blocks that hold the tensors, ascending."""
        # +1 where a tensor begins, -1 behind its end: blocks with a positive sum are wanted. A pass
        # over columns, for any number of tensors.
        has_bytes = self.nbytes > 0
        start, nbytes = self.start[has_bytes], self.nbytes[has_bytes]
        first, last = start // block_nbytes, (start + nbytes - 1) // block_nbytes
        edges = np.zeros(int(last.max(initial=-1)) + 2, np.int64)
        np.add.at(edges, first, 1)
        np.add.at(edges, last + 1, -1)
        return np.flatnonzero(np.cumsum(edges)).tolist()  # type: ignore[no-any-return]


def wanted_by_file(index: Index, needed: Mapping[str, Iterable[str]]) -> dict[str, Wanted]:
    """Return the `needed` tensors (component → keys) of each file, each stored as one shard."""
    by_file: dict[str, Wanted] = {}
    for component, of_component in needed.items():
        keys = [*of_component]
        if not keys:
            continue
        specs, places = index.components[component].whole(keys)
        # Not np.unique: when first called it imports numpy.ma, which takes as long as a small load.
        for number in np.flatnonzero(np.bincount(places.file)).tolist():
            in_file = np.flatnonzero(places.file == number)
            by_file[places.files[number]] = Wanted(
                component=component,
                specs=specs if len(in_file) == len(specs) else [specs[i] for i in in_file],
                start=places.start[in_file],
                nbytes=places.nbytes[in_file],
            )
    return by_file


PACKED_NBYTES = 64 << 20
"""Most bytes allocated at a time for tensors that are read packed and then copied."""
DIRECT_NBYTES = 32 << 10
"""Least bytes of a tensor that is not read packed: a destination costs as much as this copy."""
_ALIGNMENT = 64

BlockId: TypeAlias = tuple[str, int]
"""Name of a tensor file, and number of a block in it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes of one block, from offset `start`, and the memory to which they are copied."""

    start: int
    target: Any
    """A numpy array of bytes, or a tensor of bytes on a device."""


@dataclass(slots=True)
class BlockRead:
    """The read of one block, and the destinations of its bytes."""

    segments: list[Segment] = field(default_factory=list)
    memory: memoryview | None = None
    """Fresh memory into which the block is read, and in which it stays; None: a buffer. The
    segments are copied from there once the block was checked."""
    copying: threading.Lock = field(default_factory=threading.Lock)
    """Lock that is held while bytes are copied to the segments."""


class ReadPlan:
    """Blocks to read, each of them once however many destinations its bytes have."""

    def __init__(self, block_nbytes: int) -> None:
        self.reads: defaultdict[BlockId, BlockRead] = defaultdict(BlockRead)
        self._block_nbytes = block_nbytes

    def plan_checked_reads(self, file: str, wanted: Wanted) -> None:
        """Plan to read and check the blocks of the wanted tensors, without any copy."""
        for number in wanted.find_blocks(self._block_nbytes):
            _ = self.reads[file, number]

    def plan_arena_reads(self, file: str, wanted: Wanted, arena: Arena) -> None:
        """Plan to read the blocks of the wanted tensors into `arena`, laid out as the file."""
        for number in wanted.find_blocks(self._block_nbytes):
            start = number * self._block_nbytes
            memory = arena.memory[start : start + self._block_nbytes]
            self.reads[file, number].memory = memory

    def plan_copy(self, file: str, start: int, target: Any) -> None:
        """Plan to copy checked bytes of a file, from `start`, until `target` is full."""
        done = 0
        while done < len(target):
            number, offset = divmod(start + done, self._block_nbytes)
            nbytes = min(self._block_nbytes - offset, len(target) - done)
            segment = Segment(offset, target[done : done + nbytes])
            self.reads[file, number].segments.append(segment)
            done += nbytes

    def copy_packed(self, packed: Packed) -> None:
        """Plan to copy the bytes of packed tensors to their memory."""
        memory = np.frombuffer(packed.arena.memory, np.uint8)
        for extent in packed.extents:
            self.plan_copy(extent.file, extent.start, memory[extent.at : extent.at + extent.nbytes])


@dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous bytes of a tensor file, and their place in packed memory."""

    file: str
    start: int
    nbytes: int
    at: int


class Packed:
    """Memory that holds chosen tensors of the files, without the bytes between them."""

    def __init__(self, places: Places) -> None:
        """Allocate memory for tensors that are sorted by file and offset, as `batches` does."""
        file, start, nbytes = places.file, places.start, places.nbytes
        stop = start + nbytes
        begins = np.ones(len(file), np.bool_)
        begins[1:] = (file[1:] != file[:-1]) | (start[1:] != stop[:-1])
        first = np.flatnonzero(begins)
        begin, length = start[first], stop[np.append(first, len(file))[1:] - 1] - start[first]
        # Aligned as in the file, so that tensors aligned there can be views.
        taken = -(-(begin % _ALIGNMENT + length) // _ALIGNMENT) * _ALIGNMENT
        at = np.cumsum(taken) - taken + begin % _ALIGNMENT
        self.starts: Column = start + (at - begin)[np.cumsum(begins) - 1]
        """Offset in the memory at which each tensor begins."""
        self.nbytes = nbytes
        columns = (column.tolist() for column in (file[first], begin, length, at))
        self.extents = [
            Extent(places.files[number], *of_extent)
            for number, *of_extent in zip(*columns, strict=True)
        ]
        self.arena = Arena(int(taken.sum()))


def batches(places: Places, packed_nbytes: Column) -> list[Column]:
    """Sort tensors by file and offset, and split them into reads of `PACKED_NBYTES` at most."""
    # In the order of the files, in which a disk is read fastest and a block is read once.
    order = np.lexsort((places.start, places.file))
    if not len(order):
        return []
    if packed_nbytes.sum() <= PACKED_NBYTES:
        return [order]
    cuts: list[int] = []
    taken = 0
    for number, nbytes in enumerate(packed_nbytes[order].tolist()):
        if taken and taken + nbytes > PACKED_NBYTES:
            cuts.append(number)
            taken = 0
        taken += nbytes
    return np.split(order, cuts)


Run: TypeAlias = tuple[str, int, int]
"""File, first block and the block behind the last one: blocks that follow each other."""
Runs: TypeAlias = tuple[Run, ...]
NO_HOLDERS: Mapping[str, Sequence[int]] = MappingProxyType({})


class FileSources(msgspec.Struct, frozen=True):
    """Sources from which ranks on hosts with a disk each read a checkpoint (decision 0068)."""

    hosts: tuple[tuple[int, ...], ...]
    """Different sets of hosts that have some file."""
    of_file: dict[str, int]
    """Number of such a set, by name; files that are not here are read from the remote tier."""
    documents: dict[str, bytes]
    """Index, trees and manifest that some host lacks."""

    def hosts_of(self, name: str) -> tuple[int, ...]:
        """Return the hosts from which a file is read; none: the remote tier."""
        number = self.of_file.get(name)
        return () if number is None else self.hosts[number]


@dataclass(frozen=True, slots=True)
class BlockTurn:
    """Block that several ranks need, and the rank that reads it."""

    block: BlockId
    reader: int
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The way in which this rank shares what it reads with others."""

    rank: int
    exchange: Exchange
    agree: Callable[[Runs], Sequence[BlockTurn]]
    """Tells the other ranks what this one needs; returns the turns in which it takes part."""
    timeout_s: float
    is_own: Callable[[str], bool] | None = None
    """Whether this rank's host has a file, which it then reads alone; None: all are shared."""


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


def turns_of(
    rank: int,
    needs: Sequence[Runs],
    of_rank: Sequence[int],
    holders: Mapping[str, Sequence[int]] = NO_HOLDERS,
) -> list[BlockTurn]:
    """Return the turns in which `rank` takes part, in an order that all ranks have in common.

    `of_rank` has the number among `needs` of each rank's needs, negative if it needs nothing.
    Blocks go round among the ranks that need the same, so that each of these reads as many; those
    of a file with `holders` among these ranks, which do not need them.
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
        readers = holders.get(block[0], ranks)
        if len(ranks) < 2 and readers is ranks:
            continue
        reader = readers[counts[kind] % len(readers)]
        counts[kind] += 1
        if rank in ranks or rank == reader:
            turns.append(BlockTurn(block, reader, tuple(r for r in ranks if r != reader)))
    return turns


def windows(turns: Sequence[BlockTurn], size: int) -> Iterator[Sequence[BlockTurn]]:
    """Cut turns into windows, each of which is one transfer."""
    for start in range(0, len(turns), size):
        yield turns[start : start + size]
