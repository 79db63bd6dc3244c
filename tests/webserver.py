"""A web server on this machine, in a thread, which serves a folder and can misbehave."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Web:
    """What the server does, and what it was asked."""

    folder: Path
    url: str = ""
    has_ranges: bool = True
    login: str = ""
    """The `Authorization` that each request must have."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """Statuses with which the next requests of a path are answered."""
    redirects: dict[str, str] = field(default_factory=dict)
    missing_status: int = 404
    coding: str = ""
    """`Content-Encoding` of what it sends, though no client has asked for one; gzip is made."""
    surplus: bytes = b""
    """What is sent after the bytes of a range."""
    before_read: Callable[[Asked], None] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [one.path for one in self.asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def web(self) -> Web:
        return self.server.web  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web = self.web
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers)
        web.asked.append(asked)
        if web.login and headers.get("authorization") != web.login:
            self._answer(401)
        elif web.answers.get(self.path):
            self._answer(web.answers[self.path].pop(0))
        elif self.path in web.redirects:
            self._answer(302, headers={"Location": web.redirects[self.path]})
        else:
            web.before_read(asked)
            self._file(headers.get("range"))

    def _file(self, wanted: str | None) -> None:
        path = self.web.folder / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            self._answer(self.web.missing_status)
            return
        data, stat = path.read_bytes(), path.stat()
        tag = {"ETag": f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'}
        if self.web.coding:
            data = gzip.compress(data) if self.web.coding == "gzip" else data
            tag["Content-Encoding"] = self.web.coding
        if wanted is None or not self.web.has_ranges:
            self._answer(200, data, tag)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            self._answer(416)
            return
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._answer(206, data[start:stop] + self.web.surplus, tag | place)

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # who asked may have had enough
                self.wfile.write(body)


@contextmanager
def serving(folder: Path, *, tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Serve a folder during the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        web = Web(folder, url=f"{scheme}://localhost:{server.server_port}")
        server.web = web  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join(30)
