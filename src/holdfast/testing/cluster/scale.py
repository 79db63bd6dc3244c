"""Costs of saves by thousands of simulated ranks: time, memory, messages and balance.

The leader is real, and so is each follower, one after another in the thread of the leader. When the
leader waits for posts, the followers run from the start of the save until they wait for a message
that is not there. That is cheaper than to keep the states of all.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from holdfast.errors import RanksError, RanksFailed
from holdfast.format import layout
from holdfast.ranks.coordinator import LEADER, Collected, Coordinator, RankFailure, Watch
from holdfast.store.base import BlockWriter, ObjectInfo
from holdfast.store.memory import MemoryStore
from holdfast.system import PROC, peak_nbytes, resident_nbytes
from holdfast.testing.cluster.ranks import VirtualRank
from holdfast.testing.cluster.state import Cluster, VirtualShare

_LOGGER = logging.getLogger(__name__)
_NUM_SAMPLED = 32
"""Followers that make the later save, and that are timed."""
_LOGGED_EVERY = 1000
_TIMEOUT_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Costs of one save by all ranks. Seconds are those of a processor that does nothing else."""

    plan_s: float
    """Seconds of the leader until it has announced the plan."""
    leader_s: float
    """Seconds of the leader for the whole save, without writes to a disk."""
    rank_s: float
    """Median seconds of a follower for the whole save."""
    longest_rank_s: float
    peak_nbytes: int | None
    """Memory that the leader took at most; None if this system does not tell."""
    received_nbytes: int
    """Bytes of messages from followers to the leader."""
    sent_nbytes: int
    """Bytes of messages from the leader; one that is the same for all followers counts once."""
    imbalance: float
    """Bytes that the busiest rank writes, over the mean of all ranks."""
    index_nbytes: int
    """Bytes of the index and of the manifest."""


def measure_saves(cluster: Cluster) -> tuple[SaveCosts, SaveCosts]:
    """Run the first save of a cluster, and a later one with the same tensors.

    All ranks make the first save. The later one is made by the leader and by some followers: what
    these post must be what they posted in the first save, or equal on all, and so the others do.
    The progress is logged at the level INFO.

    Raises:
        RanksError: the posts of a later save depend on the rank in another way.
    """
    return _Measurement(cluster).run_saves()


class _NotYet(BaseException):
    """Signal: a follower has to wait for the leader."""


class _Board:
    """Messages of all ranks, and the followers that run when the leader waits."""

    def __init__(self, world_size: int) -> None:
        self.posts: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        self.announced: dict[str, bytes | Sequence[bytes] | RankFailure] = {}
        self.world_size = world_size
        self.received_nbytes = self.sent_nbytes = 0


class _TurnCoordinator(Coordinator):
    """Coordinator of a rank of which no two run at a time."""

    def __init__(self, rank: int, board: _Board, measurement: _Measurement) -> None:
        super().__init__(rank, board.world_size)
        self._board, self._measurement = board, measurement
        self._waits = False

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        # A follower that runs again posts the same again.
        self._board.posts[tag].setdefault(self.rank, data)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        if self._waits:
            return  # it is no failure, and the next run posts
        if not self.is_leader:
            raise AssertionError(f"rank {self.rank} fails in {tag}: {failure}")
        self._board.announced[tag] = failure

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        posts = self._board.posts[tag]
        if timeout_s > 0:
            self._measurement.run_followers(tag)
        self._board.received_nbytes += sum(map(len, posts.values())) - len(posts.get(LEADER, b""))
        return Collected.from_posts(dict(sorted(posts.items())), self.world_size)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self._board.announced[tag] = data
        self._board.sent_nbytes += len(data)
        if ", plan" in tag:
            self._measurement.note_plan()

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        self._board.announced[tag] = messages
        self._board.sent_nbytes += sum(map(len, messages[1:]))
        self._measurement.note_plan()

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        said = self._board.announced.get(tag)
        if said is None:
            self._waits = True
            raise _NotYet
        if isinstance(said, RankFailure):
            raise RanksFailed(tag, {LEADER: said})
        return said if isinstance(said, bytes) else said[self.rank]


class _LengthStore(MemoryStore):
    """Store that keeps only the lengths of tensor files."""

    def __init__(self) -> None:
        super().__init__("lengths")
        self.lengths: dict[str, int] = {}
        self.writer = LEADER
        """Rank that runs."""
        self._writers: dict[str, int] = {}

    def repeat_files(self, running: Collection[int]) -> None:
        """Repeat in the newest folder the files of ranks that do not run in this save."""
        newest = next(reversed(self.lengths)).partition("/")[0]
        for key, nbytes in [*self.lengths.items()]:
            repeated, rank = f"{newest}/{key.partition('/')[2]}", self._writers[key]
            if rank not in running and repeated not in self.lengths:
                self.lengths[repeated], self._writers[repeated] = nbytes, rank

    def nbytes_by_rank(self, folder: str) -> list[int]:
        """Return the bytes of tensor files that each rank has written."""
        found: defaultdict[int, int] = defaultdict(int)
        for key, nbytes in self.lengths.items():
            if key.startswith(f"{folder}/"):
                found[self._writers[key]] += nbytes
        return [*found.values()]

    def count_index_nbytes(self, folder: str) -> int:
        """Return the bytes of the index and of the manifest."""
        names = (layout.INDEX.partition(".")[0], layout.MANIFEST)
        infos = super().list(f"{folder}/")
        return sum(
            info.nbytes for info in infos if info.key.removeprefix(f"{folder}/").startswith(names)
        )

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        self.lengths[key] = nbytes
        self._writers[key] = self.writer
        return _LengthWriter()

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from super().list(prefix)
        for key, nbytes in self.lengths.items():
            if key.startswith(prefix):
                yield ObjectInfo(key=key, nbytes=nbytes)


class _LengthWriter:
    """Writer that keeps no bytes."""

    def write(self, start: int, data: memoryview) -> None:
        """Drop a piece."""

    def finish(self, nbytes: int | None = None) -> None:
        """End the file."""

    def abort(self) -> None:
        """End the file."""


class _Measurement:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._board = _Board(cluster.num_ranks)
        self._store = _LengthStore()
        self._base_nbytes = resident_nbytes() or 0
        self._leader = self._make_rank(LEADER)
        every = max(cluster.num_ranks // _NUM_SAMPLED, 1)
        self._sampled = range(1, cluster.num_ranks, every)
        self._number = 1
        """Number of the save under way."""
        self._shares: dict[int, VirtualShare] = {}
        """Shares of all followers, which no run of a follower needs to make again."""
        self._rank_s: dict[int, float] = {}
        self._leader_s = self._since_s = self._plan_s = 0.0
        self._peak_nbytes = 0

    def run_saves(self) -> tuple[SaveCosts, SaveCosts]:
        """Make both saves."""
        self._leader.resume(collects=False)
        return self._run_save(1), self._run_save(2)

    def note_plan(self) -> None:
        """Note that the leader announces a plan, the last time before it announces the folder."""
        self._plan_s = self._leader_s + time.process_time() - self._since_s

    def run_followers(self, tag: str) -> None:
        """Let followers post, while the leader waits."""
        self._pause_leader()
        for rank in self._sampled if self._number > 1 else range(1, self._cluster.num_ranks):
            self._run_follower(rank)
            if rank % _LOGGED_EVERY == 0:
                _LOGGER.info("%s: %d of %d ranks", tag, rank, self._cluster.num_ranks)
        if self._number > 1:
            self._repeat_posts(tag)
        self._continue_leader()

    def _make_rank(self, rank: int) -> VirtualRank:
        ranks = _TurnCoordinator(rank, self._board, self)
        return VirtualRank(
            layout=self._cluster, ranks=ranks, store=self._store, timeout_s=_TIMEOUT_S
        )

    def _run_save(self, number: int) -> SaveCosts:
        board = self._board
        self._number, self._leader_s, self._plan_s, self._peak_nbytes = number, 0.0, 0.0, 0
        board.received_nbytes = board.sent_nbytes = 0
        gc.collect()
        self._continue_leader()
        outcome = self._leader.save(number, number, None)
        self._pause_leader()
        if outcome.outcome != "committed":
            raise RanksError(f"save {number} of the leader: {outcome.reason}")
        for rank in self._sampled:
            if not self._run_follower(rank, is_timed=True):
                raise RanksError(f"save {number} of rank {rank} waits after the outcome")
        times = [self._rank_s[rank] for rank in self._sampled]
        nbytes = self._store.nbytes_by_rank(outcome.folder)
        peak = self._peak_nbytes - self._base_nbytes
        return SaveCosts(
            plan_s=self._plan_s,
            leader_s=self._leader_s,
            rank_s=statistics.median(times) if times else 0.0,
            longest_rank_s=max(times, default=0.0),
            peak_nbytes=peak if self._base_nbytes else None,
            received_nbytes=board.received_nbytes,
            sent_nbytes=board.sent_nbytes,
            imbalance=max(nbytes) * self._cluster.num_ranks / sum(nbytes),
            index_nbytes=self._store.count_index_nbytes(outcome.folder),
        )

    def _run_follower(self, rank: int, *, is_timed: bool = False) -> bool:
        """Run a follower from its start; return whether it has ended the save."""
        follower = self._make_rank(rank)
        self._store.writer = rank
        if not is_timed:
            follower.saves.share = self._shares.get(rank)
        try:
            follower.resume(collects=False)
            for number in range(1, self._number + 1):
                began_s = time.process_time()
                outcome = follower.save(number, number, None)
                if outcome.outcome != "committed":
                    raise RanksError(f"save {number} of rank {rank}: {outcome.reason}")
                self._rank_s[rank] = time.process_time() - began_s
        except _NotYet:
            return False
        finally:
            self._store.writer = LEADER
            if follower.saves.share is not None:
                follower.saves.share.drop_part()
                self._shares[rank] = follower.saves.share
        return True

    def _repeat_posts(self, tag: str) -> None:
        """Let the followers that do not run post what they would."""
        posts = self._board.posts[tag]
        found = {rank: posts[rank] for rank in self._sampled}
        part = tag.partition(", ")[2]
        earlier = self._board.posts.get(f"save 1 of manager 0, {part}", {})
        is_equal = len({*found.values()}) == 1
        is_repeated = all(earlier.get(rank) == post for rank, post in found.items())
        if not is_equal and not is_repeated:
            raise RanksError(f"{tag}: posts differ by rank, and from the posts of the first save")
        self._store.repeat_files({0, *self._sampled})
        for rank in range(1, self._cluster.num_ranks):
            posts.setdefault(rank, found[self._sampled[0]] if is_equal else earlier[rank])

    def _pause_leader(self) -> None:
        self._leader_s += time.process_time() - self._since_s
        self._peak_nbytes = max(self._peak_nbytes, peak_nbytes() or 0)

    def _continue_leader(self) -> None:
        # From here on the system notes the peak anew: what followers took does not count.
        with suppress(OSError):
            Path(PROC, "self", "clear_refs").write_text("5")
        self._since_s = time.process_time()
