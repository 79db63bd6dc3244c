"""Ranks that share the data of a run, and the part of a batch that each of them takes.

Sends nothing: whatever the ranks have to agree on follows from what is the same on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.launched import has_group, present_ranks

logger = logging.getLogger("holdfast")

T = TypeVar("T")


@runtime_checkable
class HasRank(Protocol):
    """Object that knows the rank of this process, and how many ranks there are."""

    @property
    def rank(self) -> int:
        """Number of this rank, from zero."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""


class DataRanks(NamedTuple):
    """Rank of this process among those that share the data, and their number.

    For a run in which only some ranks get different data, because the others hold parts of one
    model: `DataRanks(mesh["dp"].get_local_rank(), mesh["dp"].size())`.

    >>> DataRanks(1, 4)
    DataRanks(rank=1, world_size=4)
    """

    rank: int
    world_size: int

    def part(self, batch: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of a batch of all ranks; the parts follow each other by rank.

        Their lengths differ by one at most, and none is empty: of a batch that is smaller than
        the world size, a rank without a sample of its own (`num_own`) gets a neighbor's.

        >>> [list(DataRanks(rank, 3).part("abcd")) for rank in range(3)]
        [['a'], ['b'], ['c', 'd']]
        >>> [list(DataRanks(rank, 3).part("ab")) for rank in range(3)]
        [['a'], ['a'], ['b']]
        """
        begin = self.rank * len(batch) // self.world_size
        return batch[begin : begin + max(self.num_own(len(batch)), 1)]

    def num_own(self, size: int) -> int:
        """Return how many samples of a batch of all ranks, of `size` samples, this rank owns.

        Each sample is owned by one rank.

        >>> [DataRanks(rank, 3).num_own(2) for rank in range(3)]
        [0, 1, 1]
        """
        return (self.rank + 1) * size // self.world_size - self.rank * size // self.world_size


ALONE = DataRanks(0, 1)


def data_ranks(ranks: Literal["group"] | HasRank | None) -> DataRanks | None:
    """Resolve an argument `ranks`, such as "group"; None: this process shares no data."""
    if ranks is None:
        return None
    if isinstance(ranks, str):
        present = present_ranks()
        is_shared = present.world_size > 1 or has_group()
        return DataRanks(present.rank, present.world_size) if is_shared else None
    rank, world_size = ranks.rank, ranks.world_size
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise UsageError(
            f"ranks={shown(ranks)}: rank={shown(rank)} and world_size={shown(world_size)} must be "
            "whole numbers, rank from 0 to world_size - 1"
        )
    return DataRanks(rank, world_size)


def check_group(made_for: DataRanks, has_warned: bool) -> bool:
    """Check that the group is that of a loader; return whether it was warned of a lacking one."""
    present = present_ranks()
    group = DataRanks(present.rank, present.world_size)
    if group.world_size > 1 and not has_group() and not has_warned:
        has_warned = True
        logger.warning(
            "the loader gives this process the part of rank %d of %d, as its launcher says, "
            "and there is no process group: where each process trains by itself, pass "
            "ranks=None",
            *group,
        )
    if group != made_for:
        then, now = (f"rank {ranks[0]} of {ranks[1]}" for ranks in (made_for, group))
        raise UsageError(
            f"the loader was made for {then}, but this process is {now}: make the "
            "loader after the process group, or give it `ranks`"
        )
    return has_warned
