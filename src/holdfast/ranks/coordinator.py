"""`Coordinator`: interface for messages of ranks, which post to the leader and hear it announce.

Implementations must pass tests/ranks/test_contract.py. A `Watch` follows a long wait: who is late,
and whose process has ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.errors import FormatError, RanksFailed, RanksSilent, UsageError, some_of
from holdfast.format.records import Process
from holdfast.format.strictjson import describe_once

T = TypeVar("T")

LEADER = 0
GRACE_S = 5.0
"""Seconds that followers listen longer than the leader collects, so that it can name who is silent.
"""
NUM_KEPT_ROUNDS = 16
"""Rounds after which the leader may delete what a late rank did not hear, or has posted too late.
"""
KEPT_S = 60.0
"""Seconds for which it keeps that in any case: ranks that wait look once a second, or come later.
"""
_NUM_KNOWN_USES = 100
_MAX_REASON_LENGTH = 2000


class RankFailure(NamedTuple):
    """Phase in which a rank failed, and why."""

    phase: str
    reason: str

    @classmethod
    def from_error(cls, error: BaseException, *, phase: str) -> RankFailure:
        """Describe an error raised in `phase`; one of other ranks without its own words."""
        if isinstance(error, RanksFailed):
            reason = "; ".join(error.reasons)
        else:
            reason = f"{type(error).__name__}: {error}"
        # Names of files may have surrogates, which no message can carry.
        encoded = reason[:_MAX_REASON_LENGTH].encode(errors="backslashreplace")
        return cls(phase, encoded.decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Posts of one round, by rank, as the leader got them."""

    came: Mapping[int, bytes]
    failed: Mapping[int, RankFailure]
    silent: Sequence[int]
    """Ranks that had posted nothing by the deadline, or by the first failure."""

    @classmethod
    def from_posts(cls, posts: Mapping[int, bytes | RankFailure], world_size: int) -> Collected:
        """Sort what the ranks have posted, or what is known of them in its place."""
        return cls(
            came={rank: said for rank, said in posts.items() if isinstance(said, bytes)},
            failed={rank: said for rank, said in posts.items() if isinstance(said, RankFailure)},
            silent=[rank for rank in range(world_size) if rank not in posts],
        )

    def expect_all(self, what: str) -> list[bytes]:
        """Return the posts in the order of ranks; `what` names the round in errors."""
        if self.failed:
            raise RanksFailed(what, self.failed)
        if self.silent:
            raise RanksSilent(what, self.silent)
        return [self.came[rank] for rank in sorted(self.came)]


def expect_heard(tag: str, said: bytes | RankFailure | None) -> bytes:
    """Return what the leader has announced; raise if it has failed, or said nothing (None)."""
    if said is None:
        raise RanksSilent(tag, [LEADER])
    if isinstance(said, RankFailure):
        raise RanksFailed(tag, {LEADER: said})
    return said


class RankTransfer(ABC):
    """Handle of bytes under way between ranks."""

    @abstractmethod
    def wait_until_done(self, timeout_s: float) -> None:
        """Wait until all was sent and received."""


class Exchange(ABC):
    """Way to send large buffers between ranks, in the thread that calls; they arrive in order."""

    @abstractmethod
    def start_exchange(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> RankTransfer:
        """Begin to send buffers, and to fill others, each to or from a rank.

        Buffers must stay until the wait. A rank that was lost in an earlier transfer is left out,
        and the wait raises.
        """


class Coordinator(ABC):
    """Way for the ranks of a run to agree, one object in each rank.

    They meet in *rounds*. In a round every rank, the leader too, posts one message to the leader,
    or says that it failed; the leader collects, and announces one message to the followers, or one
    to each. Either half may be left out. Several rounds may be under way at a time, in several
    threads.

    A round has a `tag`, the same in all ranks, which is used once: a rank that posts, collects or
    announces under one of its last tags again gets a `UsageError`. Users of one coordinator begin
    their tags with a `number` of it. A follower may hear an announcement for `KEPT_S` seconds, and
    until the leader is `NUM_KEPT_ROUNDS` rounds further.

    Every verb raises `Disconnected` where the ranks can no longer reach each other. No verb takes
    longer than its `timeout_s`, but for a few seconds in which `collect` reads what came. A message
    whose verb raised `DeadlineExceeded` may still arrive.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"rank={rank} must be from 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.is_leader = rank == LEADER
        self._numbers = count()
        self._uses: deque[tuple[str, str]] = deque(maxlen=_NUM_KNOWN_USES)
        self._use_lock = Lock()

    def now_s(self) -> float:
        """Return the monotonic time, in seconds, on which deadlines of saves are measured."""
        return time.monotonic()

    def number(self) -> int:
        """Return 0, 1, 2 and so on, in the same order on all ranks: begins a user's tags."""
        return next(self._numbers)

    @abstractmethod
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        """Send this rank's message to the leader, or raise `DeadlineExceeded`."""

    @abstractmethod
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        """Say that this rank failed, in place of its message of the round; or `DeadlineExceeded`.

        In a follower, `collect` returns at once; after the leader's, `hear` raises. After that
        message it is allowed, but may come too late.
        """

    @abstractmethod
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        """Wait, in the leader, until every rank has posted, one has failed, or the deadline.

        With `watch` it warns of late ranks, and a rank whose process has ended counts as failed.
        Raises `DeadlineExceeded` or `FormatError` if posts cannot be read.
        """

    @abstractmethod
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        """Send the leader's message to all followers, or raise `DeadlineExceeded`."""

    @abstractmethod
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        """Send each follower a message of its own, by rank, which it hears as an announcement.

        That of the leader is not sent. Raises `DeadlineExceeded`.
        """

    @abstractmethod
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        """Wait, in a follower, for the leader's announcement; raises `RanksFailed`, `RanksSilent`.

        With `watch` it warns of a late leader, and ends if the leader's process has.
        """

    def exchange(self, *, timeout_s: float) -> Exchange:
        """Make a way to exchange buffers, at one point on all ranks; `UsageError` if none."""
        raise UsageError(
            f"broadcast=True or HostTiers: the ranks of {type(self).__name__} send each other no "
            "tensors; use torch's default process group"
        )

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Note that this rank begins no more rounds, so that its messages can be deleted.

        Does not wait. Other ranks can still hear what this one has said, until all ranks have met
        to make another coordinator.
        """

    def check_tag_unused(self, verb: str, tag: str) -> None:
        """Raise `UsageError` if this rank has used the verb with the tag in its last rounds."""
        with self._use_lock:
            if (verb, tag) in self._uses:
                raise UsageError(
                    f"rank {self.rank} has used the tag {tag!r} to {verb} before: each round needs "
                    "a tag of its own, which begins with a number() of the coordinator"
                )
            self._uses.append((verb, tag))

    def expect_leader(self) -> None:
        """Raise `UsageError` in a follower."""
        if not self.is_leader:
            raise UsageError(f"rank {self.rank} is a follower: only the leader does this")

    def expect_follower(self) -> None:
        """Raise `UsageError` in the leader."""
        if self.is_leader:
            raise UsageError("the leader hears no announcement: it makes them")


def decode_message(message: bytes, kind: type[T], what: str) -> T:
    """Decode a message of another rank; a `FormatError` if the ranks run different releases."""
    try:
        with describe_once(kind):
            return msgspec.msgpack.decode(message, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"{what}: not a message of this release of Holdfast, which all ranks must run: {error}"
        ) from error


FIRST_S = 10.0
"""Seconds after which a wait warns of ranks that have not made the call; then at 3 times as many.
"""
ANSWER_S = 60.0
"""The same for ranks that have made it, and show that they live: they may read or write for long.
"""
GROWTH = 3
LOOK_S = 2.0
"""Seconds between two looks at processes in a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Own process, and how to look at others."""

    own: Process
    has_ended: Callable[[Process], bool]
    """Whether a process has certainly ended: False for one that this host cannot see."""


class Watch:
    """Watcher of one wait for other ranks; warns while it lasts."""

    def __init__(
        self,
        warn: Callable[[str], object],
        call: str,
        begins: str | None = None,
        *,
        phase: str = "its script",
    ) -> None:
        """Set up for the waiting `call`; in the round `begins` ranks post as they make the call.

        `phase` is the one in which the ranks are that are waited for.
        """
        self._warn = warn
        self._call = call
        self.phase = phase
        self.begins = begins
        self.next_s = ANSWER_S if begins is None else FIRST_S
        """Seconds of waiting after which the next warning is due."""
        self._told: set[int] = set()

    def warn_of_late_ranks(self, waited_s: float, late: Mapping[int, str]) -> None:
        """Warn of ranks that are late, with their names; without any, only set the next time."""
        self.next_s = max(self.next_s, waited_s) * GROWTH
        if self.begins is None:
            self._warn_of(waited_s, late, ". Check whether it is stopped or busy")
        else:
            self._warn_of(
                waited_s,
                late,
                ", which has not made this call yet. It may be busy, wait in a collective of its "
                "own, such as the all-reduce of a backward pass, or never make the call. Every "
                "rank must call save, maybe_save, resume and load, at the same points of the "
                "program and with the same steps and arguments. To see the line at which each "
                "rank waits, run `py-spy dump --pid PID`; for collectives of NCCL, set "
                "TORCH_FR_BUFFER_SIZE (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)",
            )

    def tell_silent(self, waited_s: float, silent: Mapping[int, str]) -> None:
        """Warn once of ranks that show no sign of life, with their names."""
        fresh = {rank: name for rank, name in silent.items() if rank not in self._told}
        self._warn_of(waited_s, fresh, ". Check whether it is stopped or lost")

    def _warn_of(self, waited_s: float, late: Mapping[int, str], advice: str) -> None:
        self._told.update(late)
        if late:
            names = some_of([*late.values()])
            self._warn(
                f"{self._call}: waiting for {waited_s:.0f} s, as no message has arrived from "
                f"{names}{advice}"
            )


def describe_rank(rank: int, process: Process | None, silent_s: float = 0.0) -> str:
    """Name a rank with its process, and with its silence if that is long.

    >>> process = Process(host="node7", pid=41, start="", boot_id="", pid_namespace="")
    >>> describe_rank(3, process, 12.0)
    'rank 3 (process 41 on node7, no sign of life for 12 s)'
    """
    if process is None:
        return f"rank {rank}"
    sign = f", no sign of life for {silent_s:.0f} s" if silent_s >= FIRST_S else ""
    return f"rank {rank} ({describe_process(process)}{sign})"


def describe_process(process: Process) -> str:
    """Name a process in words."""
    return f"process {process.pid} on {process.host}"
