"""HTTP connections with limits: how many there are, and how long a client may take."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
"""A browser opens six; each tab and each script has its own."""
REQUEST_S = 10.0
"""Longest time from the first byte of a connection, or of its next request, to the last."""
SENDING_S = 60.0
"""Longest time in which a response must be taken by the client."""
MAX_HEADER_NBYTES = 32 << 10


class Connection(H11Protocol):
    """Connection of uvicorn that is closed if a request takes long to arrive, or to be taken.

    uvicorn itself waits without end for the rest of a request that has begun.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._close_after(REQUEST_S)

    def handle_events(self) -> None:
        """Handle what has arrived; a whole request gets time for its response."""
        before = self.cycle
        super().handle_events()
        is_whole = self.cycle is not None and not self.cycle.more_body
        if self.cycle is not before or is_whole:
            self._close_after(SENDING_S if is_whole else REQUEST_S)

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn closes a connection on which none begins."""
        super().on_response_complete()
        self._close_after(REQUEST_S + self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline of a connection that has ended."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _close_after(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def server_of(app: ASGIApp) -> Server:
    """Return a server of these connections, which logs no URL: the first has the token."""
    config = Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_NBYTES,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        backlog=MAX_CONNECTIONS,
    )
    return Server(config)
