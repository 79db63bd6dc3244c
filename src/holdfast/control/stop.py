"""Signals that ask training to stop or to save: recorded at once, handled between steps.

Owns signal handlers and the deadline after the first signal. Knows nothing of states and
checkpoints: the manager and the loop poll for signals. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from types import FrameType, TracebackType
from typing import Any, NoReturn

from holdfast.errors import UsageError
from holdfast.policy.clock import Time, Unit, parse
from holdfast.system import at_fork, signals_of
from holdfast.threads.workers import Workers

logger = logging.getLogger("holdfast")

REQUEUE_EXIT_CODE = 75
"""Exit code that asks the scheduler to run the job again: EX_TEMPFAIL of sysexits.h."""
INTERRUPT_EXIT_CODE = 130
"""Exit code that shells report for a program ended by SIGINT."""

Promote = Callable[[float], str]
"""Callback that waits, at most the given seconds, until the last staged save is committed, and
returns text that names the newest durable checkpoint. Called on a separate thread."""

_RESERVE_PART, _RESERVE_MAX_S = 0.2, 30.0
_SAME_REQUEST_S = 0.5
_STOP_SIGNALS = tuple(one.name for one in signals_of("SIGTERM", "SIGINT", "SIGUSR1"))
_SAVE_SIGNALS = tuple(one.name for one in signals_of("SIGUSR2"))
_REFUSED = frozenset({"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGCHLD"})

_active: Stop | None = None


class Interrupted(BaseException):
    """Raised by a stop inside `Stop.interruptible()`; always caught by the waiting code."""


class Stop:
    """Records signals that ask to stop, so that training ends between steps and can save.

        with Stop(grace="4min") as stop, CheckpointManager(…, stop=stop) as manager:
            for batch in batches:
                …
                manager.maybe_save(step)
                if stop.requested:
                    break
            manager.save(step)  # the signal may have come after maybe_save

    Leaving the block after a request raises what ends the program as its scheduler expects:
    `SystemExit(75)`, or `KeyboardInterrupt` after SIGINT. So what closes and saves belongs inside.

    The second signal of a kind does what it did before the block; the second Ctrl-C ends at once.
    Sent again within half a second it counts as the same one, because some senders address both a
    process and its group. Forked children have the former handlers. Signals that were ignored, as
    under `nohup`, stay ignored. One Stop is active at a time; entering it again inside its own
    block is fine. Outside the main thread it does nothing, and logs that once.
    """

    def __init__(
        self,
        *,
        signals: Iterable[str] = _STOP_SIGNALS,
        save_signals: Iterable[str] = _SAVE_SIGNALS,
        grace: str | Time | None = None,
    ) -> None:
        """Check the arguments. Signal handlers are installed only by `with`.

        Args:
            signals: ask to save and stop.
            save_signals: ask to save and continue.
            grace: how long after the first signal the program is killed, such as "4min". When it
                has not ended by itself shortly before (a fifth of the time, at most 30 s), the
                save under way is waited for and the process ended. None: it may take its time.

        Raises:
            UsageError: a signal is unknown, named twice, or cannot be handled; `grace` is no time
                by the clock.
        """
        self._stops = _parse_signals("signals", signals)
        self._saves = _parse_signals("save_signals", save_signals)
        both = [signal.Signals(number).name for number in self._stops if number in self._saves]
        if both:
            raise UsageError(f"signals and save_signals both name {', '.join(both)}")
        self._grace_s = _parse_grace(grace)
        if grace is not None and not self._stops:
            raise UsageError(f"grace={str(grace)!r}: there are no signals that ask to stop")
        self._former: dict[int, Any] = {}
        self._promotes: list[Promote] = []
        self._depth = 0
        self._pid = self._thread = -1
        self._watch: _GraceWatch | None = None
        self._has_said = self._is_shared = False
        self._reset_signals()

    def _reset_signals(self) -> None:
        self._received: int | None = None
        self._requested: int | None = None
        self._first_s: dict[int, float] = {}
        self._is_save_asked = self._is_armed = False

    @property
    def requested(self) -> str | None:
        """Name of the first signal that asked to stop, such as "SIGTERM"; also after the block."""
        return None if self._requested is None else signal.Signals(self._requested).name

    @property
    def exit_code(self) -> int:
        """Exit code for the program: 75 (run it again), 130 after SIGINT, 0 without a request."""
        return 0 if self._requested is None else _exit_code(self._requested)

    @property
    def is_entered(self) -> bool:
        """Whether this Stop was entered; True outside of the main thread, where it cannot be."""
        is_main = threading.current_thread() is threading.main_thread()
        return self._depth > 0 or not is_main

    @property
    def is_asked(self) -> bool:
        """Whether a signal has asked to save or to stop, and was not handled yet."""
        return self._is_save_asked or self._received is not None

    @property
    def received(self) -> str | None:
        """Name of the first signal that asked this process to stop, whatever other ranks know."""
        return None if self._received is None else signal.Signals(self._received).name

    @property
    def free_s(self) -> float:
        """Seconds from now until `grace` ends the process; `inf` without a signal or `grace`."""
        if self._watch is None or not self._first_s:
            return math.inf
        return max(0.0, min(self._first_s.values()) + self._watch.free_s - time.monotonic())

    def share(self) -> None:
        """Leave it to `agree` when a signal is seen in `requested`, as all ranks stop together."""
        self._is_shared = True

    def agree(self, name: str) -> None:
        """Record a signal that some rank has received, at the same call on all ranks."""
        if self._requested is None:
            self._requested = signal.Signals[name].value

    def take_save_request(self) -> bool:
        """Return whether one of `save_signals` has come since the last call."""
        # Cleared only if set: else a signal between the read and the clearing would be lost.
        if not self._is_save_asked:
            return False
        self._is_save_asked = False
        return True

    def interruptible(self) -> _Interruptible:
        """Return a context in which a stop raises `Interrupted`, also one requested before.

        For waits that can be given up: the result of the block is to be discarded, even if its
        last line was reached. Not to be nested. Never raises in other threads.
        """
        return _Interruptible(self)

    def register(self, promote: Promote) -> None:
        """Register a callback that is called when the grace period is nearly over."""
        self._promotes.append(promote)

    def forget(self, promote: Promote) -> None:
        """Unregister a callback that `register` got; what only this process received counts now."""
        if promote in self._promotes:
            self._promotes.remove(promote)
        self._is_shared = False
        if self._requested is None:
            self._requested = self._received

    def __enter__(self) -> Stop:
        """Install the signal handlers."""
        if threading.current_thread() is not threading.main_thread():
            if not self._has_said:
                logger.warning(
                    "Stop: only the main thread receives signals, and this is another thread"
                )
            self._has_said = True
            if self._depth == 0:
                self._reset_signals()
            return self
        if _active not in (None, self):
            raise UsageError("another Stop is active: use that one, as in Trainer(stop=stop)")
        if self._depth == 0:
            self._reset_signals()
            self._install()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the former handlers, and exit the program if a stop was requested."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._uninstall()
        if self._requested is None:
            self._requested = self._received  # the ranks did not come to agree on it
        if error is None and self._requested is not None:
            if self._requested == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(REQUEUE_EXIT_CODE)

    def _install(self) -> None:
        global _active
        self._pid, self._thread = os.getpid(), threading.get_ident()
        for number in (*self._stops, *self._saves):
            former = signal.getsignal(number)
            if former is signal.SIG_IGN:
                continue
            if former is None:
                logger.warning("Stop: %s is handled by other code", signal.Signals(number).name)
                continue
            self._former[number] = former
        _active = self
        if self._grace_s is not None:
            self._watch = _GraceWatch(self._stops, self._grace_s, self._promotes)
        for number in self._former:
            signal.signal(number, self._handle)

    def _uninstall(self) -> None:
        global _active
        self._restore_handlers()
        _active = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop_thread()

    def _restore_handlers(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, between any two instructions: takes no lock."""
        if os.getpid() != self._pid:
            self._pass_on(number, frame)
        elif number in self._saves:
            self._is_save_asked = True
        elif number in self._first_s:
            if time.monotonic() - self._first_s[number] > _SAME_REQUEST_S:
                self._pass_on(number, frame)
        else:
            self._first_s[number] = time.monotonic()
            if self._received is None:
                self._received = number
            if self._is_shared:
                return
            if self._requested is None:
                self._requested = number
            if self._is_armed:
                # Cleared before the raise: `__exit__` of the block may not be reached then.
                self._is_armed = False
                raise Interrupted

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        former = self._former.get(number, signal.SIG_DFL)
        if callable(former):
            former(number, frame)
        else:
            signal.signal(number, former)
            signal.raise_signal(number)


class _Interruptible:
    """Context of `Stop.interruptible`; not a generator, whose frame could be left suspended."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        stop = self._stop
        if stop._depth == 0 or threading.get_ident() != stop._thread:
            return
        stop._is_armed = True
        if stop._requested is not None:
            stop._is_armed = False
            raise Interrupted

    def __exit__(self, *exception: object) -> None:
        if threading.get_ident() == self._stop._thread:
            self._stop._is_armed = False


class _GraceWatch:
    """Thread that ends the process when the grace period is nearly over.

    It reads signals from the pipe into which the C level writes their numbers, because Python's
    own handlers wait until the main thread leaves the call in which it may hang.
    """

    def __init__(self, stops: Iterable[int], grace_s: float, promotes: list[Promote]) -> None:
        self._stops = frozenset(stops)
        self._reserve_s = min(grace_s * _RESERVE_PART, _RESERVE_MAX_S)
        self.free_s = grace_s - self._reserve_s
        self._grace_s = grace_s
        self._promotes = promotes
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._former = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._workers = Workers(1, "holdfast-stop")
        self._watching = self._workers.submit(self._watch_grace_period)

    def stop_thread(self) -> None:
        """Stop the thread, as the run has ended, and wait for it."""
        signal.set_wakeup_fd(self._former)
        os.write(self._writer, b"\0")
        os.close(self._writer)
        with contextlib.suppress(FutureTimeout):  # it then ends the process itself
            self._watching.result(timeout=self._reserve_s)
        self._workers.close_pool()

    def _watch_grace_period(self) -> None:
        try:
            number = self._first_stop()
            if number is not None and not self._ends_within(self.free_s):
                self._end_by_force(number)
        finally:
            os.close(self._reader)

    def _first_stop(self) -> int | None:
        """Wait for the first signal that asks to stop; None if the run ends without one."""
        while True:
            numbers = self._read_signals()
            if 0 in numbers:
                return None
            for number in numbers:
                if number in self._stops:
                    return number

    def _ends_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the run to end by itself; return whether it did."""
        until = time.monotonic() + timeout_s
        waiting = select.poll()  # `select` itself takes no descriptor above 1023
        waiting.register(self._reader, select.POLLIN)
        while waiting.poll(1000 * max(0.0, until - time.monotonic())):
            if 0 in self._read_signals():
                return True
        return False

    def _read_signals(self) -> bytes:
        numbers = os.read(self._reader, 512)
        if self._former != -1:
            with contextlib.suppress(OSError):  # the former pipe may be full or closed
                os.write(self._former, numbers.replace(b"\0", b""))
        return numbers

    def _end_by_force(self, number: int) -> None:
        began = time.monotonic()
        until = began + 0.9 * self._reserve_s
        outcomes = [_promoted(promote, until - time.monotonic()) for promote in [*self._promotes]]
        # A run that has just saved by itself can also release its claim in this time.
        if not self._ends_within(began + 0.5 * self._reserve_s - time.monotonic()):
            _exit(number, self._grace_s, outcomes)


def _promoted(promote: Promote, timeout_s: float) -> str:
    try:
        return promote(max(0.0, timeout_s))
    except Exception as error:  # noqa: BLE001 - there is nobody else left to tell
        return f"the newest checkpoint is not known: {error!r}"


def _exit(number: int, grace_s: float, outcomes: list[str]) -> NoReturn:
    message = (
        f"holdfast: {signal.Signals(number).name}: the grace of {grace_s:g} s is nearly over and "
        f"the program has not ended; {'; '.join(outcomes) or 'nothing is known of checkpoints'}\n"
    )
    # Not through sys.stderr: the main thread may hang while it holds its lock.
    with contextlib.suppress(OSError):
        os.write(2, message.encode())
    os._exit(_exit_code(number))


def _exit_code(number: int) -> int:
    return INTERRUPT_EXIT_CODE if number == signal.SIGINT else REQUEUE_EXIT_CODE


def _parse_signals(what: str, names: Iterable[str]) -> tuple[int, ...]:
    given = [names] if isinstance(names, str) else list(names)
    wrong = [
        f"{name!r}"
        for name in given
        if not isinstance(name, str)
        or name in _REFUSED
        or not name.startswith("SIG")
        or name not in signal.Signals.__members__
    ]
    if wrong or isinstance(names, str):
        raise UsageError(
            f"{what}={names!r}: {', '.join(wrong) or 'a string'} is not accepted; pass names "
            "of signals that can be handled, such as ('SIGTERM', 'SIGINT')"
        )
    numbers = [int(signal.Signals[name]) for name in given]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{what}={tuple(given)}: one is named twice")
    return tuple(numbers)


def _parse_grace(grace: str | Time | None) -> float | None:
    if grace is None:
        return None
    duration = parse(grace, what="grace")
    if duration.unit is not Unit.SECOND:
        raise UsageError(f"grace={str(grace)!r}: must be a time by the clock, such as '4min'")
    return float(duration.value)


def _restore_in_child() -> None:
    """Restore the former signal handlers in a forked child."""
    global _active
    stop, _active = _active, None
    if stop is not None:
        if stop._watch is not None:
            signal.set_wakeup_fd(-1)  # or the parent would read the child's signals as its own
        stop._restore_handlers()
        stop._depth = 0
        stop._watch = None


at_fork(after_in_child=_restore_in_child)
