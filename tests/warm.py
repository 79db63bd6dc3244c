"""Child processes that start with torch imported, as forks of a server that imported it once.

`Popen` and `run` replace those of `subprocess` with `sys.executable`, and save the two seconds that
an import of torch takes. The process is a child of the caller; it runs its own exit handlers and
prints its own traceback on stderr. The server has the `sys.path` and the environment of the moment
of its start. Options of the interpreter are not supported, and of `subprocess` only `cwd`, `env`
and the streams.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST = 1 << 20
_NUM_STREAMS = 3
_DEADLINE_S = 120


class Popen(subprocess.Popen[str]):
    """Text-mode `subprocess.Popen` of `SCRIPT WORD...`, `-c CODE WORD...`, `-m MODULE WORD...`."""

    def __init__(self, words: Sequence[object], **options: Any) -> None:
        super().__init__([str(word) for word in words], text=True, **options)

    def _execute_child(self, args: Any, *given: Any) -> None:
        """Have the server fork the process, where `subprocess` would fork this one."""
        _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *streams = given[:15]
        _, *others = given[16:]  # whose process it is, and its group and session
        unknown = [preexec_fn, pass_fds, shell, *others]
        assert all(option in (None, -1, False, ()) for option in unknown), f"unknown: {unknown}"
        request = {"words": args, "cwd": os.fspath(cwd or Path.cwd())}
        request["env"] = dict(os.environ if env is None else env)
        theirs = [streams[0], streams[3], streams[5]]
        theirs = [own if own != -1 else at for at, own in enumerate(theirs)]
        self.pid = _server().fork(request, theirs)
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def run(
    words: Sequence[object], *, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its output and exit status."""
    pipe = subprocess.PIPE
    with Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    """Client of the server process, which it starts, and which forks on request."""

    def __init__(self) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(_DEADLINE_S)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            # A Ctrl-C in the terminal must reach the tests only.
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._end)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Fork a process, which becomes a child of this one, and return its pid."""
        with self._lock, _adopting():
            socket.send_fds(self._asking, [json.dumps(request).encode()], streams)
            answer = self._asking.recv(100)
        assert answer, f"the server of forks ended: {self._process.wait(_DEADLINE_S)}"
        return int(answer)

    def _end(self) -> None:
        if os.getpid() != self._owner:
            return
        # Forks of this process may have the socket, too, so closing it here would tell nobody.
        self._asking.shutdown(socket.SHUT_RDWR)
        self._asking.close()
        self._process.wait(_DEADLINE_S)


@functools.cache
def _server() -> _Server:
    return _Server()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of orphaned descendants while the block runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0) == 0, os.strerror(ctypes.get_errno())


def _serve(asked: socket.socket) -> None:
    """Fork a process for each request, until every client has closed the socket."""
    tests = os.getppid()
    while True:
        data, streams, _, _ = socket.recv_fds(asked, _MAX_REQUEST, _NUM_STREAMS)
        if not data:
            sys.exit()
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent, process = os.getpid(), os.fork()
            if process == 0:
                while os.getppid() == parent:
                    time.sleep(0.001)  # until it is adopted
                if os.getppid() != tests:
                    os._exit(97)  # the tests have ended
                asked.close()
                os.close(reading)
                os.close(writing)
                return _become(json.loads(data), streams)
            os.write(writing, str(process).encode())
            os._exit(0)  # so that the process is adopted
        os.close(writing)  # else a fork that failed there would leave the read below waiting
        os.waitpid(between, 0)
        asked.send(os.read(reading, 100))
        for fd in (*streams, reading):
            os.close(fd)


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Run the program of the request in this process, as Python would."""
    # Duplicates of 0, 1 and 2, so that dup2 overwrites none before it is used.
    streams = [os.dup(fd) if fd < _NUM_STREAMS else fd for fd in streams]
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
    for fd in {*streams}:
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *words = request["words"]
    if first in ("-c", "-m"):
        what, *words = words
    sys.argv = [first, *words]
    if first == "-c":
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif first == "-m":
        sys.path[0] = request["cwd"]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The first optimizer imports torch._dynamo, which takes seconds.
    for module in ("torch._dynamo", "holdfast.manager"):
        importlib.import_module(module)
    gc.freeze()  # else the collection at exit writes to all these objects in each fork
    _serve(socket.socket(fileno=int(sys.argv[1])))
