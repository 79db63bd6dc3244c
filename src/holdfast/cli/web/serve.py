"""`holdfast serve`: serve the page of some roots on this machine."""

from __future__ import annotations

import re
import socket
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from holdfast.cli.options import argument, command, option, several
from holdfast.cli.output import Code, give_line, printable, write_message
from holdfast.cli.target import open_root
from holdfast.errors import TransientStoreError, UsageError
from holdfast.root.catalog import is_root
from holdfast.store.local import LocalStore
from holdfast.threads.workers import Workers

DEFAULT_PORT = 8770
SWITCH_S = 0.0005
"""How soon a thread that reads makes way for the one that answers requests."""
_MAX_OPENING = 16
"""Most roots that are opened at the same time."""
_HOST = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_OWN_PATHS = frozenset({"r", "jobs", "static", "curves.json", "metrics.csv"})
"""First parts of the page's paths. With one as the prefix it could not be told whether a proxy has
taken the prefix off."""
SERVER: Mapping[str, Any] = {
    "http": "h11",
    "ws": "none",
    "loop": "asyncio",
    "log_level": "error",
    "access_log": False,  # a line of it would have the first URL, and so the token
    "proxy_headers": False,
    "server_header": False,
    "h11_max_incomplete_event_size": 32 << 10,
    "limit_concurrency": 64,  # a browser opens six connections
    "timeout_keep_alive": 30,
    "timeout_graceful_shutdown": 2,
}
"""Arguments of uvicorn's `Config`."""
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*", re.ASCII)


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run on the page."""

    name: str
    """Its name in the URLs."""
    root: str
    """Path or URL of its root."""
    error: str | None
    """Why the root cannot be reached at present; null: it can."""


class ServeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Line of `holdfast serve` once it listens."""

    url: str
    """What to open in a browser on this machine; whoever has it can look."""
    port: int
    """Port on 127.0.0.1."""
    runs: tuple[ServedRun, ...]
    """The runs."""


@command(
    "serve",
    argument("roots", "ROOT...", "Roots of runs, or folders that hold such roots.", nargs=-1),
    option(
        "--port",
        "N",
        "Port on 127.0.0.1. [default: 8770, or a free port]",
        type=click.IntRange(min=0, max=65535),
    ),
    option("--path-prefix", "PATH", "Path prefix under a proxy.", default="", show_default=False),
    several("--allow-host", "allow_hosts", "NAME", "Also accept this host name, for a proxy."),
    click.Option(
        ["--open/--no-open", "is_opening"],
        default=False,
        help="Open a browser. Other local users may then see the URL.",
    ),
    answer=ServeAnswer,
    json_lines="Print a JSON object when the server is ready.",
)
def serve(
    roots: Sequence[str],
    *,
    port: int | None,
    path_prefix: str,
    allow_hosts: Sequence[str],
    is_opening: bool,
    as_json: bool,
) -> int:
    """Show runs in the browser, on 127.0.0.1, until Ctrl-C.

    The printed URL has a token that gives access. Needs pip install 'holdfast-torch[web]'.
    """
    prefix = path_prefix.rstrip("/")
    if not _PREFIX.fullmatch(prefix) or ".." in prefix:
        raise UsageError(f"--path-prefix={path_prefix!r}: write it as /holdfast")
    if f"{prefix}/".split("/")[1] in _OWN_PATHS:
        raise UsageError(
            f"--path-prefix={path_prefix!r}: the paths of the pages begin with this; "
            "use another prefix, such as /holdfast"
        )
    for host in allow_hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"--allow-host={host!r}: a name alone, as lab.example.org")
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UsageError(
            f"the page needs {error.name}: pip install 'holdfast-torch[web]'"
        ) from None
    from holdfast.cli.web.guard import Access
    from holdfast.cli.web.routes import make_app
    from holdfast.cli.web.site import names_of

    roots = _find_roots(roots)
    names = names_of(roots)
    unreachable = _find_unreachable([*names.values()])
    access = Access(prefix=prefix, hosts=frozenset(map(str.lower, allow_hosts)))
    app = make_app(roots, access)
    with listening(port) as listener:
        found = listener.getsockname()[1]
        answer = ServeAnswer(
            url=f"http://127.0.0.1:{found}{prefix}/?token={access.token}",
            port=found,
            runs=tuple(
                ServedRun(name=name, root=root, error=unreachable.get(root))
                for name, root in names.items()
            ),
        )
        _print_addresses(answer, as_json=as_json)
        browsers = Workers(1, "holdfast-browser")
        if is_opening:  # a browser of the terminal ends only when its user ends it
            browsers.submit(lambda: _open_browser(answer.url))
        browsers.close_pool()
        sys.setswitchinterval(SWITCH_S)
        uvicorn.Server(uvicorn.Config(app, **SERVER)).run(sockets=[listener])
    return Code.OK


def _find_roots(given: Sequence[str]) -> list[str]:
    """Return the roots, in place of a local folder that is none the roots in it."""
    found: list[str] = []
    for root in given:
        folder = Path(root)
        inside: list[str] = []
        if "://" not in root and folder.is_dir() and not is_root(LocalStore(folder)):
            folders = [one for one in sorted(folder.iterdir()) if one.is_dir()]
            inside = [str(one) for one in folders if is_root(LocalStore(one))]
        found += inside or [root]
    return found


def _find_unreachable(roots: Sequence[str]) -> Mapping[str, str]:
    """Return the roots that cannot be reached at present, each with its error.

    Opens all of them at once. The page tries these again; any other error, such as that of a
    mistyped path, ends the command, and so does a start at which no root can be reached.
    """
    openers = Workers(min(len(roots), _MAX_OPENING), "holdfast-open")
    opening = {openers.submit(partial(copy_context().run, open_root, root)): root for root in roots}
    openers.close_pool()
    found: dict[str, str] = {}
    for opened in as_completed(opening):
        try:
            opened.result()
        except TransientStoreError as error:
            found[opening[opened]] = str(error)
            if len(found) == len(roots):
                raise
    return found


def _open_browser(url: str) -> None:
    if not webbrowser.open(url):
        click.echo("no browser could be started; open the URL yourself", err=True)


def listening(port: int | None) -> socket.socket:
    """Listen on 127.0.0.1; without a given port on the usual one, or on any that is free."""
    for number in (DEFAULT_PORT, 0) if port is None else (port,):
        # asyncio sends without delay only on sockets that say that they are of TCP.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if sys.platform != "win32":  # where another program could listen beside this one
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
        except OSError as error:
            listener.close()
            if port is not None:
                raise UsageError(f"--port={port}: {error.strerror or error}") from None
        else:
            listener.listen()
            return listener
    raise UsageError("no port is free on 127.0.0.1")


def _print_addresses(answer: ServeAnswer, *, as_json: bool) -> None:
    for run in answer.runs:
        if run.error is not None:
            write_message(f"{run.root} cannot be reached now, and will be tried again: {run.error}")
    if as_json:
        give_line(answer)
        return
    names = ", ".join(run.root for run in answer.runs)
    click.echo(printable(f"{names}\nopen {answer.url}\nCtrl-C ends it"))
