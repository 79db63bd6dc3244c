"""Supervision of a training: when to restart it, after what pause, and when to give up.

`supervise` counts failures and knows nothing of processes, roots or clocks: the caller passes a
child to start, and a callback that gives the run's newest step. `ChildProcess` owns processes,
sessions and signals: it forwards signals to a child and kills it with its helpers. Without torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import IO, Protocol

from holdfast.errors import UsageError
from holdfast.system import signal_name, signals_of

REQUEUE_CODE = 75
"""Exit status of a training that asks its scheduler to run it again; the trainer's code."""
_SHELL_SIGNAL = 128
"""Shells give 128 + n as the status of a process that signal n ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits of restarts: failures, pauses, and what counts as progress."""

    max_failures: int = 5
    """Give up after so many sessions (runs of the child) in a row without progress."""
    backoff_s: float = 1.0
    """Pause before a restart, in seconds; doubled with each further failure. 0 for none."""
    backoff_max_s: float = 60.0
    """Longest pause before a restart, in seconds."""
    requeue_code: int = REQUEUE_CODE
    """Exit status after which the child is not restarted: its scheduler is to do that."""
    progress_after_s: float = 600.0
    """Duration from which a session counts as progress, where the run's step is not known."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise UsageError(f"max_failures={self.max_failures}: must be 1 or more")
        if not 1 <= self.requeue_code <= 255:
            raise UsageError(f"requeue_code={self.requeue_code}: must be from 1 to 255")
        for name in ("backoff_s", "backoff_max_s", "progress_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value}: must be a number of seconds, not below 0")
        if self.backoff_s > self.backoff_max_s:
            raise UsageError(
                f"backoff_s={self.backoff_s}: longer than backoff_max_s={self.backoff_max_s}"
            )

    def pause_s(self, failures: int, jitter: float) -> float:
        """Compute the pause before a restart, in seconds, after sessions without progress.

        `jitter` from 0 to 1 takes up to half of it away, so that trainings that one fault ended
        do not all restart at one moment.

        >>> [RestartLimits().pause_s(failures, 0.0) for failures in (0, 1, 2, 3, 7, 5000)]
        [1.0, 1.0, 2.0, 4.0, 60.0, 60.0]
        >>> RestartLimits().pause_s(3, 1.0)
        2.0
        """
        doublings = min(max(failures - 1, 0), 64)  # A float has room for that many, and more.
        return min(self.backoff_s * 2.0**doublings, self.backoff_max_s) * (1 - jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnding:
    """How one run of the child ended."""

    returncode: int | None
    """Exit status; -n where signal n ended it; None where the command could not be started."""
    asked: int | None = None
    """The first signal that asked the child to stop."""
    error: str = ""
    """Why the command could not be started."""
    duration_s: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        if self.returncode is None:
            return f"not started: {self.error}"
        if self.returncode < 0:
            return signal_name(-self.returncode)
        return f"status {self.returncode}"

    @property
    def code(self) -> int:
        """Exit status as a shell would report it."""
        if self.returncode is None:
            return 1
        return _SHELL_SIGNAL - self.returncode if self.returncode < 0 else self.returncode


class SupervisionOutcome(Enum):
    """Reason why the supervision of a command ended."""

    FINISHED = "finished"
    """The child ended with status 0."""
    REQUEUE = "requeue"
    """The child ended with the code that asks its scheduler to run it again."""
    STOPPED = "stopped"
    """A signal asked to stop, and the child ended in another way than those two."""
    GAVE_UP = "gave-up"
    """Too many sessions in a row ended without progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSession:
    """Result of a run of the child: how it ended, whether it made progress, the pause after it."""

    number: int
    """Number of the session, from 1."""
    ending: ChildEnding
    from_step: int | None
    """Step of the run's newest checkpoint before the session; None: none, or not known."""
    to_step: int | None
    """Step of the run's newest checkpoint after the session."""
    has_progressed: bool
    failures: int
    """Sessions in a row without progress, this one included."""
    restart_in_s: float | None
    """Pause before the next session; None after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Result of a supervision: its outcome, all sessions of the child, and the exit status."""

    outcome: SupervisionOutcome
    sessions: tuple[ChildSession, ...]
    code: int
    """Exit status of the last session, or 128 + n where signal n came between two sessions."""


class Child(Protocol):
    """Interface of a supervised process, which also handles the signals."""

    def run_to_end(self) -> ChildEnding:
        """Start the process, and wait for its end."""
        ...

    def pause(self, delay_s: float) -> int | None:
        """Wait, but not beyond the first signal that asks to stop; return that signal."""
        ...


def supervise(
    child: Child,
    limits: RestartLimits,
    *,
    head: Callable[[], int | None] | None = None,
    tell: Callable[[ChildSession], None] = lambda session: None,
    dice: random.Random | None = None,
) -> Supervised:
    """Restart the child until it succeeds, is asked to stop, or makes no more progress.

    `head` gives the step of the run's newest checkpoint, or None where there is none. A session has
    made progress when that step is higher than ever before: so there are at most `max_failures`
    sessions for each checkpoint, also for a run that is rolled back again and again. Without
    `head`, a long session counts (`RestartLimits.progress_after_s`). `tell` is called after each
    session. `dice` draw the jitter of pauses.
    """
    dice = dice or random.Random()
    sessions: list[ChildSession] = []
    step = None if head is None else head()
    highest, failures = -1 if step is None else step, 0
    while True:
        ending = child.run_to_end()
        before, step = step, None if head is None else head()
        if head is None:
            has_progressed = ending.duration_s >= limits.progress_after_s
        else:
            has_progressed = step is not None and step > highest
        highest = max(highest, -1 if step is None else step)
        failures = 0 if has_progressed or ending.returncode == 0 else failures + 1
        outcome = _outcome(ending, limits, failures)
        pause_s = limits.pause_s(failures, dice.random())
        session = ChildSession(
            number=len(sessions) + 1,
            ending=ending,
            from_step=before,
            to_step=step,
            has_progressed=has_progressed,
            failures=failures,
            restart_in_s=pause_s if outcome is None else None,
        )
        sessions.append(session)
        tell(session)
        if outcome is not None:
            return Supervised(outcome=outcome, sessions=tuple(sessions), code=ending.code)
        asked = child.pause(pause_s)
        if asked is not None:
            code = _SHELL_SIGNAL + asked
            return Supervised(
                outcome=SupervisionOutcome.STOPPED, sessions=tuple(sessions), code=code
            )


def _outcome(
    ending: ChildEnding, limits: RestartLimits, failures: int
) -> SupervisionOutcome | None:
    """Decide the outcome after a session; None: restart the child."""
    if ending.returncode == 0:
        return SupervisionOutcome.FINISHED
    if ending.returncode == limits.requeue_code:
        return SupervisionOutcome.REQUEUE
    if ending.asked is not None:
        return SupervisionOutcome.STOPPED
    return SupervisionOutcome.GAVE_UP if failures >= limits.max_failures else None


FORWARDED = signals_of("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
"""Signals that ask to stop. Those that were ignored when the supervisor began stay ignored."""
_LEFTOVERS_S = 10.0
"""How long to wait for killed processes to end, in seconds."""
_POLL_S = 0.05
"""Pause between checks of processes that are not our children, for which no wait exists."""


class SessionWatcher(Protocol):
    """Interface of an observer that is called again and again while a child runs."""

    poll_s: float
    """Seconds between two calls."""

    def look_around(self, leader: int) -> None:
        """Do the work of one call; `leader` is the child's process number and its group's."""


class ChildProcess:
    """Runs a command as a child and forwards signals to it; a context manager, main thread only.

    Owns this process's signal handlers. Each run is a session of its own: a terminal's Ctrl-C
    reaches it once, through us, and its helpers can be found. Standard streams are inherited, or
    both outputs go to the file descriptor `output`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace_s: float,
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        if not command:
            raise UsageError("command: must not be empty")
        if not hasattr(os, "killpg"):
            raise UsageError("commands are supervised on Linux and macOS only: no process groups")
        if grace_s < 0:
            raise UsageError(f"grace_s={grace_s}: must be a number of seconds, not below 0")
        self._command = list(command)
        self._grace_s = grace_s
        self._environment = environment
        self._output = output
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

    def run_to_end(
        self,
        command: Sequence[str] | None = None,
        *,
        stdout: IO[bytes] | None = None,
        limit_s: float = math.inf,
        watcher: SessionWatcher | None = None,
    ) -> ChildEnding:
        """Start the command, or another one, and wait for its end; forward signals meanwhile.

        The first signal starts the grace period, at whose end the whole process group is killed, as
        it is after `limit_s` seconds. After a failure no process of the group is left running.
        """
        began_s = time.monotonic()
        arguments = self._command if command is None else list(command)
        try:
            process = subprocess.Popen(
                arguments,
                start_new_session=True,
                env=self._environment,
                stdout=self._output if stdout is None else stdout,
                stderr=self._output,
            )
        except OSError as error:
            is_wrong = isinstance(error, FileNotFoundError | PermissionError)
            if is_wrong and not self._has_lived:
                raise UsageError(f"command {arguments[0]!r}: {error.strerror}") from error
            return ChildEnding(
                returncode=None, error=str(error), duration_s=time.monotonic() - began_s
            )
        finally:
            self._has_lived = True
        group, stop = _ProcessGroup(process.pid), _Grace(self._grace_s, limit_s)
        try:
            code = self._wait_for_leader(process, group, stop, watcher)
        except BaseException:  # of the watcher
            group.send_signal(signal.SIGKILL)
            process.wait()
            raise
        died_asked = stop.first is not None and code < 0
        has_succeeded = code == 0
        if not has_succeeded and not died_asked:
            # Before the leader is reaped: its number cannot be another's yet.
            group.send_signal(signal.SIGKILL)
        returncode = process.wait()
        if not has_succeeded:
            self._wait_for_others(group, stop, is_graceful=died_asked)
        return ChildEnding(
            returncode=returncode, asked=stop.first, duration_s=time.monotonic() - began_s
        )

    def pause(self, delay_s: float) -> int | None:
        """Wait for `delay_s` seconds or until a stop signal; return that signal's number."""
        until = time.monotonic() + delay_s
        while True:
            left_s = until - time.monotonic()
            for number in self._signals(max(left_s, 0.0)):
                return number
            if left_s <= 0:
                return None

    def _wait_for_leader(
        self,
        process: subprocess.Popen[bytes],
        group: _ProcessGroup,
        stop: _Grace,
        watcher: SessionWatcher | None,
    ) -> int:
        """Return the exit status, or less the number of the signal that ended the child."""
        while (code := _exit_code(process)) is None:
            if stop.is_over:
                group.send_signal(signal.SIGKILL)
                self._signals(_POLL_S)
            elif watcher is not None:
                watcher.look_around(process.pid)
                self._forward_signals(group, stop, watcher.poll_s)
            else:
                self._forward_signals(group, stop, stop.left_s)
        return code

    def _wait_for_others(self, group: _ProcessGroup, stop: _Grace, *, is_graceful: bool) -> None:
        """Wait for the group's other processes, as a shell's training; kill those that stay."""
        while is_graceful and not group.is_gone() and not stop.is_over:
            self._forward_signals(group, stop, _POLL_S)
        if not group.is_gone():
            group.send_signal(signal.SIGKILL)
        until = time.monotonic() + _LEFTOVERS_S
        while not group.is_gone() and time.monotonic() < until:
            self._forward_signals(group, stop, _POLL_S)

    def _forward_signals(self, group: _ProcessGroup, stop: _Grace, timeout_s: float | None) -> None:
        for number in self._signals(timeout_s):
            stop.start_grace_period(number)
            group.send_signal(number)

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
    """Time that the child has to stop by itself: the grace period after the first signal."""

    def __init__(self, grace_s: float, limit_s: float) -> None:
        self._grace_s = grace_s
        self._until = time.monotonic() + limit_s
        self.first: int | None = None

    def start_grace_period(self, number: int) -> None:
        """Start the grace period at the first signal; no-op at later ones."""
        if self.first is None:
            self.first = number
            self._until = min(self._until, time.monotonic() + self._grace_s)

    @property
    def is_over(self) -> bool:
        """Whether that time is over."""
        return time.monotonic() >= self._until

    @property
    def left_s(self) -> float | None:
        """Seconds left; None if there is no limit."""
        return None if math.isinf(self._until) else max(0.0, self._until - time.monotonic())


class _ProcessGroup:
    """The process group of a child."""

    def __init__(self, number: int) -> None:
        self._number = number

    def send_signal(self, number: int) -> None:
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


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child as `Popen` has it, without reaping it; None while it runs."""
    if not hasattr(os, "waitid"):
        # macOS before Python 3.13. It is reaped here: its number is free for the moment until the
        # rest of its group is killed.
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    status: int = found.si_status
    return status if found.si_code == os.CLD_EXITED else -status


def _ignore(*_: object) -> None:
    """No-op signal handler: the signal's number arrives through the wakeup pipe."""
