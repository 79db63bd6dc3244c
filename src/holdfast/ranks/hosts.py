"""The hosts of a run: which ranks see the same files under the local root (decision 0068)."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast.errors import (
    FormatError,
    HoldfastError,
    NotFound,
    NotShared,
    RanksError,
    StoreError,
    UsageError,
    name_ranks,
    some_of,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.ranks.coordinator import (
    GRACE_S,
    LEADER,
    Coordinator,
    RankFailure,
    Watch,
    decode_message,
)
from holdfast.store.base import Store

OPTIONS_S = 60.0
"""Limit on the wait for the options of all ranks, which begin at the same time."""
_FAIL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, numbered in the order of their lowest ranks; 0 is the leader's."""

    rank: int
    of_rank: tuple[int, ...]
    """Number of the host of each rank."""
    names: tuple[str, ...]

    @property
    def own(self) -> int:
        """Number of this rank's host."""
        return self.of_rank[self.rank]

    @property
    def is_host_leader(self) -> bool:
        """Whether this is the lowest rank of its host, which alone writes its shared files."""
        return self.of_rank.index(self.own) == self.rank

    @property
    def is_leading(self) -> bool:
        """Whether this host is the leader's, in whose root the registers are."""
        return self.own == 0

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, number in enumerate(self.of_rank) if number == host]

    def partner_of(self, rank: int) -> int:
        """Return the rank of the next host that writes a rank's second copies.

        >>> hosts = Hosts(rank=0, of_rank=(0, 0, 1), names=("a", "b"))
        >>> [hosts.partner_of(rank) for rank in range(3)]
        [2, 2, 0]
        """
        host = self.of_rank[rank]
        others = self.ranks_of((host + 1) % len(self.names))
        return others[self.ranks_of(host).index(rank) % len(others)]


class _Look(msgspec.Struct, frozen=True):
    """Post of one rank: where it is, and which ranks' files it sees."""

    host: str
    root: str
    seen: tuple[int, ...]
    remote: str
    sees_remote: bool | None
    """Whether it sees what the leader has put into the remote tier; None: nothing, or unknown."""


class _HostsNote(msgspec.Struct, frozen=True):
    of_rank: tuple[int, ...]
    names: tuple[str, ...]


class HostRounds:
    """Rounds of messages about hosts, which all ranks run in the same order.

    An error of one rank fails the round for all.
    """

    def __init__(
        self,
        ranks: Coordinator,
        emit: Emitter,
        *,
        timeout_s: float,
        task: str = "comparing the disks of hosts",
    ) -> None:
        """Set up; `task` says in errors and warnings what the rounds are for."""
        self.ranks = ranks
        self._task = task
        self._timeout_s = timeout_s
        self._emit = emit
        self._manager = ranks.number()
        self._num_rounds = 0

    def announce_note(self, data: bytes) -> None:
        """Send the leader's message of the next round, in the leader."""
        self._num_rounds += 1
        self.ranks.announce(self._tag, data, timeout_s=self._timeout_s)

    def receive_note(self) -> bytes:
        """Receive the leader's message of the next round, in a follower."""
        self._num_rounds += 1
        return self.ranks.hear(
            self._tag, timeout_s=self._timeout_s + GRACE_S, watch=self._make_watch()
        )

    def post_answer(self, data: bytes) -> None:
        """Answer the last message of the leader."""
        self.ranks.post(self._tag, data, timeout_s=self._timeout_s)

    def collect_answers(self) -> list[bytes]:
        """Collect the answers of all ranks to the last message, in the leader."""
        tag = self._tag
        posts = self.ranks.collect(tag, timeout_s=self._timeout_s, watch=self._make_watch())
        return posts.expect_all(tag)

    def expect_equal_options(self, options: Mapping[str, str]) -> None:
        """Raise `UsageError` on all ranks if one of these options of HostTiers differs by rank."""
        try:
            self.post_answer(msgspec.msgpack.encode(options))
            if self.ranks.is_leader:
                problem = _compare_options(self.collect_answers())
                self.announce_note(problem.encode())
            else:
                problem = self.receive_note().decode()
        except BaseException as error:
            self.report_failure(error)
            raise
        if problem:
            raise UsageError(f"HostTiers: {problem}. Pass the same on all ranks")

    def report_failure(self, error: BaseException) -> None:
        """Fail the round on all ranks."""
        if self.ranks.is_leader:
            self._num_rounds += 1
        elif isinstance(error, RanksError):
            return  # the leader has said it, or cannot be reached
        # Each failure comes before this rank's next message, so others wait for this tag.
        failure = RankFailure.from_error(error, phase=self._task)
        with suppress(HoldfastError):
            self.ranks.fail(self._tag, failure, timeout_s=_FAIL_S)

    def _make_watch(self) -> Watch:
        return Watch(partial(self._emit, "warning"), self._task)

    @property
    def _tag(self) -> str:
        return f"{self._task} of manager {self._manager}, message {self._num_rounds}"


def _compare_options(answers: Sequence[bytes]) -> str:
    """Name the options that differ, with each value and its ranks; empty if all are equal."""
    differing: list[str] = []
    found = [decode_message(answer, dict[str, str], "options of HostTiers") for answer in answers]
    for name in found[0]:
        ranks_of: dict[str | None, list[int]] = {}
        for rank, options in enumerate(found):
            ranks_of.setdefault(options.get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_of.items()]
            differing.append(f"{name} is {some_of(values, 4)}")
    return "; ".join(differing)


def find_hosts(rounds: HostRounds, store: Store, remote: Store, *, tries_remote: bool) -> Hosts:
    """Find out which ranks see each other's files in a scratch folder under the root.

    If the remote tier is a folder, and the leader `tries_remote`, all must see one file there, too.

    Raises:
        NotShared: the remote tier is another folder on some host.
    """
    ranks = rounds.ranks
    if ranks.is_leader:
        folder = layout.scratch_folder(os.urandom(8))
        rounds.announce_note(folder.encode())
    else:
        folder = rounds.receive_note().decode()
        if not layout.is_preflight(folder):
            raise FormatError(f"{folder!r} is no scratch folder")
    own, shared = f"{folder}/rank-{ranks.rank}", f"{folder}/rank-{LEADER}"
    has_put = False
    try:
        store.make_folder(folder)
        store.put(own, b"")
        if tries_remote and ranks.is_leader and remote.has_folders:
            with suppress(StoreError):  # the claim warns that it cannot be reached
                remote.make_folder(folder)
                remote.put(shared, b"")
                has_put = True
        # Not before all have written, and none removes its file before all have looked.
        _exchange_note(rounds, b"")
        store.refresh_folder(folder)
        names = (name.removeprefix("rank-") for name in store.children(folder))
        seen = tuple(sorted(int(name) for name in names if name.isdecimal()))
        sees = has_put if ranks.is_leader else _sees(remote, shared)
        look = _Look(socket.gethostname(), store.url, seen, remote.url, sees)
        note = _exchange_note(rounds, msgspec.msgpack.encode(look))
    finally:
        with suppress(StoreError):
            store.delete(own)
        with suppress(StoreError):  # the last rank of the host removes it
            store.delete(f"{folder}/")
        if has_put:
            with suppress(StoreError):
                remote.delete(shared)
                remote.delete(f"{folder}/")
    found = decode_message(note, _HostsNote, "the hosts of all ranks")
    return Hosts(rank=ranks.rank, of_rank=found.of_rank, names=found.names)


def _sees(store: Store, key: str) -> bool | None:
    if not store.has_folders:
        return None  # a URL is the same place for all
    try:
        store.head(key)
    except NotFound:
        return False
    except StoreError:
        return None
    return True


def _exchange_note(rounds: HostRounds, data: bytes) -> bytes:
    """Post data, and return the leader's note, which follows the posts of all ranks."""
    rounds.post_answer(data)
    if not rounds.ranks.is_leader:
        return rounds.receive_note()
    answers = rounds.collect_answers()
    note = msgspec.msgpack.encode(_group_ranks(answers)) if data else b""
    rounds.announce_note(note)
    return note


def _group_ranks(answers: Sequence[bytes]) -> _HostsNote:
    looks = [decode_message(answer, _Look, "a look at the disk") for answer in answers]
    numbers: dict[int, int] = {}  # by the lowest rank of a host
    of_rank: list[int] = []
    for rank, look in enumerate(looks):
        if rank not in look.seen:
            raise StoreError(f"{look.root} on {look.host}: rank {rank} does not see its own file")
        lowest = look.seen[0]
        if look.seen != looks[lowest].seen:
            raise StoreError(
                f"{look.root} on {look.host}: ranks {lowest} and {rank} see files of different "
                f"ranks there ({looks[lowest].seen} and {look.seen}). Each path must be one disk"
            )
        of_rank.append(numbers.setdefault(lowest, len(numbers)))
        if looks[LEADER].sees_remote and look.sees_remote is False:
            raise NotShared(
                f"{look.remote} on {look.host} (rank {rank}) is not {looks[LEADER].remote} on "
                f"{looks[LEADER].host}: a file that the leader has put there is not seen. "
                "Mount the same storage on all hosts, or use an object store"
            )
    firsts = [looks[lowest] for lowest in numbers]
    return _HostsNote(tuple(of_rank), _name_hosts([(look.host, look.root) for look in firsts]))


def _name_hosts(hosts: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Name each host by its name, if need be with its root, and with its number.

    >>> _name_hosts([("a", "/x"), ("b", "/x"), ("b", "/y"), ("c", "/x"), ("c", "/x")])
    ('a', 'b:/x', 'b:/y', 'c:/x#3', 'c:/x#4')
    """
    counts, full = Counter(name for name, _ in hosts), Counter(hosts)
    return tuple(
        name if counts[name] == 1 else f"{name}:{root}" + (f"#{n}" if full[name, root] > 1 else "")
        for n, (name, root) in enumerate(hosts)
    )
