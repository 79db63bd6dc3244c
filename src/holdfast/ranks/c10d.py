"""Coordinator over the store of a process group of torch.distributed; uses no collective.

Known of torch 2.13 (docs/decisions/0034):

* A wait blocks all other calls of its client. So nothing here waits in the store: it looks.
* A store whose server is stopped does not keep its own timeouts. So deadlines are kept here, and a
  thread that the store holds is left behind as a daemon.
* A `set` is not acknowledged: it succeeds when the server is dead. So a message ends with a call
  that has a reply.
* A new connection may take seconds, because both ends look up its name. So there is one, and none
  is made later.
* A thread that returns from a call while the interpreter ends aborts the process. So threads take
  turns, and the last turn is taken at exit.
* From Python 3.12 on no thread can be started at exit. So one is always ready for a save that ends
  then.
* Keys outlive the processes that wrote them. So all keys of a life of the group have its nonce.
* A store does not list its keys. So the leader remembers the rounds of its closed coordinators. It
  deletes their keys when all ranks meet to make another one: by then none uses the former.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from typing_extensions import override

from holdfast.errors import (
    DeadlineExceeded,
    Disconnected,
    FormatError,
    RanksError,
    RanksSilent,
    UsageError,
    time_limit,
)
from holdfast.format.records import Process
from holdfast.launched import present_ranks
from holdfast.ranks.coordinator import (
    FIRST_S,
    GRACE_S,
    KEPT_S,
    LEADER,
    LOOK_S,
    NUM_KEPT_ROUNDS,
    Collected,
    Coordinator,
    Exchange,
    Processes,
    RankFailure,
    RankTransfer,
    Watch,
    decode_message,
    describe_process,
    describe_rank,
    expect_heard,
)
from holdfast.ranks.liveness import (
    RECONNECT_S,
    ConnectionEnd,
    LeaderAddress,
    LeaderConnection,
    LeaderListener,
    RankConnections,
    describe_problem,
    stop_at_next_meeting,
    stop_former,
)
from holdfast.ranks.messages import (
    BEAT_A_RANK_S,
    BEAT_S,
    LOST_S,
    MAX_NUM_KEYS,
    CallThreads,
    GroupStore,
    RankHeartbeat,
    Silences,
    delete_announcement,
    get_announcement,
    has,
    take_present,
    write_each,
    write_message,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as TorchStore

T = TypeVar("T")

READ_S = 5.0
"""Seconds after the deadline in which `collect` may read what came."""
_GET_S = 5.0
"""Limit of a `get`, which is only called for keys that are there."""
_MEET_S = 60.0
"""Limit on the meeting of ranks that make an exchange."""
_EXIT_S = 1.0
_SHORTEST_PAUSE_S = 0.001
_CALL = "a call to the store of the process group"
_GLANCE_S = 0.5
"""Seconds between two looks whether the leader was lost, in a call to the store."""
_LEADER_KEY = "liveness"
"""Key of the address at which the leader listens for connections."""
_NUM_ENDED = "ended"
"""Key of the number of reports of ranks that have ended."""
_PAUSE_A_RANK_S = 50e-6
"""Pause between two looks for each rank of the group, which spares the one server of the store."""
_LONGEST_PAUSE_S = 1.0


def open_group(
    backend: str,
    *,
    timeout_s: float,
    store: TorchStore | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise the default process group, from torchrun's environment if no store is given."""
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if not is_lost and "connectFullMesh" not in str(error):
            raise
        raise Disconnected(
            f"the ranks cannot connect to each other: {error}. After a restart by torchrun, gloo "
            "may find the addresses of processes that have ended: start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Round of which keys may be left in the store."""

    num_taken: int
    used_s: float
    """When this rank has collected or announced it last, in monotonic seconds."""


_ENDED: list[tuple[str, dict[str, _Round]]] = []
"""Nonces and rounds of closed coordinators of which this process was the leader. No store is kept
here: a reference would keep its server alive."""


class C10d(Coordinator):
    """Coordinator of the ranks of a process group, through a clone of the group's store.

    It works beside the group's collectives, without waiting for them. All ranks make theirs at the
    same point of the program. With `processes`, ranks that have ended or whose host was lost are
    noticed: over connections, by processes of this host, and by heartbeats. With `is_default` the
    heartbeats end with torch's default group.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        processes: Processes | None = None,
        warn: Callable[[str], object] | None = None,
        is_default: bool = False,
    ) -> None:
        super().__init__(rank, world_size)
        if not hasattr(store, "clone"):
            raise UsageError(
                f"ranks agree through a clone of their store, and torch {torch.__version__} "
                f"cannot clone {type(store).__name__}: install torch 2.8 or later"
            )
        self._pid = os.getpid()
        self._turn = Condition(Lock())
        """Held by the thread that uses the store, so that no other is inside torch."""
        self._threads = CallThreads("holdfast-ranks")
        weakref.finalize(self, _stop_calls, self._turn, self._threads)
        self._rounds: dict[str, _Round] = {}
        """Rounds that may have keys left, by tag; the one used last is the last."""
        self._nonce = ""
        self._processes = processes
        self._known: dict[int, Process] = {}
        """Processes of ranks, as far as they were read."""
        self._suspects: set[int] = set()
        """Ranks whose process had ended at the last look. Their last post may still arrive."""
        self._reported: set[int] = set()
        self._look_s = max(LOOK_S, world_size * BEAT_A_RANK_S)
        self._next_look_s = 0.0
        """When heartbeats are read next, at the earliest, in monotonic seconds."""
        self._silences = Silences(most_s=2 * self._look_s)
        self._connections: RankConnections | None = None
        self._is_default = is_default
        self._warn = warn
        absent = [*range(1, world_size)] if self.is_leader else [LEADER]
        watch = (
            None if warn is None else Watch(warn, "making a manager", "meeting", phase="meeting")
        )
        meet = partial(self._meet, store, absent, time.monotonic() + timeout_s, watch)
        try:
            self._store = self._within(timeout_s, meet)
        except DeadlineExceeded as error:
            raise RanksSilent("meeting of all ranks", absent) from error
        self._group_store = store  # in rank 0 it may host the server, and end that with itself
        self._heartbeat: RankHeartbeat | None = None
        if processes is not None and not _grows(store):
            self._heartbeat = RankHeartbeat(
                partial(_send_beat, self._store, rank, is_default),
                self._turn,
                every_s=max(BEAT_S, world_size * BEAT_A_RANK_S),
            )
            weakref.finalize(self, self._heartbeat.stop)

    @classmethod
    def of_default_group(
        cls,
        *,
        timeout_s: float = 60.0,
        processes: Processes | None = None,
        warn: Callable[[str], object] | None = None,
    ) -> C10d:
        """Make the coordinator of this rank in the default process group."""
        group = dist.group.WORLD
        if group is None:
            raise UsageError("torch.distributed has no default process group: initialize it first")
        return cls(
            group.get_group_store(),
            group.rank(),
            group.size(),
            timeout_s=timeout_s,
            processes=processes,
            warn=warn,
            is_default=True,
        )

    @override
    def exchange(self, *, timeout_s: float) -> Exchange:
        if not self._is_default:
            return super().exchange(timeout_s=timeout_s)
        # A rank that does not make its part would let torch wait until the timeout of the group.
        self._wait_for_ranks(f"meeting {self.number()} for HostTiers or broadcast=True", _MEET_S)
        return GroupExchange(timeout_s=timeout_s)

    def _wait_for_ranks(self, tag: str, timeout_s: float) -> None:
        """Wait until all ranks have come to the same point; warn of ranks that are late."""
        watch = None if self._warn is None else Watch(self._warn, tag, tag, phase="meeting")
        self.post(tag, b"", timeout_s=timeout_s)
        if not self.is_leader:
            self.hear(tag, timeout_s=timeout_s + GRACE_S, watch=watch)
            return
        try:
            self.collect(tag, timeout_s=timeout_s, watch=watch).expect_all(tag)
        except RanksError as error:
            self.fail(tag, RankFailure.from_error(error, phase="meeting"), timeout_s=_GET_S)
            raise
        self.announce(tag, b"", timeout_s=timeout_s)

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.check_tag_unused("post", tag)
        self._within(timeout_s, partial(self._post, tag, data), tag)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        say = self._put_announcement if self.is_leader else self._post
        self._within(timeout_s, partial(say, tag, failure), tag)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        self.expect_leader()
        self.check_tag_unused("collect", tag)
        collect = partial(self._collect_posts, tag, time.monotonic() + timeout_s, watch)
        return self._within(timeout_s + READ_S, collect)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        self._within(timeout_s, partial(self._put_announcement, tag, data))

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        of_followers = dict(enumerate(messages))
        del of_followers[LEADER]
        self._within(timeout_s, partial(self._put_each, tag, of_followers))

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        self.expect_follower()
        hear = partial(self._receive_announcement, tag, time.monotonic() + timeout_s, watch)
        phase = "" if watch is None else watch.phase
        try:
            said = self._within(timeout_s, hear, tag if watch else "", phase)
        except _Ended as ended:
            raise RanksSilent(tag, [LEADER], lost=(phase, ended.why[LEADER])) from None
        except RanksSilent:
            raise
        except DeadlineExceeded as error:
            raise RanksSilent(tag, [LEADER]) from error
        return expect_heard(tag, said)

    @override
    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._connections is not None:
            stop_at_next_meeting(self._connections)
        if self.is_leader and self._nonce:
            _ENDED.append((self._nonce, self._rounds))
            self._nonce = ""

    def _post(self, tag: str, said: bytes | RankFailure) -> None:
        write_message(self._store, _post_name(self.rank, tag), said)
        num_posts = self._store.add(_count_key(tag), 1)
        if isinstance(said, RankFailure) or num_posts == self.world_size:
            self._store.set(_over_key(tag), b"")

    def _put_announcement(self, tag: str, said: bytes | RankFailure) -> None:
        write_message(self._store, _announcement_name(tag), said)
        self._retire(tag, 0)

    def _put_each(self, tag: str, messages: Mapping[int, bytes]) -> None:
        write_each(self._store, _announcement_name(tag), messages)
        self._retire(tag, 0)

    def _receive_announcement(
        self, tag: str, end: float, watch: Watch | None
    ) -> bytes | RankFailure:
        name = _announcement_name(tag)

        def look(waited_s: float) -> None:
            silent = self._expect_running(lambda ranks: [rank for rank in ranks if rank == LEADER])
            if watch is None:
                return
            if watch.begins is not None and waited_s >= watch.next_s:
                has_begun = has(self._store, _post_name(LEADER, watch.begins))
                has_begun = has_begun or self._num_posts(watch.begins) == self.world_size
                watch.warn_of_late_ranks(
                    waited_s, self._describe_ranks([] if has_begun else [LEADER])
                )
            watch.tell_silent(waited_s, self._describe_ranks(silent))

        self._await(lambda: has(self._store, name), end, None if watch is None else look)
        return get_announcement(self._store, name, self.rank)

    def _collect_posts(self, tag: str, end: float, watch: Watch | None) -> Collected:
        def lacking(ranks: Iterable[int]) -> list[int]:
            return [rank for rank in ranks if not has(self._store, _post_name(rank, tag))]

        def look(waited_s: float) -> None:
            silent = self._expect_running(lacking)
            if watch is None:
                return
            if waited_s >= watch.next_s:
                watch.warn_of_late_ranks(
                    waited_s, self._describe_ranks(lacking(range(self.world_size)))
                )
            watch.tell_silent(waited_s, self._describe_ranks(silent))

        ended: Mapping[int, str] = {}
        try:
            over = _over_key(tag)
            self._await(lambda: self._store.check([over]), end, None if watch is None else look)
        except DeadlineExceeded:
            pass
        except _Ended as error:
            ended = error.why
        posts = _take_posts(self._store, tag, self.world_size)
        self._retire(tag, len(posts))
        phase = "" if watch is None else watch.phase
        lost = {rank: RankFailure(phase, why) for rank, why in ended.items()}
        return Collected.from_posts({**lost, **posts}, self.world_size)

    def _num_posts(self, tag: str) -> int:
        return self._store.add(_count_key(tag), 0)

    # Processes of other ranks, looked at in a wait

    def _expect_running(self, needed: Callable[[Iterable[int]], list[int]]) -> list[int]:
        """Raise `_Ended` if a `needed` rank has ended; return those that were silent for long."""
        if self._processes is None:
            return []
        neighbors = self._neighbors(self._processes)
        seen = {rank for rank, one in neighbors.items() if self._processes.has_ended(one)}
        ended, self._suspects = seen & self._suspects, seen
        for rank in ended - self._reported:  # the leader may be on a host that cannot see it
            number = self._store.add(_NUM_ENDED, 1)
            self._store.set(f"ended/{number}", b"%d" % rank)
            self._reported.add(rank)
        if self.is_leader and self._store.check([_NUM_ENDED]):
            for number in range(1, self._store.add(_NUM_ENDED, 0) + 1):
                if self._store.check([f"ended/{number}"]):
                    ended.add(int(self._store.get(f"ended/{number}")))
        silent, connections = self._long_silent(), self._connections
        unseen = {
            rank
            for rank in silent
            if rank not in neighbors and (connections is None or not connections.is_connected(rank))
        }
        lost = {*self._find_lost(), *(rank for rank in unseen if silent[rank] >= LOST_S)}
        if why := {rank: self._end_of(rank) for rank in needed(sorted(ended | lost))}:
            raise _Ended(why)
        return needed(sorted(silent))

    def _find_lost(self, least_s: float = RECONNECT_S) -> Mapping[int, ConnectionEnd]:
        """Return the ranks whose connections ended at least so many seconds ago."""
        return {} if self._connections is None else self._connections.find_lost(least_s)

    def _end_of(self, rank: int) -> str:
        process, end = self._known.get(rank), self._find_lost().get(rank)
        which = "its process" if process is None else describe_process(process)
        if end is not None and end.is_host:
            return (
                f"the host of {which} does not answer: it is lost, hangs or cannot be reached over "
                "the network"
            )
        silent_s = self._silences.by_rank.get(rank, 0.0)
        if silent_s < LOST_S:
            return f"{which} has ended; look in its log for the reason"
        return (
            f"{which} has shown no sign of life for {silent_s:.0f} s: it has ended, is stopped or "
            "keeps Python's lock, or its host is lost. Look in its log"
        )

    def _long_silent(self) -> Mapping[int, float]:
        """Return for how long ranks have sent no heartbeat, if that is long."""
        if self._heartbeat is None or (self._is_default and not dist.is_initialized()):
            return {}  # others send none, either
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._look_s
            ranks = [*range(1, self.world_size)] if self.is_leader else [LEADER]
            beats: dict[int, bytes] = {}
            for start in range(0, len(ranks), MAX_NUM_KEYS):
                some = ranks[start : start + MAX_NUM_KEYS]
                if not self._store.check([_beat_key(rank) for rank in some]):
                    some = [rank for rank in some if self._store.check([_beat_key(rank)])]
                found = self._store.multi_get([_beat_key(rank) for rank in some]) if some else []
                beats.update(zip(some, found, strict=True))
            self._silences.record_heartbeats(beats, now_s)
        long = self._silences.by_rank.items()
        return {r: silent_s for r, silent_s in long if silent_s >= FIRST_S}

    def _neighbors(self, processes: Processes) -> Mapping[int, Process]:
        """Return the processes of ranks that this rank looks at, which are on its host."""
        if self.is_leader:
            ranks = range(self.world_size)
        else:
            here = present_ranks()
            first = self.rank - (here.local_rank or 0) if here.rank == self.rank else self.rank
            ranks = range(first, min(first + (here.local_world_size or 1), self.world_size))
        found = {rank: self._process(rank) for rank in {LEADER, *ranks} - {self.rank}}
        own = processes.own
        return {
            rank: process
            for rank, process in found.items()
            if process is not None
            and (process.boot_id, process.pid_namespace) == (own.boot_id, own.pid_namespace)
        }

    def _process(self, rank: int) -> Process | None:
        """Return the process of a rank; None: it has not said it yet, or has not met to say it."""
        if rank not in self._known and self._nonce and self._store.check([_process_key(rank)]):
            data = self._store.get(_process_key(rank))
            self._known[rank] = decode_message(data, Process, f"process of rank {rank}")
        return self._known.get(rank)

    def _describe_ranks(self, ranks: Iterable[int]) -> dict[int, str]:
        silences = self._silences.by_rank
        return {r: describe_rank(r, self._process(r), silences.get(r, 0.0)) for r in ranks}

    def _retire(self, tag: str, num_taken: int) -> None:
        """Note a round and its taken posts; delete what is left of old ones."""
        now = time.monotonic()
        before = self._rounds.pop(tag, None)
        num_taken += 0 if before is None else before.num_taken
        self._rounds[tag] = _Round(num_taken=num_taken, used_s=now)
        # A rank that waits long looks rarely, and many short rounds of others may pass meanwhile.
        while len(self._rounds) > NUM_KEPT_ROUNDS:
            old_tag = next(iter(self._rounds))
            if now - self._rounds[old_tag].used_s < KEPT_S:
                return
            _delete_round(self._store, old_tag, self._rounds.pop(old_tag), self.world_size)

    def _meet(
        self, store: TorchStore, absent: list[int], end: float, watch: Watch | None
    ) -> GroupStore:
        """Agree on a nonce; return a clone of the store in which all keys begin with it."""
        own = _prefixed("holdfast", store).clone()
        own.set_timeout(timedelta(seconds=_GET_S))

        def look(waited_s: float) -> None:
            if watch is not None and waited_s >= watch.next_s:
                watch.warn_of_late_ranks(
                    waited_s, {rank: describe_rank(rank, None) for rank in absent}
                )

        if self.is_leader:
            nonce = secrets.token_hex(16)
            self._keep_connections(_prefixed(nonce, own), _server_of(store))
            self._invite(own, nonce, absent, end, look)
            self._delete_ended(own, end)
        else:
            nonce = self._greet_leader(own, end, look)
        met = _prefixed(nonce, own)
        if self._processes is not None:
            met.set(_process_key(self.rank), msgspec.msgpack.encode(self._processes.own))
        if not self.is_leader:
            self._keep_connections(met, _server_of(store))
        stop_former()
        self._nonce = nonce
        return met

    def _keep_connections(self, store: GroupStore, server: tuple[str, int] | None) -> None:
        """Listen for followers, or connect to the leader, if the store has a server to go by."""
        if self._processes is None or server is None:
            return
        here = present_ranks()
        local_rank, num_local = here.local_rank, here.local_world_size
        if here.rank != self.rank:
            local_rank = num_local = None
        if self.is_leader:
            is_one_host = num_local == self.world_size
            own = self._processes.own
            try:
                leading = LeaderListener(self.world_size, server, own, is_one_host=is_one_host)
            except OSError as error:
                if self._warn is not None:
                    self._warn(describe_problem(f"the leader cannot listen for ranks: {error}"))
                return
            store.set(_LEADER_KEY, msgspec.msgpack.encode(leading.address))
            self._connections = leading
        elif store.check([_LEADER_KEY]):
            address = decode_message(store.get(_LEADER_KEY), LeaderAddress, "address of the leader")
            self._known[LEADER] = address.process
            if address.is_for_first_ranks and local_rank:
                return
            self._connections = LeaderConnection(self.rank, address, server[0])
        else:
            return
        weakref.finalize(self, stop_at_next_meeting, self._connections)
        self._connections.start_watching()

    def _invite(
        self,
        store: GroupStore,
        nonce: str,
        absent: list[int],
        end: float,
        look: Callable[[float], None],
    ) -> None:
        """Give a new nonce to each follower that says hello, and take it off `absent`."""
        store.set("leader", nonce.encode())

        def are_all_here() -> bool:
            for rank in [r for r in absent if store.check([f"hello/{nonce}/{r}"])]:
                token = store.get(f"hello/{nonce}/{rank}").decode()
                store.delete_key(f"hello/{nonce}/{rank}")
                store.set(f"welcome/{token}", nonce.encode())
                absent.remove(rank)
            return not absent

        self._await(are_all_here, end, look)

    def _delete_ended(self, store: GroupStore, end: float) -> None:
        """Delete the keys of closed coordinators, which no rank uses any more."""
        while _ENDED:
            nonce, rounds = _ENDED.pop()
            former = _prefixed(nonce, store)
            for tag, one in dict(rounds).items():
                if time.monotonic() > end:  # the meeting succeeded; cleanup must not fail it
                    return
                _delete_round(former, tag, one, self.world_size)
            if self._processes is not None:
                former.delete_key(_LEADER_KEY)
                for rank in range(self.world_size):
                    former.delete_key(_process_key(rank))
                    former.delete_key(_beat_key(rank))

    def _greet_leader(self, store: GroupStore, end: float, look: Callable[[float], None]) -> str:
        """Say hello to the leader, again to each newer one, until one answers with its nonce."""
        token, greeted = secrets.token_hex(16), b""

        def is_welcome() -> bool:
            nonlocal greeted
            leader = store.get("leader") if store.check(["leader"]) else greeted
            if leader != greeted:
                store.set(f"hello/{leader.decode()}/{self.rank}", token.encode())
                if greeted:  # of a former leader, whom nobody answers for any more
                    store.delete_key(f"hello/{greeted.decode()}/{self.rank}")
                greeted = leader
            return store.check([f"welcome/{token}"])

        self._await(is_welcome, end, look)
        nonce = store.get(f"welcome/{token}").decode()
        store.delete_key(f"welcome/{token}")
        return nonce

    def _within(
        self, timeout_s: float, job: Callable[[], T], tag: str = "", phase: str = _CALL
    ) -> T:
        """Run a job in another thread, which is left behind if the store holds it for too long.

        With a `tag`, the leader's loss ends it, too: with its host the store may have been lost.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                f"process {self._pid} made this coordinator, and process {os.getpid()} is a fork "
                "of it, which must not use its connection. Make these calls in the parent process"
            )
        if timeout_s <= 0:
            raise DeadlineExceeded(
                f"rank {self.rank}: the time limit passed before this call could send a message to "
                "the other ranks, because of an earlier wait"
            )
        connections = self._connections
        if connections is not None and connections.problem is not None and self._warn is not None:
            self._warn(connections.problem)
            connections.problem = None
        future: Future[T] = Future()
        end = time.monotonic() + timeout_s
        self._threads.start_call(partial(self._do, future, job, timeout_s))
        while tag and not wait([future], min(max(end - time.monotonic(), 0.0), _GLANCE_S)).done:
            # The job itself has looked by then, unless the store holds it.
            if LEADER in self._find_lost(RECONNECT_S + 3 * _GLANCE_S):
                raise RanksSilent(tag, [LEADER], lost=(phase, self._end_of(LEADER)))
            if time.monotonic() >= end:
                break
        if not wait([future], max(end - time.monotonic(), 0.0)).done:
            raise DeadlineExceeded(
                f"the store of torch.distributed did not answer within {time_limit(timeout_s)}: "
                "the process that hosts it, rank 0 or torchrun, is stopped or busy"
            )
        return future.result()

    def _do(self, future: Future[T], job: Callable[[], T], timeout_s: float) -> None:
        if not self._turn.acquire(timeout=timeout_s):
            return  # the caller has given up, too
        try:
            result = job()
        except RuntimeError as error:  # of torch: its own classes are not all that its stores raise
            lost = Disconnected(
                f"the store of torch.distributed cannot be reached: {error}. The process that "
                "hosts it, rank 0 or torchrun, has probably ended"
            )
            lost.__cause__ = error
            future.set_exception(lost)
        except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            self._turn.release()

    def _await(
        self, is_so: Callable[[], bool], end: float, look: Callable[[float], None] | None = None
    ) -> None:
        """Look more and more rarely until it is so or time is over; others may use the store."""
        begin = time.monotonic()
        next_look = begin + LOOK_S
        least_s = max(_SHORTEST_PAUSE_S, self.world_size * _PAUSE_A_RANK_S)
        while not is_so():
            now = time.monotonic()
            if now >= end:
                raise DeadlineExceeded("nothing came by the deadline")
            if look is not None and (now >= next_look or self._find_lost()):
                next_look = now + LOOK_S
                look(now - begin)
            pause_s = min(max(least_s, (now - begin) / 8), _LONGEST_PAUSE_S)
            self._turn.wait(min(pause_s, end - now))


class _Ended(Exception):
    """Processes of ranks have ended that a wait needs; `why` says of each how that is known."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__()
        self.why = why


def _innermost(store: TorchStore) -> TorchStore:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _grows(store: TorchStore) -> bool:
    """Whether a store keeps each value that was ever set, as one in a file does."""
    return isinstance(_innermost(store), dist.FileStore)  # type: ignore[attr-defined]


def _server_of(store: TorchStore) -> tuple[str, int] | None:
    """Return host and port of the server of a store; None if it has none."""
    inner = _innermost(store)
    if not isinstance(inner, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    return inner.host, inner.port


def _send_beat(store: GroupStore, rank: int, is_default: bool, value: bytes) -> None:
    """Send a heartbeat, but not after the end of torch's default group."""
    if not is_default or dist.is_initialized():
        store.set(_beat_key(rank), value)


def _stop_calls(turn: Condition, threads: CallThreads) -> None:
    """End idle threads, and take the turn of a coordinator for good, when the interpreter exits.

    A thread that returned from torch later would abort the process. One that is held by a store
    whose server is stopped does not return.
    """
    threads.release_idle_threads()
    turn.acquire(timeout=_EXIT_S)


def _prefixed(prefix: str, store: TorchStore | GroupStore) -> GroupStore:
    """Return a view of a store, in which each key begins with `prefix`."""
    return cast(GroupStore, PrefixStore(prefix, cast("TorchStore", store)))


def _take_posts(store: GroupStore, tag: str, world_size: int) -> dict[int, bytes | RankFailure]:
    """Read and delete the posts of a round that have arrived; return them by rank."""
    names = {_post_name(rank, tag): rank for rank in range(world_size)}
    found = take_present(store, [*names])
    return {names[name]: said for name, said in found.items()}


def _delete_round(store: GroupStore, tag: str, one: _Round, world_size: int) -> None:
    """Delete what is left of a round in the store."""
    are_left = store.add(_count_key(tag), 0) != one.num_taken
    store.delete_key(_count_key(tag))
    store.delete_key(_over_key(tag))
    with suppress(FormatError):  # no message, and none of this round
        delete_announcement(store, _announcement_name(tag), world_size)
        if are_left:
            _take_posts(store, tag, world_size)


# Parts of a round in the store: the posts and the announcement are messages, the others keys.


def _post_name(rank: int, tag: str) -> str:
    return f"{rank}/{tag}"


def _announcement_name(tag: str) -> str:
    return f"announced/{tag}"


def _count_key(tag: str) -> str:
    """Key of the number of posts."""
    return f"posted/{tag}"


def _process_key(rank: int) -> str:
    """Key of the process of a rank."""
    return f"process/{rank}"


def _beat_key(rank: int) -> str:
    """Key of the heartbeat of a rank."""
    return f"beat/{rank}"


def _over_key(tag: str) -> str:
    """Key that exists when all ranks have posted, or one has failed."""
    return f"over/{tag}"


class GroupExchange(Exchange):
    """Exchange by the backends of the default group; NCCL's goes through the accelerator.

    It has a process group of its own, because a timeout of gloo closes all connections of its
    group, and those of the training's collectives must stay.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Make the group, as all ranks must do at the same point of the program."""
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        has_cpu = "cpu:" in dist.get_backend_config(self._group)
        self._device = None if has_cpu else _own_device()
        if self._device is not None:
            # NCCL connects in the first call, in which all ranks must take part. Not all of them
            # need to share blocks in a load.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._lost: set[int] = set()

    @override
    def start_exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> RankTransfer:
        ops: list[_Operation] = []
        for peer, buffer in sends:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            ops.append(_Operation(dist.isend, peer, host.to(self._device or "cpu")))
        for peer, buffer in receives:
            host = torch.frombuffer(buffer, dtype=torch.uint8)
            if self._device is None:
                ops.append(_Operation(dist.irecv, peer, host))
            else:
                there = torch.empty_like(host, device=self._device)
                ops.append(_Operation(dist.irecv, peer, there, partial(host.copy_, there)))
        return _GroupTransfer(ops, self._begun, self._lost)

    def _begun(self, ops: Sequence[_Operation]) -> list[Any]:
        batch = [dist.P2POp(op.do, op.tensor, group=self._group, group_peer=op.peer) for op in ops]
        return dist.batch_isend_irecv(batch)


def _own_device() -> torch.device:
    """Return the GPU of this rank: that of its process group, if it is bound to one."""
    group = dist.group.WORLD
    bound = None if group is None else group.bound_device_id
    return bound or torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True)
class _Operation:
    """Send or receive that is under way."""

    do: Callable[..., Any]
    peer: int
    tensor: Tensor
    after: Callable[[], object] | None = None
    """Copies what was received to the host."""


class _GroupTransfer(RankTransfer):
    """Operations of torch.distributed under way; adds lost ranks to a set."""

    def __init__(
        self,
        ops: Sequence[_Operation],
        begun: Callable[[Sequence[_Operation]], list[Any]],
        lost: set[int],
    ) -> None:
        self._ops = [op for op in ops if op.peer not in lost]
        self._lost = lost
        self._works: list[Any] = []
        # What a lost rank was to send will not come, also in the exchange of a later load.
        self._errors = ["an earlier transfer has failed"] if len(self._ops) < len(ops) else []
        if self._ops:
            with self._noting({op.peer for op in self._ops}):
                self._works = begun(self._ops)

    @override
    def wait_until_done(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        # NCCL gives one work for all of them.
        is_each = len(self._works) == len(self._ops)
        for number, work in enumerate(self._works):
            with self._noting({op.peer for op in ([self._ops[number]] if is_each else self._ops)}):
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        if self._errors:
            raise Disconnected(
                f"tensors could not be exchanged with ranks {sorted(self._lost)}: "
                f"{self._errors[0]}. One of the ranks has ended or is stopped"
            )
        for op in self._ops:
            if op.after is not None:
                op.after()

    @contextmanager
    def _noting(self, peers: set[int]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of torch
            self._errors.append(f"{error}")
            self._lost |= peers
