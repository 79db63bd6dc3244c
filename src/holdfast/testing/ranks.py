"""Coordinators for tests whose ranks are threads of one process."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from threading import Condition
from typing import TypeAlias

from typing_extensions import override

from holdfast.errors import Disconnected
from holdfast.ranks.coordinator import (
    LEADER,
    Collected,
    Coordinator,
    Exchange,
    RankFailure,
    RankTransfer,
    Watch,
    describe_rank,
    expect_heard,
)

_Announced: TypeAlias = bytes | list[bytes] | RankFailure
"""Announcement of a round: a message for all followers, one for each rank, or a failure."""


class ThreadCoordinator(Coordinator):
    """Coordinator of a rank that is a thread; `for_ranks` makes those of all ranks.

    >>> leader, follower = ThreadCoordinator.for_ranks(2)
    >>> follower.fail("save 1", RankFailure(phase="write", reason="disk full"), timeout_s=1)
    >>> leader.collect("save 1", timeout_s=60).failed
    {1: RankFailure(phase='write', reason='disk full')}
    """

    def __init__(self, rank: int, world_size: int, board: _Board) -> None:
        super().__init__(rank, world_size)
        self._board = board

    @classmethod
    def for_ranks(cls, world_size: int) -> list[ThreadCoordinator]:
        """Make the coordinators of all ranks of a run, in the order of ranks."""
        board = _Board()
        return [cls(rank, world_size, board) for rank in range(world_size)]

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.check_tag_unused("post", tag)
        self._board.put_post(tag, self.rank, data)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        if self.is_leader:
            self._board.put_announcement(tag, failure)
        else:
            self._board.put_post(tag, self.rank, failure)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        self.expect_leader()
        self.check_tag_unused("collect", tag)
        posts = self._board.take_posts(tag, self.world_size, timeout_s, watch)
        return Collected.from_posts(posts, self.world_size)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        self._board.put_announcement(tag, data)

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        self._board.put_announcement(tag, [*messages])

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        self.expect_follower()
        said = self._board.read_announcement(tag, timeout_s, watch)
        return expect_heard(tag, said[self.rank] if isinstance(said, list) else said)

    @override
    def exchange(self, *, timeout_s: float) -> Exchange:
        return _ThreadExchange(self.rank, self._board)


class _ThreadExchange(Exchange):
    """Exchange of a rank that is a thread: copies what it sends."""

    def __init__(self, rank: int, board: _Board) -> None:
        self._rank = rank
        self._board = board

    @override
    def start_exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> RankTransfer:
        for peer, buffer in sends:
            self._board.send(self._rank, peer, bytes(buffer))
        return _ThreadTransfer(self._rank, self._board, receives)


class _ThreadTransfer(RankTransfer):
    def __init__(
        self, rank: int, board: _Board, receives: Sequence[tuple[int, memoryview]]
    ) -> None:
        self._rank = rank
        self._board = board
        self._receives = receives

    @override
    def wait_until_done(self, timeout_s: float) -> None:
        for peer, buffer in self._receives:
            data = self._board.receive(peer, self._rank, timeout_s)
            if data is None:
                raise Disconnected(f"nothing came from rank {peer} in {timeout_s:.1f} s")
            buffer[:] = data


class _Board:
    """Messages of all rounds, which the threads of a run share."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sent: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._posts: defaultdict[str, dict[int, bytes | RankFailure]] = defaultdict(dict)
        self._begun: set[str] = set()
        """Rounds in which the leader has posted."""
        self._announced: dict[str, _Announced] = {}

    def send(self, rank: int, peer: int, data: bytes) -> None:
        with self._changed:
            self._sent[rank, peer].append(data)
            self._changed.notify_all()

    def receive(self, rank: int, peer: int, timeout_s: float) -> bytes | None:
        with self._changed:
            sent = self._sent[rank, peer]
            self._changed.wait_for(lambda: bool(sent), timeout_s)
            return sent.popleft() if sent else None

    def put_post(self, tag: str, rank: int, said: bytes | RankFailure) -> None:
        with self._changed:
            self._posts[tag][rank] = said
            if rank == LEADER:
                self._begun.add(tag)
            self._changed.notify_all()

    def take_posts(
        self, tag: str, world_size: int, timeout_s: float, watch: Watch | None
    ) -> dict[int, bytes | RankFailure]:
        def is_over() -> bool:
            posts = self._posts[tag]
            return len(posts) == world_size or any(
                isinstance(p, RankFailure) for p in posts.values()
            )

        def late() -> dict[int, str]:
            posts = self._posts[tag]
            return {
                rank: describe_rank(rank, None) for rank in range(world_size) if rank not in posts
            }

        with self._changed:
            self._wait_until(is_over, timeout_s, watch, late)
            return dict(sorted(self._posts.pop(tag).items()))

    def _wait_until(
        self,
        is_so: Callable[[], bool],
        timeout_s: float,
        watch: Watch | None,
        late: Callable[[], dict[int, str]],
    ) -> None:
        began, waited_s = time.monotonic(), 0.0
        next_s = timeout_s if watch is None else min(timeout_s, watch.next_s)
        while not self._changed.wait_for(is_so, next_s - waited_s) and waited_s < timeout_s:
            waited_s = time.monotonic() - began
            if watch is not None and waited_s >= watch.next_s:
                watch.warn_of_late_ranks(waited_s, late())
                next_s = min(timeout_s, watch.next_s)

    def put_announcement(self, tag: str, said: _Announced) -> None:
        with self._changed:
            self._announced[tag] = said
            self._changed.notify_all()

    def read_announcement(
        self, tag: str, timeout_s: float, watch: Watch | None
    ) -> _Announced | None:
        def late() -> dict[int, str]:
            begins = None if watch is None else watch.begins
            return (
                {}
                if begins is None or begins in self._begun
                else {LEADER: describe_rank(LEADER, None)}
            )

        with self._changed:
            self._wait_until(lambda: tag in self._announced, timeout_s, watch, late)
            return self._announced.get(tag)
