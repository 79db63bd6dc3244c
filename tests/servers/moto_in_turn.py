"""moto's server, one request after the other. Run by moto's own environment: PORT.

moto looks whether a key is taken and stores the object in two steps, in threads, so of several
conditional puts at once more than one may win, now and then. Holdfast refuses such a store, and
rightly; here it would be refused only on some days.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import run_simple

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def in_turn(app: App) -> App:
    """The same application, which is asked for one reply at a time."""
    lock = threading.Lock()

    def reply(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        # The body first: a client that stops in the middle of it must hold up nobody.
        nbytes = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(nbytes)
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        with lock:
            return list(app(environ, start))

    return reply


def main() -> None:
    """Serve until killed."""
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        in_turn(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=MotoRequestHandler,
    )


if __name__ == "__main__":
    main()
