"""A proxy in front of a server that breaks HTTP on purpose, and counts what it did.

    with FaultProxy(service, rate=0.05, seed=7) as proxy:
        ...  # proxy.service is the same server, reached through the proxy

It knows requests and replies, and nothing of S3. Each is held as a whole before it is passed on, so
a fault strikes before the server saw the request, or after it has answered, never in between.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal
from urllib.parse import unquote

from servers.program import Service

Kind = Literal[
    "500", "503", "429", "delay", "blackhole", "reset", "lose_reply", "truncate", "flip", "cut"
]
TRANSIENT: tuple[Kind, ...] = ("500", "503", "429", "delay", "reset", "lose_reply", "truncate")
"""What flaky networks and busy services do (R24), but for time-outs, which make a test slow."""

DELAY_S = 0.02
START_S = 30.0
MAX_HEAD = 1 << 20
_CODES = {"500": "InternalError", "503": "SlowDown", "429": "TooManyRequests"}
_HOP_BY_HOP = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"expect"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fault, and the requests that it strikes."""

    kind: Kind
    """What happens.

    `500`, `503` (SlowDown), `429`: that status; the server never saw the request. `delay`: the
    request comes 20 ms late. `blackhole`: there is never a reply, and the server never saw it.
    `reset`: the connection breaks before the server saw the request. `lose_reply`: it breaks after
    the server has done what it was asked. `truncate`: it breaks in the middle of the reply's body.
    `flip`: one bit of the reply's body is wrong. `cut`: the network is cut from now on, and the
    server never saw the request; see `FaultProxy.cut`.
    """

    method: str = "*"
    """A pattern for the method."""

    path: str = "*"
    """A pattern (`fnmatch`) for the path with its query, without percent signs."""

    at: int = 0
    """How many matching requests pass first."""

    times: int | None = 1
    """How many are struck then; None means all."""

    reached: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when it strikes, so that a test can wait for that moment."""

    def matches(self, method: str, path: str) -> bool:
        """Whether the request is one of those that `at` and `times` count."""
        return fnmatchcase(method, self.method) and fnmatchcase(path, self.path)

    def strikes(self, num_before: int) -> bool:
        """Whether it strikes the request that so many matching ones went before."""
        last = None if self.times is None else self.at + self.times
        return num_before >= self.at and (last is None or num_before < last)


@dataclass(slots=True)
class _Message:
    """A request or a reply, whole."""

    first: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key.lower() == name), b"")

    def without(self, names: Collection[bytes]) -> list[tuple[bytes, bytes]]:
        return [(key, value) for key, value in self.headers if key.lower() not in names]


class FaultProxy:
    """Listens on a port of its own, in a thread of its own. A context manager; thread-safe.

    Args:
        service: the server behind it.
        rules: faults at chosen requests; the first that strikes counts.
        rate: the probability that any other request is struck by one of `kinds`.
        kinds: what then happens, each equally likely.
        seed: of the generator that decides.
        strip: names of headers that requests lose, in lower case.
    """

    def __init__(
        self,
        service: Service,
        rules: Iterable[Rule] = (),
        *,
        rate: float = 0.0,
        kinds: Sequence[Kind] = TRANSIENT,
        seed: int = 0,
        strip: Iterable[str] = (),
    ) -> None:
        host, port = service.address.split(":")
        self._upstream = (host, int(port))
        self._direct = service
        self._rules = list(rules)
        self._passed = Counter[int]()
        self._rate, self._kinds = rate, tuple(kinds)
        self._random = random.Random(seed)
        self._strip = frozenset(name.encode() for name in strip)
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._pool = ThreadPoolExecutor(1, "fault-proxy")
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._cut = False

    def __enter__(self) -> FaultProxy:
        started: Future[int] = Future()
        self._running = self._pool.submit(asyncio.run, self._run(started))
        port = started.result(START_S)
        self.service = self._direct.at(f"127.0.0.1:{port}")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._running.result(START_S)
        self._pool.shutdown()
        if self._errors:
            raise RuntimeError("the fault proxy itself is broken") from self._errors[0]

    @property
    def counts(self) -> Counter[str]:
        """How many requests came (`requests`), and how many faults of each kind really happened."""
        with self._lock:
            return self._counts.copy()

    @property
    def num_faults(self) -> int:
        """How many faults happened."""
        counts = self.counts
        return counts.total() - counts["requests"]

    def add(self, rule: Rule) -> Rule:
        """Strike by another rule from now on."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def set_rate(self, rate: float) -> None:
        """Strike at random with another probability from now on."""
        with self._lock:
            self._rate = rate

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`. Returns when it is done.

        What the server has begun it finishes; nobody hears of it.
        """
        self._call(self._cut_now())

    def mend(self) -> None:
        """Let the network work again."""
        self._call(self._mend_now())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _cut_now(self) -> None:
        self._cut = True
        for writer in tuple(self._connections):
            _reset(writer)

    async def _mend_now(self) -> None:
        self._cut = False

    async def _run(self, started: Future[int]) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(
                self._accept, "127.0.0.1", 0, limit=MAX_HEAD, backlog=512
            )
        except BaseException as error:
            started.set_exception(error)
            return
        async with server:
            started.set_result(server.sockets[0].getsockname()[1])
            await self._stopped.wait()
            server.close()
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._errors.append(error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while not self._cut and await self._exchange(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # one side went away, so the other sees its connection break
        finally:
            _reset(writer)
            self._connections.discard(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its reply. False when the connection is to break."""
        request = await _read_head(reader)
        method, path = (word.decode("latin-1") for word in request.first.split(b" ")[:2])
        kind = self._choose(method, unquote(path))
        if kind == "cut":
            await self._cut_now()
        if kind in ("cut", "reset"):
            self._count(kind)
            return False
        if kind == "blackhole":
            self._count(kind)
            while await reader.read(1 << 16):
                pass
            return False
        if request.header(b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = await _read_body(reader, request)
        if kind in _CODES:
            self._count(kind)
            writer.write(_error(kind, is_head=method == "HEAD"))
            return True
        if kind == "delay":
            self._count(kind)
            await asyncio.sleep(DELAY_S)
        reply = await self._forward(request, has_body=method != "HEAD")
        return self._pass_on(reply, writer, kind, is_head=method == "HEAD")

    def _pass_on(
        self, reply: _Message, writer: asyncio.StreamWriter, kind: Kind | None, *, is_head: bool
    ) -> bool:
        if kind == "lose_reply":
            self._count(kind)
            return False
        body = reply.body
        if kind in ("flip", "truncate") and body:
            self._count(kind)
            middle = len(body) // 2
            if kind == "flip":
                body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            else:
                body = body[:middle]
        _write(writer, reply, body, length=None if is_head else len(reply.body))
        return len(body) == len(reply.body)

    async def _forward(self, request: _Message, *, has_body: bool) -> _Message:
        """Ask the server, over a connection of this request's own; its reply, whole."""
        reader, writer = await asyncio.open_connection(*self._upstream, limit=MAX_HEAD)
        try:
            request.headers = request.without(self._strip)
            _write(writer, request, request.body, length=len(request.body), close=True)
            await writer.drain()
            reply = await _read_head(reader)
            while reply.first.split(b" ")[1].startswith(b"1"):
                reply = await _read_head(reader)
            if has_body and reply.first.split(b" ")[1] not in (b"204", b"304"):
                reply.body = await _read_body(reader, reply, to_end=True)
            return reply
        finally:
            writer.close()

    def _choose(self, method: str, path: str) -> Kind | None:
        with self._lock:
            self._counts["requests"] += 1
            struck = None
            for number, rule in enumerate(self._rules):
                if rule.matches(method, path):
                    if struck is None and rule.strikes(self._passed[number]):
                        struck = rule
                    self._passed[number] += 1
            if struck is not None:
                struck.reached.set()
                return struck.kind
            if self._random.random() < self._rate:
                return self._random.choice(self._kinds)
            return None

    def _count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1


async def _read_head(reader: asyncio.StreamReader) -> _Message:
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
    headers = [line.split(b":", 1) for line in lines[1:]]
    return _Message(lines[0], [(name.strip(), value.strip()) for name, value in headers])


async def _read_body(
    reader: asyncio.StreamReader, message: _Message, *, to_end: bool = False
) -> bytes:
    if message.header(b"transfer-encoding").lower() == b"chunked":
        return await _read_chunks(reader)
    length = message.header(b"content-length")
    if length:
        return await reader.readexactly(int(length))
    return await reader.read() if to_end else b""


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(chunks)


def _write(
    writer: asyncio.StreamWriter,
    message: _Message,
    body: bytes,
    *,
    length: int | None,
    close: bool = False,
) -> None:
    """Send a message. `length` is what it says of its body; None leaves what it said before."""
    gone = _HOP_BY_HOP if length is None else _HOP_BY_HOP | {b"content-length"}
    if message.first.split(b" ")[1:2] in ([b"204"], [b"304"]):
        length = None
    lines = [message.first, *(b"%s: %s" % pair for pair in message.without(gone))]
    lines += [b"Connection: close"] if close else []
    lines += [] if length is None else [b"Content-Length: %d" % length]
    writer.write(b"\r\n".join([*lines, b"", b""]) + body)


def _error(kind: str, *, is_head: bool) -> bytes:
    body = b"<Error><Code>%s</Code><Message>injected</Message></Error>" % _CODES[kind].encode()
    head = b"HTTP/1.1 %s Injected\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
    return head % (kind.encode(), len(body)) + (b"" if is_head else body)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection, as far as what was written has not been passed on yet."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
