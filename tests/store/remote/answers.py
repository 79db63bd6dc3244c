"""An HTTP server that answers as a test tells it, for what no real service says on demand."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply; status 0 resets the connection instead, `is_cut` in the middle of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


def refusal(status: int, code: str, message: str = "because") -> Answer:
    """An error as S3, Google and Azure write it."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status=status, body=text.encode())


RESET = Answer(status=0)


class Answers:
    """What is answered: `next_ones` first, one each, and then always `then`."""

    def __init__(self) -> None:
        self.next_ones: list[Answer] = []
        self.then: Answer | Callable[[str, str], Answer] = Answer()
        self.asked: list[str] = []
        self.lock = threading.Lock()

    def choose(self, method: str, path: str) -> Answer:
        """The reply to a request."""
        with self.lock:
            self.asked.append(f"{method} {path}")
            if self.next_ones:
                return self.next_ones.pop(0)
        return self.then(method, path) if callable(self.then) else self.then


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: ClassVar[Answers]

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.answers.choose(self.command, self.path)
        if answer.status == 0 or answer.is_cut:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
        if answer.status == 0:
            return
        self.send_response(answer.status)
        for name, text in answer.headers.items():
            self.send_header(name, text)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // (1 + answer.is_cut)])

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def answering(port: int = 0) -> Iterator[tuple[str, Answers]]:
    """(endpoint, answers) of a server on a port; on a free one without."""
    answers = Answers()
    handler = type("Handler", (_Handler,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", answers
        finally:
            server.shutdown()
            thread.join()
