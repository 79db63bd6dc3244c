"""Virtual clock, messages, store and faults of a simulated cluster.

One thread runs at a time. A thread that waits gives its turn to the earliest event. One seed always
gives one order of events, so use no other time or randomness (tests/testing/test_cluster.py).
"""

from __future__ import annotations

import heapq
import math
import random
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from typing import TypeAlias

from typing_extensions import override

from holdfast.errors import (
    AlreadyExists,
    DeadlineExceeded,
    Disconnected,
    OutcomeUnknown,
    TransientStoreError,
    UsageError,
)
from holdfast.ranks.coordinator import (
    LEADER,
    Collected,
    Coordinator,
    RankFailure,
    Watch,
    expect_heard,
)
from holdfast.store.base import Buffer, ObjectInfo, Store, WrappedStore
from holdfast.testing.faulty import Stopped

Event: TypeAlias = "Callable[[], object]"
"""Function that is called between two turns, at its time."""
Condition: TypeAlias = "Callable[[], bool]"
_Step: TypeAlias = "Callable[[], VirtualThread | None]"
"""Event of the queue: returns the thread that gets the turn, if one does."""

_REAL_LIMIT_S = 300.0
"""Seconds of the real clock after which a turn that nobody gives back is an error."""
_STACK_NBYTES = 1 << 20


class VirtualThread:
    """A thread of the simulation, and the lock by which it gets its turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident: int | None = None
        self.is_done = False
        self.num_waits = 0
        """Number of its last wait: an event that ends an earlier one does nothing."""
        self._go = threading.Semaphore(0)

    def is_other_thread(self) -> bool:
        """Whether the thread that calls is not that of this task."""
        return threading.get_ident() != self.ident

    def take_turn(self) -> None:
        """Let this thread continue."""
        self._go.release()

    def wait_for_turn(self) -> None:
        """Wait, in this thread, for its turn."""
        if not self._go.acquire(timeout=_REAL_LIMIT_S):
            raise DeadlineExceeded(f"{self.name} got no turn within {_REAL_LIMIT_S:.0f} s")


class VirtualClock:
    """Time and turns of a simulation. All methods run in the thread that has the turn."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, _Step]] = []
        self._numbers = count()
        self._waiting: defaultdict[object, list[tuple[VirtualThread, int]]] = defaultdict(list)
        self._tasks: list[VirtualThread] = []
        self._num_running = 0
        self._main = VirtualThread("the simulation")

    def call_at(self, time_s: float, call: Event) -> None:
        """Call a function at a time, between two turns."""

        def event() -> None:
            call()

        self._push(time_s, event)

    def start_task(self, name: str, work: Event, *, at_s: float) -> VirtualThread:
        """Start a thread at a time; `work` must raise nothing."""
        task = VirtualThread(name)
        self._tasks.append(task)
        self._num_running += 1

        def run() -> None:
            task.ident = threading.get_ident()
            # It starts while another thread has the turn, which passes it on to this one.
            task.wait_for_turn()
            try:
                work()
            finally:
                task.is_done = True
                self._num_running -= 1
                self._pass_turn(None)

        def begin() -> VirtualThread:
            before = threading.stack_size(_STACK_NBYTES)
            try:
                threading.Thread(target=run, name=name, daemon=True).start()
            finally:
                threading.stack_size(before)
            return task

        self._push(at_s, begin)
        return task

    def run_all(self) -> None:
        """Run until every task has ended and every event has come, in the thread that calls.

        Raises:
            DeadlineExceeded: tasks wait for something that will never come.
        """
        self._pass_turn(self._main)
        if self._num_running:
            names = [task.name for task in self._tasks if not task.is_done]
            raise DeadlineExceeded(f"waiting for ever: {', '.join(names[:10])}")

    def pause(self, task: VirtualThread, seconds: float) -> None:
        """Let time pass in a task."""
        self._push(self.now_s + seconds, self._resumer(task))
        self._pass_turn(task)

    def wait_until(self, task: VirtualThread, key: object, is_so: Condition, end_s: float) -> bool:
        """Wait until a condition holds after a `notify`, or a time; return whether it holds."""
        while not is_so():
            if self.now_s >= end_s:
                return False
            resume = self._resumer(task)
            self._waiting[key].append((task, task.num_waits))
            self._push(end_s, resume)
            self._pass_turn(task)
        return True

    def notify(self, key: object) -> None:
        """Let the tasks that wait for a key look again."""
        for task, number in self._waiting.pop(key, ()):
            if task.num_waits == number:
                self._push(self.now_s, self._resumer(task))

    def _resumer(self, task: VirtualThread) -> _Step:
        task.num_waits += 1
        number = task.num_waits

        def resume() -> VirtualThread | None:
            if task.num_waits != number or task.is_done:
                return None  # another event has ended this wait, such as its deadline
            # Else a second event for the same wait would give the turn to a thread that has it.
            task.num_waits += 1
            return task

        return resume

    def _push(self, time_s: float, event: _Step) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def _pass_turn(self, task: VirtualThread | None) -> None:
        """Let the earliest events happen until the turn is that of a task, perhaps this one."""
        following: VirtualThread | None = None
        while following is None and self._events:
            time_s, _, event = heapq.heappop(self._events)
            self.now_s = time_s
            following = event()
        if following is None:
            # Nothing is left to happen: all threads have ended, or wait for ever.
            following = self._main
        if following is task:
            return
        following.take_turn()
        if task is not None:
            task.wait_for_turn()


NoteChange: TypeAlias = "Callable[[str, str], object]"
"""Callback with the operation and the key, after a put or a deletion took effect."""
_FindRanks: TypeAlias = "Callable[[], list[int]]"

NOTICED_S = 10.0
"""Seconds after which others notice that a process has ended."""
_FAST_S = 0.001
"""Median seconds that an operation of the store, or a message, takes."""
_LONGEST = 4.0
"""Longest stop and cut, in deadlines of a save."""
_ID = re.compile(r"-[0-9a-f]{8}\b|\b[0-9a-f]{32}\b|\d{4}-\d\d-\d\dT[\d:+]+")
"""Random parts of names, and times of the real clock: a seed does not decide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities of faults, by default each for one operation of the store or one message."""

    crash: float = 0.0
    """The process ends before the operation."""
    stop: float = 0.0
    """The process stops before the operation, for up to four times the deadline of a save."""
    cut: float = 0.0
    """The host of the rank is cut off from all messages, for as long. Messages are late or lost."""
    lost: float = 0.0
    """The message never arrives, and its sender may be told so, or not."""
    store_error: float = 0.0
    """The operation of the store raises `TransientStoreError`, and has no effect."""
    lost_reply: float = 0.0
    """A put takes effect, and raises `OutcomeUnknown`."""
    late_put: float = 0.0
    """A put raises `OutcomeUnknown`, and takes effect later or never."""
    takeover: float = 0.0
    """Probability, for each life, that the next one begins while all of its ranks still run."""

    def __post_init__(self) -> None:
        for name, value in ((one.name, getattr(self, one.name)) for one in fields(self)):
            if not 0 <= value <= 1:
                raise UsageError(f"{name}={value}: must be from 0 to 1")


class VirtualProcess:
    """The process of one rank: its thread, its faults and what it has done."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        chance: random.Random,
        faults: Faults,
        *,
        timeout_s: float,
        trace: list[str],
    ) -> None:
        self.name = name
        self.clock = clock
        self.chance = chance
        self.faults = faults
        self.timeout_s = timeout_s
        self.ended_s: float | None = None
        """When it ended."""
        self.task: VirtualThread
        self._trace = trace

    def begin_operation(self, what: str) -> None:
        """Let an operation take its time, and raise `Stopped` if the process has ended."""
        self.expect_running()
        drawn = self.chance.random()
        if drawn < self.faults.crash:
            self.note(f"ends before {what}")
            self.end_process()
        elif drawn < self.faults.crash + self.faults.stop:
            stop_s = self.long_s()
            self.note(f"stops for {stop_s:.0f} s before {what}")
            self.clock.pause(self.task, stop_s)
        else:
            self.clock.pause(self.task, self.short_s())
        self.expect_running()
        self.note(what)

    def expect_running(self) -> None:
        """Raise `Stopped` if the process has ended."""
        if self.ended_s is not None:
            raise Stopped(self.name)

    def end_process(self) -> None:
        """End the process: its next operation raises `Stopped`."""
        if self.ended_s is None:
            self.ended_s = self.clock.now_s

    def short_s(self) -> float:
        """Draw the time of an operation without faults."""
        return _FAST_S * math.exp(self.chance.gauss(0.0, 1.0))

    def long_s(self) -> float:
        """Draw the time of a stop or a cut: from a second to some deadlines."""
        return math.exp(self.chance.uniform(0.0, math.log(_LONGEST * self.timeout_s)))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._trace.append(f"{self.clock.now_s:10.3f} {self.name}: {_ID.sub('', text)}")


class Network:
    """Messages of the ranks of one process group."""

    def __init__(self, processes: list[VirtualProcess], *, ranks_per_host: int) -> None:
        self.processes = processes
        self.clock = processes[0].clock
        self._ranks_per_host = ranks_per_host
        self._cut_until_s: defaultdict[int, float] = defaultdict(float)
        """End of the cut of each host."""
        self._posts: defaultdict[str, dict[int, bytes | RankFailure]] = defaultdict(dict)
        self._heard: defaultdict[int, dict[str, bytes | RankFailure]] = defaultdict(dict)

    def send(self, rank: int, receiver: int, deliver: Event) -> bool:
        """Send a message between the leader and a rank; return whether it may arrive in time."""
        process, follower = self.processes[rank], max(rank, receiver)
        faults, chance = process.faults, process.chance
        host = follower // self._ranks_per_host
        if follower == LEADER:
            # Its own post crosses no network.
            deliver()
            return True
        if chance.random() < faults.cut:
            self._cut_until_s[host] = self.clock.now_s + process.long_s()
            process.note(f"host {host} is cut off until {self._cut_until_s[host]:.0f} s")
        arrival_s = self.clock.now_s + process.short_s()
        is_late = arrival_s < self._cut_until_s[host]
        if chance.random() < (0.5 if is_late else faults.lost):
            process.note(f"the message to rank {receiver} is lost")
            return False
        self.clock.call_at(max(arrival_s, self._cut_until_s[host]), deliver)
        return not is_late

    def post(self, tag: str, rank: int, said: bytes | RankFailure) -> bool:
        """Send a post to the leader; return whether it may arrive in time."""

        def deliver() -> None:
            # A rank that posts and then fails may be heard in either order: the first one counts.
            self._posts[tag].setdefault(rank, said)
            self.clock.notify((id(self), tag))

        return self.send(rank, LEADER, deliver)

    def announce(self, tag: str, rank: int, said: bytes | RankFailure) -> bool:
        """Send the leader's announcement to one rank; return whether it may arrive in time."""

        def deliver() -> None:
            self._heard[rank][tag] = said
            self.clock.notify((id(self), tag, rank))

        return self.send(LEADER, rank, deliver)

    def take_posts(self, tag: str, timeout_s: float) -> dict[int, bytes | RankFailure]:
        """Wait, in the leader, for the posts of a round; processes that end count as failed."""
        process, posts = self.processes[LEADER], self._posts[tag]

        def is_over() -> bool:
            return len(posts) == len(self.processes) or any(
                isinstance(post, RankFailure) for post in posts.values()
            )

        self._wait_for(process, (id(self), tag), is_over, timeout_s, lambda: self._ended(posts))
        for rank in self._ended(posts):
            posts[rank] = RankFailure("its script", "its process has ended")
        return dict(sorted(posts.items()))

    def hear(self, tag: str, rank: int, timeout_s: float) -> bytes | RankFailure | None:
        """Wait, in a follower, for an announcement; None if the leader is silent or has ended."""
        process, heard = self.processes[rank], self._heard[rank]
        self._wait_for(
            process,
            (id(self), tag, rank),
            lambda: tag in heard,
            timeout_s,
            lambda: [] if self._is_seen(LEADER) else [LEADER],
        )
        return heard.get(tag)

    def _wait_for(
        self,
        process: VirtualProcess,
        key: object,
        is_so: Condition,
        timeout_s: float,
        ended: _FindRanks,
    ) -> None:
        """Wait; look for ended processes now and then."""
        end_s = self.clock.now_s + timeout_s
        while not is_so() and not ended():
            look_s = min(end_s, self.clock.now_s + NOTICED_S / 2)
            self.clock.wait_until(process.task, key, is_so, look_s)
            process.expect_running()
            if self.clock.now_s >= end_s:
                return

    def _ended(self, posts: dict[int, bytes | RankFailure]) -> list[int]:
        ranks = range(len(self.processes))
        return [rank for rank in ranks if rank not in posts and not self._is_seen(rank)]

    def _is_seen(self, rank: int) -> bool:
        ended_s = self.processes[rank].ended_s
        return ended_s is None or self.clock.now_s < ended_s + NOTICED_S


class VirtualCoordinator(Coordinator):
    """Coordinator of a simulated rank."""

    def __init__(self, rank: int, network: Network) -> None:
        super().__init__(rank, len(network.processes))
        self._network = network
        self._process = network.processes[rank]

    @override
    def now_s(self) -> float:
        return self._process.clock.now_s

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.check_tag_unused("post", tag)
        self._process.begin_operation(f"posts {tag!r}")
        self._expect_sent(self._network.post(tag, self.rank, data), tag, timeout_s)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        self._process.begin_operation(f"fails in {tag!r}: {failure.reason}")
        if self.is_leader:
            self._announce_all(tag, [failure] * self.world_size)
        else:
            self._network.post(tag, self.rank, failure)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        self.expect_leader()
        self.check_tag_unused("collect", tag)
        self._process.begin_operation(f"collects {tag!r}")
        posts = self._network.take_posts(tag, timeout_s)
        return Collected.from_posts(posts, self.world_size)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        self._process.begin_operation(f"announces {tag!r}")
        messages = [data] * self.world_size
        self._expect_sent(self._announce_all(tag, messages), tag, timeout_s)

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        self.expect_leader()
        self.check_tag_unused("announce", tag)
        self._process.begin_operation(f"announces {tag!r} to each")
        self._expect_sent(self._announce_all(tag, messages), tag, timeout_s)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        self.expect_follower()
        self._process.begin_operation(f"hears {tag!r}")
        said = self._network.hear(tag, self.rank, timeout_s)
        return expect_heard(tag, said)

    def _announce_all(self, tag: str, messages: Sequence[bytes | RankFailure]) -> bool:
        ranks = range(1, self.world_size)
        sent = [self._network.announce(tag, rank, messages[rank]) for rank in ranks]
        return any(sent) or not sent

    def _expect_sent(self, is_sent: bool, tag: str, timeout_s: float) -> None:
        """Raise, in half of the cases, for a message that does not arrive in time."""
        chance = self._process.chance.random()
        if is_sent or chance < 0.5:
            return
        if chance < 0.75:
            raise Disconnected(f"{tag}: the connection was lost")
        self._process.clock.pause(self._process.task, timeout_s)
        self._process.expect_running()
        raise DeadlineExceeded(f"{tag}: not sent after {timeout_s:.0f} s")


class VirtualStore(WrappedStore):
    """A process's view of the store: each operation takes time, and may fail."""

    def __init__(self, inner: Store, process: VirtualProcess, changed: NoteChange) -> None:
        """Set up; `changed` is called with what happened to which key, after it did."""
        super().__init__(inner)
        self._process = process
        self._changed = changed

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Put an object; the reply may be lost, or the put may stay in flight."""
        self._begin("put", key)
        content = memoryview(data).tobytes()
        put = partial(self._put_now, key, content, if_absent=if_absent)
        process, drawn = self._process, self._process.chance.random()
        # A late put of the same bytes may arrive after a retry of it, or after the end of its
        # process: a request to an object store outlives its sender.
        if drawn < process.faults.late_put:
            process.note(f"the put of {key} stays in flight")
            if process.chance.random() < 0.75:
                process.clock.call_at(process.clock.now_s + process.long_s(), partial(_try, put))
            raise OutcomeUnknown(f"put {key}: no reply")
        put()
        if drawn < process.faults.late_put + process.faults.lost_reply:
            process.note(f"the reply to the put of {key} is lost")
            raise OutcomeUnknown(f"put {key}: no reply")

    def _put_now(self, key: str, content: bytes, *, if_absent: bool) -> None:
        self.inner.put(key, content, if_absent=if_absent)
        self._changed("put", key)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self._begin("get", key)
        return self.inner.get(key, start, nbytes)

    @override
    def head(self, key: str) -> ObjectInfo:
        self._begin("head", key)
        return self.inner.head(key)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._begin("list", prefix)
        return self.inner.list(prefix)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        self._begin("children", folder)
        return self.inner.children(folder)

    @override
    def delete(self, key: str) -> None:
        self._begin("delete", key)
        self.inner.delete(key)
        self._changed("delete", key)

    def _begin(self, operation: str, key: str) -> None:
        process = self._process
        if process.task.is_other_thread():
            # A pool of readers, for which the rank waits in its turn: only that thread may draw,
            # or the order of the pool would decide what happens.
            process.expect_running()
            return
        process.begin_operation(f"{operation} {key}")
        if process.chance.random() < process.faults.store_error:
            process.note(f"{operation} {key} fails")
            raise TransientStoreError(f"{operation} {key}: injected")


def _try(put: Event) -> None:
    """Let a put that was in flight arrive."""
    try:
        put()
    except AlreadyExists:
        return
