"""Supervision of a training: when to restart it, after what pause, and when to give up.

Counts failures. Knows nothing of processes, roots or clocks: the caller passes a child to start, a
callback that gives the run's newest step, and a clock. Without torch.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from holdfast.errors import UsageError

REQUEUE_CODE = 75
"""Exit status of a training that asks its scheduler to run it again; the trainer's code."""
_SHELL_SIGNAL = 128
"""Shells give 128 + n as the status of a process that signal n ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of restarts: failures, pauses, and what counts as progress."""

    max_failures: int = 5
    """Give up after so many lives (runs of the child) in a row without progress."""
    backoff_s: float = 1.0
    """Pause before a restart, in seconds; doubled with each further failure. 0 for none."""
    backoff_max_s: float = 60.0
    """Longest pause before a restart, in seconds."""
    requeue_code: int = REQUEUE_CODE
    """Exit status after which the child is not restarted: its scheduler is to do that."""
    progress_after_s: float = 600.0
    """Duration from which a life counts as progress, where the run's step is not known."""

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
        """Compute the pause before a restart, in seconds, after `failures` lives without progress.

        `jitter` from 0 to 1 takes up to half of it away, so that trainings that one fault ended
        do not all restart at one moment.

        >>> [Limits().pause_s(failures, 0.0) for failures in (0, 1, 2, 3, 7, 5000)]
        [1.0, 1.0, 2.0, 4.0, 60.0, 60.0]
        >>> Limits().pause_s(3, 1.0)
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
    """How the supervision ended."""

    FINISHED = "finished"
    """The child ended with status 0."""
    REQUEUE = "requeue"
    """The child ended with the code that asks its scheduler to run it again."""
    STOPPED = "stopped"
    """A signal asked to stop, and the child ended in another way than those two."""
    GAVE_UP = "gave-up"
    """Too many lives in a row ended without progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLife:
    """Result of a run of the child: how it ended, whether it made progress, the pause after it."""

    number: int
    """Number of the life, from 1."""
    ending: ChildEnding
    duration_s: float
    from_step: int | None
    """Step of the run's newest checkpoint before the life; None: there was none, or not known."""
    to_step: int | None
    """Step of the run's newest checkpoint after the life."""
    has_progressed: bool
    failures: int
    """Lives in a row without progress, this one included."""
    restart_in_s: float | None
    """Pause before the next life; None after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Result of a supervision: its outcome, all lives of the child, and the exit status."""

    outcome: SupervisionOutcome
    lives: tuple[ChildLife, ...]
    code: int
    """Exit status of the last life, or 128 + n where signal n came between two lives."""


class Child(Protocol):
    """Interface of a supervised process, which also handles the signals."""

    def live(self) -> ChildEnding:
        """Start the process, and wait for its end."""
        ...

    def pause(self, delay_s: float) -> int | None:
        """Wait, but not beyond the first signal that asks to stop; return that signal."""
        ...


def supervise(
    child: Child,
    limits: Limits,
    *,
    head: Callable[[], int | None] | None = None,
    tell: Callable[[ChildLife], None] = lambda life: None,
    clock: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
) -> Supervised:
    """Restart the child until it succeeds, is asked to stop, or makes no more progress.

    `head` gives the step of the run's newest checkpoint, or None where there is none. A life has
    made progress when that step is higher than ever before: so there are at most `max_failures`
    lives for each checkpoint, also for a run that is rolled back again and again. Without `head`,
    a long life counts (`Limits.progress_after_s`). `tell` is called after each life.
    """
    lives: list[ChildLife] = []
    step = None if head is None else head()
    highest, failures = -1 if step is None else step, 0
    while True:
        began = clock()
        ending = child.live()
        duration_s = clock() - began
        before, step = step, None if head is None else head()
        if head is None:
            has_progressed = duration_s >= limits.progress_after_s
        else:
            has_progressed = step is not None and step > highest
        highest = max(highest, -1 if step is None else step)
        failures = 0 if has_progressed or ending.returncode == 0 else failures + 1
        outcome = _outcome(ending, limits, failures)
        pause_s = limits.pause_s(failures, jitter())
        life = ChildLife(
            number=len(lives) + 1,
            ending=ending,
            duration_s=duration_s,
            from_step=before,
            to_step=step,
            has_progressed=has_progressed,
            failures=failures,
            restart_in_s=pause_s if outcome is None else None,
        )
        lives.append(life)
        tell(life)
        if outcome is not None:
            return Supervised(outcome=outcome, lives=tuple(lives), code=ending.code)
        asked = child.pause(pause_s)
        if asked is not None:
            code = _SHELL_SIGNAL + asked
            return Supervised(outcome=SupervisionOutcome.STOPPED, lives=tuple(lives), code=code)


def signal_name(number: int) -> str:
    """Return the name of a signal, as `SIGTERM` for 15; `signal 35` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _outcome(ending: ChildEnding, limits: Limits, failures: int) -> SupervisionOutcome | None:
    """Decide the outcome after a life; None: restart the child."""
    if ending.returncode == 0:
        return SupervisionOutcome.FINISHED
    if ending.returncode == limits.requeue_code:
        return SupervisionOutcome.REQUEUE
    if ending.asked is not None:
        return SupervisionOutcome.STOPPED
    return SupervisionOutcome.GAVE_UP if failures >= limits.max_failures else None
