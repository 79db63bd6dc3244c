"""Server programs: start on a free port, wait until they answer, stop by process id.

A program dies with the process that started it, also when that is killed: the kernel sees to it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

READY_S = 120.0
STOP_S = 10.0
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server that answers, and what a client needs to know of it."""

    name: str
    scheme: str
    """Of the URLs of its stores: s3, gs or az."""
    endpoint: str
    """Where it answers: http://127.0.0.1:PORT, with a path where the protocol has one."""
    bucket: str
    """A bucket, or container, that exists."""
    environment: dict[str, str]
    """The variables by which a client of that cloud finds it and proves who it is."""

    def root(self, prefix: str) -> str:
        """The URL of a run under this prefix."""
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def at(self, address: str) -> Service:
        """The same server, reached through another host and port, such as a proxy's."""
        old = self.endpoint.split("/")[2]
        environment = {name: text.replace(old, address) for name, text in self.environment.items()}
        return replace(self, endpoint=self.endpoint.replace(old, address), environment=environment)

    @property
    def address(self) -> str:
        """Host and port."""
        return self.endpoint.split("/")[2]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for another process: `Service(**plain)`."""
        return asdict(self)


class Program(ABC):
    """A server of the tests. A context manager that yields the running `Service`.

    Its data and logs are in `folder`, so that it finds them again after `kill` and `start`.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._processes: list[tuple[subprocess.Popen[bytes], Path]] = []

    @abstractmethod
    def install(self) -> None:
        """Make what the server needs, once.

        Raises:
            Unavailable: it cannot be had on this machine.
        """

    @abstractmethod
    def start(self) -> Service:
        """Start all its processes; returns when it answers."""

    def __enter__(self) -> Service:
        self.install()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """Of its processes, in the order in which they were started."""
        return [process.pid for process, _ in self._processes]

    def stop(self) -> None:
        """Ask each process to end, the newest first, and kill what does not."""
        for process, _ in reversed(self._processes):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def kill(self) -> None:
        """SIGKILL every process, as a crash of the machine would."""
        for process, _ in self._processes:
            process.kill()
        for process, _ in self._processes:
            process.wait()
        self._processes.clear()

    def spawn(
        self, title: str, words: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one process, whose output goes to `TITLE.log`."""
        log = self.folder / f"{title}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [os.fspath(word) for word in words],
                cwd=self.folder,
                env={**_bare_environment(self.folder), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(_die_with, os.getpid()),
            )
        self._processes.append((process, log))
        return process

    def wait_for(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll until it is ready; a process that ends, or the deadline, raises with the logs."""
        deadline = time.monotonic() + READY_S
        while not is_ready():
            ended = [process.args for process, _ in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{ended} ended" if ended else f"not within {READY_S:.0f} s"
                raise RuntimeError(f"{self.name}: {what}: {why}\n{self.logs()}")
            time.sleep(_POLL_S)

    def wait_for_http(self, url: str, what: str = "does not answer") -> None:
        """Wait until a URL gives any HTTP reply."""
        self.wait_for(lambda: answers(url), what)

    def logs(self, nbytes: int = 2000) -> str:
        """The ends of the logs, for messages."""
        parts = []
        for path in sorted(self.folder.glob("**/*.log")):
            text = path.read_text("utf-8", "replace")[-nbytes:]
            parts.append(f"--- {path.name}\n{text}")
        return "\n".join(parts)


def answers(url: str) -> bool:
    """Whether there is an HTTP reply of any status."""
    try:
        with _OPENER.open(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except (OSError, urllib.error.URLError):
        return False


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ends(pidfd: int, within_s: float = 60) -> bool:
    """Whether the process of a descriptor, which is closed, is gone by then."""
    waiting = select.poll()  # `select` itself takes no descriptor above 1023
    waiting.register(pidfd, select.POLLIN)
    try:
        return bool(waiting.poll(within_s * 1000))
    finally:
        os.close(pidfd)


def send(method: str, url: str, headers: Mapping[str, str] | None = None, data: bytes = b"") -> int:
    """One HTTP request straight to a server of the tests; the status of the reply."""
    request = urllib.request.Request(url, data=data, method=method, headers=dict(headers or {}))
    try:
        with _OPENER.open(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _bare_environment(folder: Path) -> dict[str, str]:
    """Without proxies, certificates and credentials of whoever runs the tests."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}


_LIBC = ctypes.CDLL(None)


def _die_with(parent: int) -> None:
    """In the child: be killed when the parent is gone, as nothing else would end it then."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
