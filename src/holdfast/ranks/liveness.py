"""Connections of followers to the leader, by which kernels show that a rank lives (decision 0070).

After a first message nothing is sent over them. A kernel answers the probes of another one also
while its process is stopped or keeps Python's lock; and it closes the connection if the process
ends.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from hmac import compare_digest
from ipaddress import ip_address
from selectors import EVENT_READ, DefaultSelector, SelectorKey
from threading import Lock, Thread
from typing import NamedTuple

import msgspec
from typing_extensions import override

from holdfast.format.records import Process
from holdfast.ranks.coordinator import LEADER
from holdfast.system import at_fork, most_open_files

ANSWERED_S = 6
"""Seconds without an answer to a probe after which a host counts as lost."""
_IDLE_S, _PROBE_S = 2, 1
"""Seconds after which the first and each further probe is sent; others wait for the answer."""
RECONNECT_S = 1.0
"""Seconds that a follower has to connect again, for instance after a reset by a firewall."""
_RETRY_S, _LONGEST_RETRY_S = 2.0, 60.0
_CONNECT_S = 5.0
_REPLY_S = 60.0
"""Limit on the reply of a leader whose thread may wait for Python's lock."""
_PROBLEM_S = 10.0
"""Seconds without a connection after which this is a problem."""
_SECRET_NBYTES = 16
_RANK_NBYTES = 4
_NUM_UNKNOWN = 128
"""Most peers that have not sent the secret yet."""
_BACKLOG = 4096
_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE_S,
    "TCP_KEEPALIVE": _IDLE_S,  # its name on macOS
    "TCP_KEEPINTVL": _PROBE_S,
    # Linux ignores the number of probes if there is a TCP_USER_TIMEOUT, which others do not have.
    "TCP_KEEPCNT": (ANSWERED_S - _IDLE_S) // _PROBE_S,
    "TCP_USER_TIMEOUT": 1000 * ANSWERED_S,
}


class LeaderAddress(msgspec.Struct, frozen=True):
    """Address at which the leader listens, as announced in the group's store."""

    host: str
    """Address, or empty: the host of the group's store, by the name that each rank has for it."""
    port: int
    secret: bytes
    """First message of a follower, with its rank."""
    reply: bytes
    is_for_first_ranks: bool
    """Whether only the first rank of each host connects."""
    process: Process
    """Process of the leader."""


class ConnectionEnd(NamedTuple):
    """End of a connection: when, on the monotonic clock, and whether a host stopped answering."""

    at_s: float
    is_host: bool


class _Stopped(Exception):
    """Signal that ends the thread of connections."""


class RankConnections(ABC):
    """Connections of one rank, which a daemon thread keeps until `stop_watching`."""

    def __init__(self, name: str) -> None:
        """Set up; `name` names the rank in `problem`."""
        self.problem: str | None = None
        """Why there is no connection, for a warning."""
        self._name = name
        self._connected: dict[int, socket.socket] = {}
        self._ranks: dict[socket.socket, int] = {}
        """The same by connection."""
        self._ends: dict[int, ConnectionEnd] = {}
        self._stopping, self._stopped = socket.socketpair()
        self._selector = DefaultSelector()
        self._selector.register(self._stopped, EVENT_READ)
        _ALL.add(self)

    def start_watching(self) -> None:
        """Start the thread."""
        Thread(target=self._run, name="holdfast-liveness", daemon=True).start()

    def is_connected(self, rank: int) -> bool:
        """Whether there is a connection with a rank, by which its end will be seen."""
        return rank in self._connected

    def find_lost(self, least_s: float = RECONNECT_S) -> Mapping[int, ConnectionEnd]:
        """Return the ranks whose connections ended, and did not come back in `least_s` seconds."""
        if not self._ends:
            return {}
        before_s = time.monotonic() - least_s
        return {rank: end for rank, end in self._ends.copy().items() if end.at_s <= before_s}

    def stop_watching(self) -> None:
        """Close all connections; does not wait."""
        self._stopping.close()

    @abstractmethod
    def _keep_connections(self) -> None:
        """Make and watch connections, in the thread, until `_Stopped`."""

    def _run(self) -> None:
        with suppress(_Stopped):
            try:
                self._keep_connections()
            except OSError as error:
                # Others take the end of a connection for the end of this rank: keep them open.
                self._connected.clear()
                self._ends.clear()
                self.problem = describe_problem(
                    f"{self._name} no longer watches its connections: {error}"
                )
                self._wait_for_stop(None)
        self.close_sockets()

    def _wait_for_stop(self, limit_s: float | None) -> None:
        """Watch no connection for `limit_s` seconds, or raise `_Stopped`."""
        self._stopped.settimeout(limit_s)
        with suppress(TimeoutError):
            self._stopped.recv(1)
            raise _Stopped

    def _register(self, connection: socket.socket) -> None:
        """Wait for a new socket, too, or close it and raise `OSError`."""
        try:
            self._selector.register(connection, EVENT_READ)
        except OSError:
            connection.close()
            raise

    def close_sockets(self) -> None:
        """Close this process's copies of all sockets."""
        self._stopping.close()
        # A closed selector has no map: a fork also closes connections that ended before.
        for key in [*(self._selector.get_map() or {}).values()]:
            _socket_of(key).close()
        self._selector.close()

    def _wait(self, timeout_s: float | None) -> list[socket.socket]:
        """Return the sockets that can be read, none of them after `timeout_s` seconds."""
        ready = [_socket_of(key) for key, _ in self._selector.select(timeout_s)]
        if self._stopped in ready:
            raise _Stopped
        return ready

    def _close(self, connection: socket.socket) -> None:
        self._ranks.pop(connection, None)
        with _forking:
            self._selector.unregister(connection)
            connection.close()

    def _set_connected(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        before, self._connected[rank] = self._connected.get(rank), connection
        self._ranks[connection] = rank
        self._ends.pop(rank, None)
        if before is not None:
            self._close(before)

    def _read_end(self, rank: int) -> bool:
        """Return whether the connection with a rank has ended, and record its end."""
        connection, is_host = self._connected[rank], False
        try:
            if connection.recv(_SECRET_NBYTES):
                return False  # nothing more is sent
        except BlockingIOError:
            return False
        except OSError as error:
            # A host that was started again resets connections: the process has ended.
            is_host = error.errno != errno.ECONNRESET
        self._ends[rank] = ConnectionEnd(time.monotonic(), is_host)
        del self._connected[rank]
        self._close(connection)
        return True


def _socket_of(key: SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket), "only sockets are registered"
    return key.fileobj


_ALL: weakref.WeakSet[RankConnections] = weakref.WeakSet()
_DONE: list[RankConnections] = []
_forking = Lock()
"""Held by forks, and while a connection is open and not registered, so not closed in a child."""


def describe_problem(problem: str) -> str:
    """Describe the effect of a problem with connections, and the remedy."""
    return (
        f"{problem}. So ranks notice only after minutes that a host was lost, instead of within "
        "10 s. Allow TCP connections between the hosts of the ranks"
    )


def stop_at_next_meeting(connections: RankConnections) -> None:
    """Keep connections until all ranks have met again, or the process ends."""
    _DONE.append(connections)


def stop_former() -> None:
    """Stop the connections that were kept."""
    while _DONE:
        _DONE.pop().stop_watching()


def _close_in_child() -> None:
    """Close the copies of a forked child, which would keep connections of an ended parent open."""
    # Without a shutdown, which would end the connection of the parent, too.
    _forking.release()
    for connections in _ALL:
        with suppress(OSError, RuntimeError, ValueError):
            connections.close_sockets()


at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


class LeaderConnection(RankConnections):
    """Connection of a follower to the leader; it connects again after each end."""

    def __init__(self, rank: int, address: LeaderAddress, store_host: str) -> None:
        super().__init__(f"rank {rank}")
        self._hello = address.secret + rank.to_bytes(_RANK_NBYTES, "big")
        self._reply = address.reply
        self._address = (address.host or store_host, address.port)

    @override
    def _keep_connections(self) -> None:
        problem_s, pause_s = time.monotonic() + _PROBLEM_S, _RETRY_S
        has_connected = False
        while True:
            try:
                connection = self._connect()
            except OSError as error:
                if not has_connected and time.monotonic() >= problem_s:
                    host, port = self._address
                    why = f"cannot connect to the leader at port {port} of {host}: {error}"
                    self.problem = describe_problem(f"{self._name} {why}")
                    problem_s = float("inf")
                self._wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                continue
            has_connected, pause_s = True, _RETRY_S
            self._set_connected(LEADER, connection)
            while not (self._wait(None) and self._read_end(LEADER)):
                pass

    def _connect(self) -> socket.socket:
        """Connect, or raise `OSError` after trying all addresses."""
        reason: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            *self._address, type=socket.SOCK_STREAM
        ):
            with _forking:
                connection = socket.socket(family, kind, protocol)
                self._register(connection)
            try:
                self._greet(connection, address)
            except OSError as error:
                reason = error
                self._close(connection)
            else:
                return connection
        assert reason is not None, "a name that is found has addresses"
        raise reason

    def _greet(self, connection: socket.socket, address: tuple[object, ...]) -> None:
        # Before it connects, so that a host that is lost while this waits for the reply is seen.
        _probe_often(connection)
        connection.settimeout(_CONNECT_S)
        connection.connect(address)
        connection.sendall(self._hello)
        reply, end = b"", time.monotonic() + _REPLY_S
        while len(reply) < _SECRET_NBYTES:
            if not self._wait(max(end - time.monotonic(), 0.0)):
                raise TimeoutError(f"no reply in {_REPLY_S:.0f} s")
            data = connection.recv(_SECRET_NBYTES - len(reply))
            if not data:
                raise ConnectionResetError("it was refused")
            reply += data
        if not compare_digest(reply, self._reply):
            raise ConnectionResetError("another program has replied")


class LeaderListener(RankConnections):
    """Connections of the leader with followers that have its secret."""

    def __init__(
        self, world_size: int, store: tuple[str, int], process: Process, *, is_one_host: bool
    ) -> None:
        """Listen where followers can connect, which reach the `store` by host and port.

        With `is_one_host` they are all on this host. Raises `OSError` if this cannot listen.
        """
        super().__init__("the leader")
        self._world_size = world_size
        self._most = max(most_open_files() // 4, 1)
        self._unknown: dict[socket.socket, bytes] = {}
        """Peers that have not sent the secret and their rank yet, and what they have sent."""
        own = _find_own_address(*store)
        is_open = ip_address(own.partition("%")[0]).is_loopback and not is_one_host
        self._listener = _listen(None if is_open else own)
        self._listener.setblocking(False)
        self._selector.register(self._listener, EVENT_READ)
        self.address = LeaderAddress(
            host="" if is_open else own,
            port=self._listener.getsockname()[1],
            secret=secrets.token_bytes(_SECRET_NBYTES),
            reply=secrets.token_bytes(_SECRET_NBYTES),
            is_for_first_ranks=world_size - 1 > self._most,
            process=process,
        )

    @override
    def _keep_connections(self) -> None:
        while True:
            for ready in self._wait(None):
                rank = self._ranks.get(ready)
                if ready is self._listener:
                    self._accept()
                elif rank is not None:
                    self._read_end(rank)
                elif ready in self._unknown:  # else it was closed since
                    self._admit(ready)

    def _accept(self) -> None:
        try:
            with _forking:
                peer, _ = self._listener.accept()
                self._register(peer)
        except BlockingIOError:
            return  # the peer has ended in the meantime
        except OSError:
            # The listener may be readable at once again, as if there are too many open files.
            self._wait_for_stop(_RETRY_S)
            return
        peer.setblocking(False)
        try:
            _probe_often(peer)
        except OSError:  # on macOS, if it has ended
            self._close(peer)
            return
        while len(self._unknown) >= _NUM_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            self._close(oldest)
        self._unknown[peer] = b""

    def _admit(self, peer: socket.socket) -> None:
        """Read from an unknown peer, which has to show that it is a follower."""
        said, nbytes = self._unknown.pop(peer), _SECRET_NBYTES + _RANK_NBYTES
        try:
            data = peer.recv(nbytes - len(said))
        except BlockingIOError:
            self._unknown[peer] = said
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < nbytes:
            self._unknown[peer] = said
            return
        rank = int.from_bytes(said[_SECRET_NBYTES:], "big")
        is_follower = compare_digest(said[:_SECRET_NBYTES], self.address.secret)
        has_room = rank in self._connected or len(self._connected) < self._most
        if not (data and is_follower and 0 < rank < self._world_size and has_room):
            self._close(peer)
            return
        # If this fails, it has ended, which is read next.
        with suppress(OSError):
            peer.send(self.address.reply)
        self._set_connected(rank, peer)


def _probe_often(connection: socket.socket) -> None:
    """Let the kernel probe the other host, and end the connection if it does not answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _find_own_address(host: str, port: int) -> str:
    """Return the address of this host from which it reaches another; sends nothing."""
    reason: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        try:
            with socket.socket(family, kind, protocol) as way:
                way.connect(address)
                return str(way.getsockname()[0])
        except OSError as error:
            reason = error
    assert reason is not None, "a name that is found has addresses"
    raise reason


def _listen(address: str | None) -> socket.socket:
    """Listen at an address of this host, or at all of them."""
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # no IPv6 in this kernel or container
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)
