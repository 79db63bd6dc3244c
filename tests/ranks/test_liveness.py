"""Connections by which the leader and followers see that a process has ended or a host is lost.

Real processes and sockets; lost hosts are in `distributed/test_lost_hosts.py`.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from children import Child
from holdfast.errors import RanksSilent
from holdfast.format.records import Process
from holdfast.ranks import liveness
from holdfast.ranks.c10d import C10d
from holdfast.ranks.coordinator import Processes, Watch
from holdfast.ranks.liveness import LeaderAddress, LeaderConnection, LeaderListener
from ranks.together import PATIENCE_S, Server, client, in_thread, new_server, until

HERE = Path(__file__).parent
HOUR_S = 3600.0
"""Deadline that no test reaches."""
NEAR = Process(host="near", pid=1, start="", boot_id="near", pid_namespace="")


@pytest.fixture
def server() -> Iterator[Server]:
    """A process that hosts a TCPStore."""
    with Server() as started:
        yield started


class Member(Child):
    """A rank in another process."""

    def __init__(self, port: int, rank: int) -> None:
        super().__init__(HERE / "member.py", port, rank)

    def do(self, word: str) -> int:
        """Let it do something; return its process."""
        self.begin(word)
        return int(self.says())

    def begin(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()


def coordinator(
    store: dist.Store, rank: int, world_size: int = 2, warn: Callable[[str], object] | None = None
) -> C10d:
    processes = Processes(own=NEAR, has_ended=lambda process: False)
    return C10d(store, rank, world_size, timeout_s=PATIENCE_S, processes=processes, warn=warn)


def pair(store: dist.Store, warn: Callable[[str], object] | None = None) -> tuple[C10d, C10d]:
    """A leader and its follower, which are connected."""
    follower = in_thread(partial(coordinator, store, 1, warn=warn))
    return coordinator(store, 0), follower.result(PATIENCE_S)


def connected(rank: C10d) -> liveness.RankConnections:
    """The connections of a rank, with the one other rank."""
    found = rank._connections
    assert found is not None
    until(lambda: found.is_connected(1 - rank.rank))
    return found


def watch() -> Watch:
    return Watch(print, "save of step 1", phase="writing")


@pytest.mark.parametrize("before", ["stay", "fork", "close", "raise"])
def test_the_leader_sees_the_end_of_a_process_that_it_cannot_look_at(before: str) -> None:
    """Also if a child has a copy of its connection, and after its manager was closed."""
    store = new_server()
    with Member(store.port, 1) as member:
        leader = coordinator(store, 0)
        member.expect("met")
        connected(leader)
        pid = member.do("stay")
        if before == "raise":
            member.begin(before)
        else:
            member.do(before)
            os.kill(pid, signal.SIGKILL)
        found = leader.collect("files", timeout_s=HOUR_S, watch=watch())
    failure = found.failed[1]
    assert failure.phase == "writing"
    assert failure.reason.startswith(f"process {pid} on far has ended")


@pytest.mark.parametrize("is_store_stopped", [False, True])
def test_a_follower_sees_the_end_of_the_leader_also_if_the_store_hangs(
    is_store_stopped: bool, server: Server
) -> None:
    with Member(server.port, 0) as leader:
        follower = coordinator(client(server.port), 1)
        leader.expect("met")
        connected(follower)
        pid = leader.do("stay")
        hearing = in_thread(partial(follower.hear, "outcome", timeout_s=HOUR_S, watch=watch()))
        if is_store_stopped:
            with server.stopped():
                leader.kill()
                error = hearing.exception(PATIENCE_S)
                posting = in_thread(partial(follower.post, "files", b"", timeout_s=HOUR_S))
                assert isinstance(posting.exception(PATIENCE_S), RanksSilent)
        else:
            leader.kill()
            error = hearing.exception(PATIENCE_S)
    assert isinstance(error, RanksSilent)
    assert f"outcome: nothing came from rank 0, in writing: process {pid} on far" in f"{error}"


@pytest.mark.full
def test_a_process_that_keeps_pythons_lock_is_not_lost() -> None:
    """For twice the time after which a host is."""
    store = new_server()
    with Member(store.port, 1) as member:
        leader = coordinator(store, 0)
        member.expect("met")
        connections = connected(leader)
        member.begin("hold")
        member.expect("holds")
        member.says()
        assert connections.is_connected(1)
        assert connections.find_lost(0.0) == {}


def test_a_connection_that_was_cut_is_made_again() -> None:
    ranks = pair(new_server())
    leader, follower = map(connected, ranks)
    before = follower._connected[0]
    before.shutdown(socket.SHUT_RDWR)
    until(lambda: follower._connected.get(0) not in (None, before))
    until(lambda: leader.is_connected(1) and not leader.find_lost(0.0))
    assert follower.find_lost(0.0) == {}


def dial(address: LeaderAddress, said: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", address.port), PATIENCE_S)
    peer.sendall(said)
    return peer


def test_a_peer_without_the_secret_is_disconnected_and_changes_nothing() -> None:
    leader, follower = pair(new_server())
    listener = connected(leader)
    assert isinstance(listener, LeaderListener)
    address, kept = listener.address, listener._connected[1]
    one = (1).to_bytes(4, "big")
    for said in (
        bytes(16) + one,
        address.reply + one,
        address.secret + bytes(4),  # the leader
        address.secret + (2).to_bytes(4, "big"),  # a rank that there is not
    ):
        with dial(address, said) as peer:
            assert peer.recv(1) == b""
    waiting = [dial(address, b"GET /") for _ in range(liveness._NUM_UNKNOWN + 1)]
    assert waiting[0].recv(1) == b"", "the oldest has to go"
    for peer in waiting:
        peer.close()
    assert listener._connected == {1: kept}
    assert connected(follower).find_lost(0.0) == {}


def fail(*_: object) -> None:
    raise OSError(errno.EINVAL, "injected")


def test_connections_stay_open_when_the_thread_that_watches_them_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the stop: a follower would take their end for the end of the leader."""
    ranks = pair(new_server())
    leader, follower = map(connected, ranks)
    assert isinstance(leader, LeaderListener)
    kept, stopping = leader._connected[1], list[int]()
    close = leader.close_sockets

    def close_sockets() -> None:
        stopping.append(leader._stopping.fileno())
        close()

    monkeypatch.setattr(leader, "close_sockets", close_sockets)
    monkeypatch.setattr(leader, "_accept", fail)
    with dial(leader.address, b""):
        until(lambda: leader.problem is not None)
    assert not leader.is_connected(1), "heartbeats count"
    assert leader.find_lost(0.0) == follower.find_lost(0.0) == {}
    assert kept.fileno() >= 0
    leader.stop_watching()
    until(lambda: 0 in follower.find_lost(0.0))
    assert stopping == [-1], "closed after the stop"


def test_a_listener_that_fails_pauses_and_a_stop_ends_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "_RETRY_S", HOUR_S)
    listener = LeaderListener(2, ("127.0.0.1", 1), NEAR, is_one_host=True)
    calls: list[None] = []
    accept = listener._accept
    monkeypatch.setattr(listener, "_accept", lambda: (calls.append(None), accept()))
    listener.start_watching()
    listener._listener.shutdown(socket.SHUT_RDWR)  # accept() fails, and it stays readable
    until(lambda: bool(calls))
    listener.stop_watching()
    until(lambda: listener._selector.get_map() is None)
    assert len(calls) == 1
    assert listener.problem is None


def test_a_peer_that_cannot_be_probed_is_closed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = map(connected, pair(new_server()))
    assert isinstance(leader, LeaderListener)
    register, are_locked = leader._selector.register, list[bool]()

    def register_locked(peer: socket.socket, events: int) -> object:
        are_locked.append(liveness._forking.locked())
        return register(peer, events)

    monkeypatch.setattr(leader._selector, "register", register_locked)
    with monkeypatch.context() as broken:
        broken.setattr(liveness, "_probe_often", fail)
        with dial(leader.address, b"") as peer:
            assert peer.recv(1) == b""
    assert are_locked == [True], "no fork comes between"
    assert leader.problem is None
    follower._connected[0].shutdown(socket.SHUT_RDWR)
    until(lambda: len(are_locked) == 2 and leader.is_connected(1) and not leader.find_lost(0.0))


@pytest.mark.parametrize("is_one_host", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_leader_listens_where_followers_reach_its_store(host: str, is_one_host: bool) -> None:
    """That is the loopback interface alone if all are on this host."""
    listener = LeaderListener(2, (host, 1), NEAR, is_one_host=is_one_host)
    listener.start_watching()
    bound = listener._listener.getsockname()[0]
    assert (listener.address.host, bound) in ([(host, host)] if is_one_host else [("", "::")])
    follower = LeaderConnection(1, listener.address, host)
    follower.start_watching()
    until(lambda: listener.is_connected(1) and follower.is_connected(0))
    for one in (listener, follower):
        one.stop_watching()


def test_a_rank_that_cannot_connect_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PROBLEM_S", 0.0)
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = LeaderAddress(
            host="127.0.0.1",
            port=unheard.getsockname()[1],
            secret=bytes(16),
            reply=bytes(16),
            is_for_first_ranks=False,
            process=NEAR,
        )
        follower = LeaderConnection(3, address, "127.0.0.1")
        follower.start_watching()
        until(lambda: follower.problem is not None)
    follower.stop_watching()
    assert follower.problem is not None
    assert "rank 3 cannot connect to the leader" in follower.problem
    assert "Allow TCP connections" in follower.problem


def test_a_problem_with_the_connection_is_a_warning_once() -> None:
    heard: list[str] = []
    _, follower = pair(new_server(), heard.append)
    connected(follower).problem = "no connection"
    for number in range(2):
        follower.post(f"files {number}", b"", timeout_s=PATIENCE_S)
    assert heard == ["no connection"]


def test_a_large_group_has_one_connection_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would take files from the leader that it may need."""
    monkeypatch.setattr(liveness, "most_open_files", lambda: 8)
    for name, value in (("RANK", 1), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, f"{value}")
    store = new_server()
    others = [in_thread(partial(coordinator, store, rank, 4)) for rank in (1, 2, 3)]
    leader = coordinator(store, 0, 4)
    assert others[0].result(PATIENCE_S)._connections is None, "the second rank of its host"
    listener = leader._connections
    assert isinstance(listener, LeaderListener)
    until(lambda: all(map(listener.is_connected, (2, 3))))
    kept = [other.result(PATIENCE_S) for other in others]
    with dial(listener.address, listener.address.secret + (1).to_bytes(4, "big")) as peer:
        assert peer.recv(1) == b"", "it has as many as it may have"
    del kept


def test_a_forked_child_closes_its_copies_also_beside_connections_that_ended_before() -> None:
    former = [pair(store) for store in [new_server()] for _ in range(4)]
    ended = [connected(rank) for ranks in former for rank in ranks]
    for connections in ended:
        connections.stop_watching()
    until(lambda: all(one._selector.get_map() is None for one in ended))
    now = pair(new_server())
    copies = [connected(rank)._connected[1 - rank.rank].fileno() for rank in now]
    if (child := os.fork()) == 0:
        os._exit(sum(Path(f"/proc/self/fd/{copy}").exists() for copy in copies))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def num_threads() -> int:
    return sum(thread.name == "holdfast-liveness" for thread in threading.enumerate())


def test_connections_end_when_all_have_met_again() -> None:
    """A search over settings makes a thousand managers in one process."""
    before, store = num_threads(), new_server()
    for _ in range(5):
        kept = pair(store)
        for rank in kept:
            connected(rank)
        for rank in kept:
            rank.close()
    until(lambda: num_threads() <= before + 2)
