"""A training process that reports through a pipe and can be killed at any moment."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from holdfast.demo.plan import DemoPlan
from holdfast.errors import DeadlineExceeded, HoldfastError

Line = dict[str, Any]


class WorkerFailed(HoldfastError):
    """A training process ended with an error; the message ends with its log."""


class Worker:
    """A running `holdfast.demo.worker` with its data workers, in their own process group.

    A context manager: at its end, what is left of the group is killed.
    """

    def __init__(self, root: Path, plan: DemoPlan, *, num_workers: int, log: Path) -> None:
        command = [sys.executable, "-m", "holdfast.demo.worker", str(root), plan.encoded()]
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, str(num_workers)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._partial = b""
        self._lines: deque[Line] = deque()

    @property
    def group(self) -> int:
        """Id of the process group."""
        return self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill_group()
        self._selector.close()
        self._pipe.close()

    def next_line(self, *, timeout_s: float) -> Line | None:
        """Wait for the next report of the process; None when it has ended.

        Raises:
            WorkerFailed: the process ended with an error.
            DeadlineExceeded: it reported nothing for `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(
                    f"the training process reported nothing for {timeout_s:g} s; see {self._log}"
                )
            if not self._read():
                self._check_end(timeout_s)
                return None
        return self._lines.popleft()

    def kill(self) -> list[Line]:
        """Send SIGKILL to the whole group; returns what was reported before."""
        self._kill_group()
        while self._read():
            pass
        rest = list(self._lines)
        self._lines.clear()
        return rest

    def _read(self) -> bool:
        """Wait for data on the pipe and read it; False at the end of the pipe."""
        data = os.read(self._pipe.fileno(), 1 << 16)
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(json.loads(line) for line in whole)
        return bool(data)

    def _kill_group(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    def _check_end(self, timeout_s: float) -> None:
        code = self._process.wait(timeout_s)
        if code:
            tail = self._log.read_text("utf-8", "replace")[-2000:]
            raise WorkerFailed(f"the training process ended with exit code {code}:\n{tail}")
