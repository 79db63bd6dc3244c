"""Stop: what a signal does at which moment, the end of a block, the grace, and forks."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.control import stop as module
from holdfast.control.stop import Interrupted, Stop
from holdfast.errors import UsageError

send = signal.raise_signal


@contextmanager
def leaving(error: type[BaseException]) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """A block that ends by this error, after however many statements."""
    with pytest.raises(error) as found:
        yield found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a minute after the one before."""
    minutes = itertools.count(step=60.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(minutes))


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of SIGUSR1 that was there before has got."""
    got: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, former)


def test_it_is_public_and_needs_no_torch() -> None:
    code = "import sys, holdfast; holdfast.Stop(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert holdfast.Stop is Stop


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_request_is_noted_and_ends_the_program_when_the_block_is_left(name: str) -> None:
    with leaving(SystemExit) as ended, Stop() as stop:
        assert stop.requested is None
        assert stop.exit_code == 0
        send(signal.Signals[name])
        assert stop.requested == name
        reached = True
    assert reached
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == stop.exit_code == 75
    assert stop.requested == name


def test_ctrl_c_becomes_a_keyboard_interrupt_when_the_block_is_left() -> None:
    with leaving(KeyboardInterrupt), Stop() as stop:
        send(signal.SIGINT)
        assert stop.requested == "SIGINT"
    assert stop.exit_code == 130


def test_the_first_request_counts() -> None:
    with leaving(SystemExit), Stop() as stop:
        send(signal.SIGUSR1)
        send(signal.SIGINT)
    assert stop.requested == "SIGUSR1"


def test_an_error_in_the_block_is_not_masked() -> None:
    """D46."""
    with leaving(ZeroDivisionError), Stop():
        send(signal.SIGTERM)
        raise ZeroDivisionError


def test_a_request_to_save_is_taken_once_and_ends_nothing() -> None:
    with Stop() as stop:
        assert not stop.take_save_request()
        send(signal.SIGUSR2)
        assert stop.take_save_request()
        assert not stop.take_save_request()
    assert stop.requested is None


@pytest.mark.parametrize("nth", range(1, 20))
def test_a_request_to_save_that_comes_while_one_is_taken_is_not_lost(nth: int) -> None:
    with Stop() as stop:
        with _signal_at_instruction(nth, signal.SIGUSR2) as has_come:
            taken = stop.take_save_request()
        if has_come():
            assert taken or stop.take_save_request()


def test_former_handlers_are_back_after_the_block(heard: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    with Stop():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    send(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_it_can_be_used_again() -> None:
    stop = Stop()
    with leaving(SystemExit), stop:
        send(signal.SIGTERM)
    with stop:
        assert stop.requested is None


def test_entered_again_inside_its_own_block_it_stays_active_until_the_outer_end() -> None:
    stop = Stop()
    with leaving(SystemExit), stop:
        with stop:
            pass
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_stop_beside_it_is_refused() -> None:
    with Stop() as stop, pytest.raises(UsageError, match="another Stop is active"):
        Stop().__enter__()
    with stop:  # and nothing was broken by it
        pass


def test_ignored_signals_stay_ignored() -> None:
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Stop() as stop:
            send(signal.SIGUSR1)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_the_second_signal_of_a_kind_goes_to_the_former_handler(
    heard: list[int], later: None
) -> None:
    with leaving(SystemExit), Stop():
        send(signal.SIGUSR1)
        assert heard == []
        send(signal.SIGTERM)
        assert heard == []
        send(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


def test_the_second_ctrl_c_ends_at_once(later: None) -> None:
    with leaving(KeyboardInterrupt), Stop():
        send(signal.SIGINT)
        send(signal.SIGINT)
        pytest.fail("it went on")


def test_a_signal_that_is_sent_twice_at_one_moment_counts_once(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` does, which addresses its command and then the group of it."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 5.0)
    with leaving(SystemExit), Stop():
        send(signal.SIGUSR1)
        send(signal.SIGUSR1)
    assert heard == []


def test_a_wait_is_left_at_once() -> None:
    with leaving(SystemExit), Stop() as stop:
        with leaving(Interrupted), stop.interruptible():
            send(signal.SIGTERM)
            pytest.fail("it went on")
        assert stop.requested == "SIGTERM"


def test_a_wait_is_not_begun_after_a_request() -> None:
    with leaving(SystemExit), Stop() as stop:
        send(signal.SIGTERM)
        with leaving(Interrupted), stop.interruptible():
            pytest.fail("it was begun")


def test_outside_of_a_wait_nothing_is_raised() -> None:
    with leaving(SystemExit), Stop() as stop:
        with stop.interruptible():
            pass
        send(signal.SIGTERM)
        reached = True
    assert reached


def test_a_request_to_save_interrupts_no_wait() -> None:
    with Stop() as stop, stop.interruptible():
        send(signal.SIGUSR2)
    assert stop.take_save_request()


def test_a_wait_without_the_block_is_as_if_there_was_no_stop() -> None:
    with Stop().interruptible():
        pass


@pytest.mark.parametrize("at", range(60))
def test_at_whatever_instruction_a_signal_comes_it_is_raised_around_the_wait_only(
    at: int,
) -> None:
    """The signal comes before each instruction in turn: entering, inside, leaving, after."""
    seen: list[str] = []
    with leaving(SystemExit), Stop() as stop, _signal_at_instruction(at) as has_come:
        seen += _waited(stop)
        if not has_come():
            send(signal.SIGTERM)
    assert seen in (["before", "interrupted", "after"], ["before", "wait", "after"]) or (
        seen == ["before", "wait", "interrupted", "after"]
    )


def _waited(stop: Stop) -> list[str]:
    seen = ["before"]
    try:
        with stop.interruptible():
            seen.append("wait")
    except Interrupted:
        seen.append("interrupted")
    seen.append("after")
    return seen


class _signal_at_instruction:
    """Sends a signal before the n-th instruction of the functions called in the block."""

    _FUNCTIONS = ("_waited", "__enter__", "__exit__", "interruptible", "take_save_request")

    def __init__(self, at: int, number: signal.Signals = signal.SIGTERM) -> None:
        self._left = at
        self._number = number

    def __enter__(self) -> Callable[[], bool]:
        self._former = sys.gettrace()
        sys.settrace(self._trace)
        return lambda: self._left < 0

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._former)

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name not in self._FUNCTIONS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == -1:
                os.kill(os.getpid(), self._number)
        return self._trace


def test_in_another_thread_it_does_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    found: list[Any] = []

    def use() -> None:
        for _ in range(2):
            with stop, stop.interruptible():
                found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    assert found == [before, before]
    assert len([r for r in caplog.records if "only the main thread" in r.message]) == 1


def test_a_wait_of_another_thread_is_not_interrupted_nor_the_main_thread_for_it() -> None:
    inside, leave = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def wait(stop: Stop) -> None:
        try:
            with stop.interruptible():
                inside.set()
                leave.wait(60)
        except BaseException as error:
            failures.append(error)

    with leaving(SystemExit), Stop() as stop:
        thread = threading.Thread(target=wait, args=(stop,))
        thread.start()
        inside.wait(60)
        send(signal.SIGTERM)
        leave.set()
        thread.join(60)
    assert failures == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"signals": ("SIGKILL",)}, "'SIGKILL' is not accepted"),
        ({"signals": ("SIGSTOP", "SIGTERM")}, "'SIGSTOP' is not accepted"),
        ({"signals": ("TERM",)}, "'TERM' is not accepted"),
        ({"signals": (15,)}, "15 is not accepted"),
        ({"signals": "SIGTERM"}, "a string is not accepted"),
        ({"signals": ("SIGTERM", "SIGTERM")}, "named twice"),
        ({"save_signals": ("SIG_DFL",)}, "save_signals.*'SIG_DFL' is not accepted"),
        ({"signals": ("SIGUSR2",)}, "both name SIGUSR2"),
        ({"grace": "5step"}, "must be a time by the clock"),
        ({"grace": 5}, "must be text with a unit"),
        ({"grace": "5s", "signals": ()}, "no signals that ask to stop"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Stop(**options)


def test_a_forked_child_has_the_former_handlers_and_no_request() -> None:
    """So that `terminate` ends it, and what it gets is not taken for the parent's."""
    with Stop(grace="1h") as stop:
        child = os.fork()
        if child == 0:
            is_former = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            with Stop():  # one of its own is fine
                pass
            if is_former:
                send(signal.SIGTERM)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert stop.requested is None


def test_a_watch_leaves_the_wakeup_pipe_of_others_in_use() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.set_wakeup_fd(writer)
    try:
        with Stop(grace="1h"):
            send(signal.SIGUSR2)
            waiting = select.poll()  # descriptors may have high numbers here
            waiting.register(reader, select.POLLIN)
            assert waiting.poll(60_000)
            assert os.read(reader, 10) == bytes([signal.SIGUSR2])
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        signal.set_wakeup_fd(former)
        os.close(reader)
        os.close(writer)


HANG = """
import ctypes, os, resource, sys, time
from holdfast import Stop

if sys.argv[1] == "has many files open":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

def promote(timeout_s):
    print("promoted", timeout_s <= 0.2, flush=True)
    return "runs/x: the newest checkpoint is step-5"

with Stop(grace="1s") as stop:
    stop.register(promote)
    stop.register(lambda timeout_s: 1 / 0)
    how = sys.argv[1]
    print("ready", flush=True)
    if how == "calls C":
        while True:
            ctypes.CDLL(None).poll(None, 0, 60_000)
    elif how != "ends":
        while True:
            try:
                with stop.interruptible():
                    time.sleep(60)
            except BaseException:
                pass
    else:
        while not stop.requested:
            time.sleep(0.01)
"""


def _started(script: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("how", ["calls C", "swallows", "has many files open"])
def test_a_run_that_hangs_is_ended_when_the_grace_is_nearly_over(
    how: str, number: signal.Signals, status: int
) -> None:
    """Also where no Python handler could run, because the main thread is in a C call."""
    process = _started(HANG, how)
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert said == "promoted True\n"
    assert "the grace of 1 s is nearly over" in errors
    assert "newest checkpoint is step-5; the newest checkpoint is not known: ZeroDiv" in errors
    assert errors.count("\n") == 1


def test_a_run_that_ends_by_itself_is_not_ended_by_force() -> None:
    process = _started(HANG, "ends")
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, said, errors) == (75, "", "")


def test_promotes_can_be_taken_back() -> None:
    stop, called = Stop(), Path("unused")
    promote = lambda timeout_s: str(called)  # noqa: E731
    stop.register(promote)
    stop.forget(promote)
    stop.forget(promote)
    assert stop._promotes == []


def test_a_stop_that_ranks_share_is_seen_when_they_agree_on_it() -> None:
    """Another rank may have no signal yet; this one goes on until all stop."""
    stop = Stop()
    stop.share()
    with leaving(SystemExit), stop:
        send(signal.SIGTERM)
        assert (stop.requested, stop.received) == (None, "SIGTERM")
        stop.agree("SIGUSR1")
        assert (stop.requested, stop.received) == ("SIGUSR1", "SIGTERM")


def test_a_stop_that_ranks_did_not_agree_on_ends_the_program_all_the_same() -> None:
    stop = Stop()
    stop.share()
    with leaving(SystemExit), stop:
        send(signal.SIGTERM)


def test_a_stop_is_that_of_one_process_again_after_a_manager_of_several_ranks() -> None:
    stop, promote = Stop(), lambda timeout_s: ""
    stop.register(promote)
    stop.share()
    with leaving(SystemExit), stop:
        stop.forget(promote)
        send(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
