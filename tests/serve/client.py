"""A page that a real server serves, for tests, and a client that sends whatever it is told."""

from __future__ import annotations

import asyncio
import http.client
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import uvicorn

from holdfast.cli.web.guard import Access
from holdfast.cli.web.routes import make_app
from holdfast.cli.web.serve import SERVER, listening

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(slots=True)
class Page:
    """A server that runs, and how to ask it."""

    port: int
    access: Access
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cookie(self) -> str:
        return f"{self.access.cookie}={self.access.token}"

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> Reply:
        """Send a request with just these headers (`_` for `-`), and `Host` unless it is given."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.putrequest(
                method, path, skip_host="Host" in given, skip_accept_encoding=True
            )
            for name, value in given.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body.encode())))
            connection.endheaders(None if body is None else body.encode())
            response = connection.getresponse()
            lowered = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, lowered, response.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        """Read a page, as a browser that was given the cookie."""
        return self.ask("GET", path, Cookie=self.cookie, **headers)

    def whole(self, path: str) -> str:
        """Read a page until nothing of it is still being read."""
        for _ in range(600):
            reply = self.get(path)
            assert reply.status == 200, (path, reply)
            if not re.search(r'load delay|"retry_ms": \d', reply.text):
                return reply.text
            threading.Event().wait(0.02)
        raise AssertionError(f"{path} is never whole")

    def post(self, path: str, **fields: str) -> Reply:
        """Send a form, as a page of this server does."""
        return self.ask(
            "POST",
            path,
            urlencode({"form_token": self.access.form_token, **fields}),
            Cookie=self.cookie,
            Origin=self.origin,
            Content_Type="application/x-www-form-urlencoded",
        )

    def done(self, reply: Reply) -> str:
        """Wait for the work that a form began; return its page."""
        assert reply.status == 303, reply
        return self.whole(reply.headers["location"])

    def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of its own; return all that comes before its end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def serving(roots: Sequence[Any], *, access: Access | None = None, port: int = 0) -> Iterator[Page]:
    """Serve some roots by uvicorn in a thread, until the block ends."""
    access = access or Access()
    server = uvicorn.Server(uvicorn.Config(make_app([*map(str, roots)], access), **SERVER))
    listener = listening(port)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    try:
        for _ in range(600):
            if server.started:
                break
            threading.Event().wait(0.05)
        yield Page(listener.getsockname()[1], access)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        frame = sys._current_frames().get(thread.ident or 0)
        assert not thread.is_alive(), "".join(traceback.format_stack(frame))


def links(text: str) -> list[str]:
    """Return the addresses that a page names on this server."""
    return re.findall(r'(?:href|action|src|hx-get|data-[a-z]+)="(/[^"]*)"', text)
