"""A supervised child process: starts it, forwards signals to it, kills it with its helpers.

Owns processes, sessions and signals; `care.supervise` decides whether to start it again.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.care.supervise import ChildEnding
from holdfast.errors import UsageError

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask to stop. Those that were ignored when the supervisor began stay ignored."""
_LEFTOVERS_S = 10.0
"""How long to wait for killed processes to end, in seconds."""
_POLL_S = 0.05
"""Pause between checks of processes that are not our children, for which no wait exists."""


class ChildProcess:
    """Runs a command as a child and forwards signals to it; a context manager, main thread only.

    Owns this process's signal handlers. Each run is a session of its own: a terminal's Ctrl-C
    reaches it once, through us, and its helpers can be found. Standard streams are inherited.
    """

    def __init__(self, command: Sequence[str], *, grace_s: float) -> None:
        if not command:
            raise UsageError("command: must not be empty")
        if grace_s < 0:
            raise UsageError(f"grace_s={grace_s}: must be a number of seconds, not below 0")
        self._command = list(command)
        self._grace_s = grace_s
        self._has_lived = False
        self._undo = contextlib.ExitStack()
        self._reader = -1

    def __enter__(self) -> ChildProcess:
        reader, writer = os.pipe()
        self._undo.callback(os.close, reader)
        self._undo.callback(os.close, writer)
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(number)
        # An ignored SIGCHLD, which is inherited, would reap children unseen.
        self._handle(signal.SIGCHLD)
        self._reader = reader
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def live(self) -> ChildEnding:
        """Start the command and wait for its end; forward signals meanwhile.

        The first signal begins the time of grace, at whose end the whole process group is killed.
        After a failure no process of the group is left running.

        Raises:
            UsageError: at the first start, there is no such command, or it may not be run.
        """
        try:
            process = subprocess.Popen(self._command, start_new_session=True)
        except OSError as error:
            is_wrong = isinstance(error, FileNotFoundError | PermissionError)
            if is_wrong and not self._has_lived:
                raise UsageError(f"command {self._command[0]!r}: {error.strerror}") from error
            return ChildEnding(returncode=None, error=str(error))
        finally:
            self._has_lived = True
        group, stop = _ProcessGroup(process.pid), _Grace(self._grace_s)
        self._wait_for_leader(process.pid, group, stop)
        how = _ended(process.pid)
        died_asked = stop.first is not None and how.si_code != os.CLD_EXITED
        has_succeeded = how.si_code == os.CLD_EXITED and how.si_status == 0
        if not has_succeeded and not died_asked:
            # Before the leader is reaped: its number cannot be another's yet.
            group.send(signal.SIGKILL)
        returncode = process.wait()
        if not has_succeeded:
            self._wait_for_others(group, stop, is_graceful=died_asked)
        return ChildEnding(returncode=returncode, asked=stop.first)

    def pause(self, delay_s: float) -> int | None:
        """Wait for `delay_s` seconds or until a stop signal; return that signal's number."""
        until = time.monotonic() + delay_s
        while True:
            left_s = until - time.monotonic()
            for number in self._signals(max(left_s, 0.0)):
                return number
            if left_s <= 0:
                return None

    def _wait_for_leader(self, pid: int, group: _ProcessGroup, stop: _Grace) -> None:
        while _ended(pid) is None:
            if stop.is_over:
                group.send(signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            else:
                self._forward(group, stop, stop.left_s)

    def _wait_for_others(self, group: _ProcessGroup, stop: _Grace, *, is_graceful: bool) -> None:
        """Wait for the other processes of the group: a shell dies at once, its training saves."""
        while is_graceful and not group.is_gone() and not stop.is_over:
            self._forward(group, stop, _POLL_S)
        if not group.is_gone():
            group.send(signal.SIGKILL)
        until = time.monotonic() + _LEFTOVERS_S
        while not group.is_gone() and time.monotonic() < until:
            self._forward(group, stop, _POLL_S)

    def _forward(self, group: _ProcessGroup, stop: _Grace, timeout_s: float | None) -> None:
        for number in self._signals(timeout_s):
            stop.begin(number)
            group.send(number)

    def _signals(self, timeout_s: float | None) -> Iterator[int]:
        """Wait for a signal of any kind; return the stop signals since the last call."""
        waiting = select.poll()  # `select` itself takes no descriptor above 1023
        waiting.register(self._reader, select.POLLIN)
        ready = waiting.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        data = os.read(self._reader, 4096) if ready else b""
        return (number for number in data if number != signal.SIGCHLD)

    def _handle(self, number: signal.Signals) -> None:
        self._undo.callback(signal.signal, number, signal.signal(number, _ignore) or signal.SIG_DFL)


class _Grace:
    """Time that the child has left to stop by itself after the first signal."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._until = math.inf
        self.first: int | None = None

    def begin(self, number: int) -> None:
        """Start the time of grace at the first signal; later ones change nothing."""
        if self.first is None:
            self.first = number
            self._until = time.monotonic() + self._grace_s

    @property
    def is_over(self) -> bool:
        """Whether the time of grace has ended."""
        return time.monotonic() >= self._until

    @property
    def left_s(self) -> float | None:
        """Seconds left of the time of grace; None before the first signal."""
        return None if self.first is None else max(0.0, self._until - time.monotonic())


class _ProcessGroup:
    """The process group of a child."""

    def __init__(self, number: int) -> None:
        self._number = number

    def send(self, number: int) -> None:
        """Send a signal to all processes left in the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._number, number)

    def is_gone(self) -> bool:
        """Whether no process is left; reaps orphans that became our children, as in a container."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._number, os.WNOHANG) != (0, 0):
                pass
        try:
            os.killpg(self._number, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def _ended(pid: int) -> Any:
    """Return how a child ended, without reaping it; None while it runs."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _ignore(*_: object) -> None:
    """No-op signal handler: the signal's number arrives through the wakeup pipe."""
