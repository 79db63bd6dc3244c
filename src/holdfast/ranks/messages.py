"""Messages and heartbeats of ranks in a key-value store such as torch's, and threads for its calls.

By heartbeats others notice a process or host that was lost. A rank on the host of another sees its
process, and needs none. A heartbeat stops, too, if a process is stopped, or is in a call of C that
keeps Python's lock. So short silence is only worth a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from threading import Condition, Event, RLock, Thread
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from holdfast.errors import Disconnected, FormatError, UsageError
from holdfast.format.strictjson import describe_once
from holdfast.ranks.coordinator import RankFailure

PIECE_NBYTES = 256 * 1024
"""Longest value: torch's server is slow with long ones, and cuts the connection above 8 MiB."""
MAX_NUM_PIECES = 4096
"""Most pieces of a message, which has at most 1 GiB."""
MAX_NUM_KEYS = 256
"""Most keys in one call: calls with thousands take seconds."""


class GroupStore(Protocol):
    """Methods of torch's stores that are used here, some of which torch's own types lack."""

    def clone(self) -> GroupStore:
        """Make a client with a connection of its own."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long `get` waits."""

    def set(self, key: str, value: bytes, /) -> None:
        """Send a value; returns before it has arrived."""

    def get(self, key: str, /) -> bytes:
        """Wait for a key, and return its value."""

    def multi_set(self, keys: list[str], values: list[bytes], /) -> None:
        """Send several values; returns before they have arrived."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait for keys, and return their values."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def add(self, key: str, number: int, /) -> int:
        """Add to a counter, and return it."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it existed."""


def write_message(store: GroupStore, name: str, said: bytes | RankFailure) -> None:
    """Write a message; returns when the store has it."""
    data, failure = (b"", said) if isinstance(said, RankFailure) else (said, None)
    pieces = [data[at : at + PIECE_NBYTES] for at in range(0, len(data), PIECE_NBYTES)] or [b""]
    if len(pieces) > MAX_NUM_PIECES:
        raise UsageError(f"{name}: {len(data)} bytes are too long for a message between ranks")
    for number, piece in enumerate(pieces[1:], 1):
        store.set(_make_key(name, number), piece)
    # The first piece comes last: whoever sees it finds the others.
    _write_head(store, name, _Head(num_more=len(pieces) - 1, failure=failure, data=pieces[0]))


def _write_head(store: GroupStore, name: str, head: _Head) -> None:
    store.set(_make_key(name), msgspec.msgpack.encode(head))
    # A `set` is not acknowledged: it succeeds when the server is dead. The reply of a `check` is.
    store.check([_make_key(name)])


def write_each(store: GroupStore, name: str, messages: Mapping[int, bytes]) -> None:
    """Write a message for each of some ranks; returns when the store has them."""
    short: list[tuple[str, bytes]] = []
    for rank, data in messages.items():
        if len(data) > PIECE_NBYTES:
            write_message(store, _name_of_rank(name, rank), data)
        else:
            head = _Head(num_more=0, failure=None, data=data)
            key = _make_key(_name_of_rank(name, rank))
            short.append((key, msgspec.msgpack.encode(head)))
    for start in range(0, len(short), MAX_NUM_KEYS):
        some = short[start : start + MAX_NUM_KEYS]
        store.multi_set([key for key, _ in some], [head for _, head in some])
    # Last, and with a reply: a rank that sees it finds its own.
    _write_head(store, name, _Head(num_more=0, failure=None, data=b"", is_each=True))


def has(store: GroupStore, name: str) -> bool:
    """Whether a message has come."""
    return store.check([_make_key(name)])


def get_announcement(store: GroupStore, name: str, rank: int) -> bytes | RankFailure:
    """Read an announcement that has come, for all or for this rank, or raise `FormatError`.

    One for this rank is deleted.
    """
    head = store.get(_make_key(name))
    if not _decode(name, head).is_each:
        return _assemble_message(store, name, head)
    own = _name_of_rank(name, rank)
    found = take_present(store, [own])
    if own not in found:
        raise Disconnected(f"{name}: this rank was too late: the leader has already deleted it")
    return found[own]


def take_present(store: GroupStore, names: Sequence[str]) -> dict[str, bytes | RankFailure]:
    """Read and delete those of the named messages that have come, without waiting for others."""
    found: dict[str, bytes | RankFailure] = {}
    for start in range(0, len(names), MAX_NUM_KEYS):
        present = _present(store, names[start : start + MAX_NUM_KEYS])
        heads = store.multi_get([_make_key(name) for name in present]) if present else []
        for name, head in zip(present, heads, strict=True):
            found[name] = _assemble_message(store, name, head)
            _delete_pieces(store, name, head)
    return found


def delete_announcement(store: GroupStore, name: str, world_size: int) -> None:
    """Delete an announcement, if it has come, and what ranks have not read of it."""
    if not has(store, name):
        return
    head = store.get(_make_key(name))
    if _decode(name, head).is_each:
        take_present(store, [_name_of_rank(name, rank) for rank in range(1, world_size)])
    _delete_pieces(store, name, head)


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """First piece of a message."""

    num_more: Annotated[int, Meta(ge=0, lt=MAX_NUM_PIECES)]
    failure: RankFailure | None
    data: bytes
    is_each: bool = False
    """Whether each rank has a message of its own in place of this one."""


def _present(store: GroupStore, names: Sequence[str]) -> Sequence[str]:
    if store.check([_make_key(name) for name in names]):
        return names
    return [name for name in names if has(store, name)]


def _assemble_message(store: GroupStore, name: str, head: bytes) -> bytes | RankFailure:
    first = _decode(name, head)
    more = [store.get(_make_key(name, number + 1)) for number in range(first.num_more)]
    return first.failure or b"".join([first.data, *more])


def _delete_pieces(store: GroupStore, name: str, head: bytes) -> None:
    for number in range(_decode(name, head).num_more + 1):
        store.delete_key(_make_key(name, number))


def _decode(name: str, head: bytes) -> _Head:
    try:
        with describe_once(_Head):
            return msgspec.msgpack.decode(head, type=_Head)
    except msgspec.DecodeError as error:
        raise FormatError(f"{name}: not a message of a rank: {error}") from error


def _name_of_rank(name: str, rank: int) -> str:
    return f"{name}/of {rank}"


def _make_key(name: str, number: int = 0) -> str:
    return f"{number}/{name}"


BEAT_S = 5.0
"""Seconds between two heartbeats of a rank."""
BEAT_A_RANK_S = 0.001
"""The same for each rank of the group, which spares the one server of the store."""
LOST_S = 300.0
"""Seconds of silence after which a rank of another host counts as lost.

Longer than any usual call that keeps Python's lock: a large pickle, an index of a data set.
"""


class RankHeartbeat:
    """Daemon thread that sends a number now and then, until it is stopped or the store is gone."""

    def __init__(self, send: Callable[[bytes], object], turn: Condition, *, every_s: float) -> None:
        """Start the thread, which calls `send` with each new value while it holds `turn`."""
        self._stopped = Event()
        Thread(
            target=_beat,
            args=(send, turn, every_s, self._stopped),
            name="holdfast-heartbeat",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """End the thread, which sends nothing more; does not wait for it."""
        self._stopped.set()


def _beat(send: Callable[[bytes], object], turn: Condition, every_s: float, stopped: Event) -> None:
    for number in count():
        # With a limit: at exit the turn is taken for good.
        if turn.acquire(timeout=every_s):
            try:
                if stopped.is_set():
                    return
                send(b"%d" % number)
            except RuntimeError:  # of torch: no later message of this rank arrives, either
                return
            finally:
                turn.release()
        if stopped.wait(every_s):
            return


class Silences:
    """Seconds for which heartbeats of other ranks have not changed while this rank looked."""

    def __init__(self, *, most_s: float) -> None:
        """Set up; of the time between two looks, `most_s` seconds count at most."""
        self._most_s = most_s
        self._values: Mapping[int, bytes] = {}
        self._looked_s = 0.0
        self.by_rank: Mapping[int, float] = {}

    def record_heartbeats(self, values: Mapping[int, bytes], now_s: float) -> None:
        """Note the heartbeats of ranks at a time of the monotonic clock."""
        passed_s = min(now_s - self._looked_s, self._most_s)
        self.by_rank = {
            rank: self.by_rank[rank] + passed_s if self._values.get(rank) == value else 0.0
            for rank, value in values.items()
        }
        self._values, self._looked_s = dict(values), now_s


_NUM_SPARE = 2
"""Most threads that wait for a call; others end after theirs."""
_CLOSE_S = 1.0
_Calls: TypeAlias = "SimpleQueue[Callable[[], object] | None]"


class CallThreads:
    """Daemon threads for one call each, with one idle for when the interpreter starts no more."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = RLock()  # `release_idle_threads` may be called by the garbage collector
        self._idle: list[_Calls] = []
        self._is_open = True

    def start_call(self, call: Callable[[], object]) -> None:
        """Begin a call, which raises nothing, in a thread that no other call is in."""
        with self._lock:
            if not self._idle:
                try:
                    self._start_thread()
                except RuntimeError as error:
                    raise Disconnected(f"no thread for messages to ranks: {error}") from error
            self._idle.pop().put(call)
            if not self._idle and self._is_open:
                with suppress(RuntimeError):  # the next call may find another one
                    self._start_thread()

    def release_idle_threads(self) -> None:
        """Let idle threads end, and others after their call; does not wait for them."""
        # In a fork of the process another thread may have had the lock, which nobody releases then.
        if not self._lock.acquire(timeout=_CLOSE_S):
            return
        try:
            self._is_open = False
            while self._idle:
                self._idle.pop().put(None)
        finally:
            self._lock.release()

    def _start_thread(self) -> None:
        calls: _Calls = SimpleQueue()
        Thread(target=self._work, args=(calls,), name=self._name, daemon=True).start()
        self._idle.append(calls)

    def _work(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            call()
            del call
            with self._lock:
                if not self._is_open or len(self._idle) >= _NUM_SPARE:
                    return
                self._idle.append(calls)
