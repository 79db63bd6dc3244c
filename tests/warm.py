"""Python processes that start with torch imported: forks of one process that did so.

`Popen` and `run` stand for those of `subprocess` with `sys.executable`, and save the two seconds
that an import of torch takes. The process is a child of the caller, with its own exit handlers and
its own traceback on stderr. It has the caller's `sys.path`; options of the interpreter are not
known.
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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST = 1 << 20
_NUM_STREAMS = 3


class Popen(subprocess.Popen[str]):
    """`subprocess.Popen` of `SCRIPT WORD...`, `-c CODE WORD...` or `-m MODULE WORD...`, in text."""

    def __init__(self, words: Sequence[object], **options: Any) -> None:
        super().__init__([str(word) for word in words], text=True, **options)

    def _execute_child(self, args: Any, *given: Any) -> None:
        """Ask the server for the process, where `subprocess` would fork this one."""
        cwd, env, streams = given[4], given[5], given[9:15]
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
    """What the process printed, and its exit status."""
    pipe = subprocess.PIPE
    with Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    """The process that forks, as this process sees it."""

    def __init__(self) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            # A Ctrl-C of the terminal is for the tests.
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self._end)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """The number of a new process, which becomes a child of this one."""
        with _adopting():
            socket.send_fds(self._asking, [json.dumps(request).encode()], streams)
            answer = self._asking.recv(100)
        assert answer, f"the server of forks ended: {self._process.wait(60)}"
        return int(answer)

    def _end(self) -> None:
        self._asking.close()
        self._process.wait(60)


@functools.cache
def _server() -> _Server:
    return _Server()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have orphans of own children become own children meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _serve(asked: socket.socket) -> None:
    """Fork a process for each request, until nobody can ask any more."""
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
                asked.close()
                os.close(reading)
                os.close(writing)
                return _become(json.loads(data), streams)
            os.write(writing, str(process).encode())
            os._exit(0)  # so that the process is adopted
        os.waitpid(between, 0)
        asked.send(os.read(reading, 100))
        for fd in (*streams, reading, writing):
            os.close(fd)


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Run the program of the request in this process, as Python would."""
    # Above the three first, lest one is closed before it was used.
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
    gc.freeze()  # else each process touches all these objects at its end
    _serve(socket.socket(fileno=int(sys.argv[1])))
