"""Claims about restarts: the counting, without processes; then real ones, real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.supervisor import (
    FORWARDED,
    REQUEUE_CODE,
    ChildEnding,
    ChildProcess,
    ChildSession,
    RestartLimits,
    Supervised,
    SupervisionOutcome,
    supervise,
)
from holdfast.errors import UsageError
from holdfast.train import REQUEUE_EXIT_CODE

CRASH = ChildEnding(returncode=1)
DONE = ChildEnding(returncode=0)


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """As they are for a job in the background of a script, or under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Zeros(random.Random):
    """Dice without jitter."""

    def random(self) -> float:
        return 0.0


class Script:
    """A child that ends as written, at steps as written; time passes only in its sessions."""

    def __init__(
        self,
        endings: Iterable[ChildEnding],
        steps: Iterable[int | None] = (),
        seconds: Iterable[float] = (),
        signals: Iterable[int | None] = (),
    ) -> None:
        self._endings = iter(endings)
        self._steps = iter(steps)
        self._seconds = iter(seconds)
        self._signals = iter(signals)
        self.pauses: list[float] = []

    def run_to_end(self) -> ChildEnding:
        return replace(next(self._endings), duration_s=next(self._seconds, 1.0))

    def pause(self, delay_s: float) -> int | None:
        self.pauses.append(delay_s)
        return next(self._signals, None)

    def head(self) -> int | None:
        return next(self._steps)

    def supervised(self, limits: RestartLimits, **options: object) -> Supervised:
        return supervise(self, limits, dice=Zeros(), **options)  # type: ignore[arg-type]


def test_a_success_is_the_end() -> None:
    result = Script([DONE]).supervised(RestartLimits())
    assert (result.outcome, result.code, len(result.sessions)) == (
        SupervisionOutcome.FINISHED,
        0,
        1,
    )
    assert result.sessions[0].restart_in_s is None


def test_it_gives_up_after_so_many_lives_without_progress() -> None:
    script = Script([CRASH] * 9, steps=[None, 10, 10, 10, 10])
    result = script.supervised(RestartLimits(max_failures=3), head=script.head)
    assert result.outcome is SupervisionOutcome.GAVE_UP
    assert [session.has_progressed for session in result.sessions] == [True, False, False, False]
    assert [session.failures for session in result.sessions] == [0, 1, 2, 3]
    assert [(session.from_step, session.to_step) for session in result.sessions[:2]] == [
        (None, 10),
        (10, 10),
    ]


def test_progress_resets_the_count_and_the_pause() -> None:
    script = Script([CRASH] * 6 + [DONE], steps=[0, 0, 0, 5, 5, 5, 9, 12])
    result = script.supervised(RestartLimits(max_failures=3), head=script.head)
    assert result.outcome is SupervisionOutcome.FINISHED
    assert [session.failures for session in result.sessions] == [1, 2, 0, 1, 2, 0, 0]
    assert script.pauses == [1.0, 2.0, 1.0, 1.0, 2.0, 1.0]


def test_the_same_steps_again_are_no_progress() -> None:
    """A run that falls back to 900, saves 1000 once more and crashes does not do so for ever."""
    script = Script([CRASH] * 9, steps=[1000, 900, 1000, 900, 1000])
    result = script.supervised(RestartLimits(max_failures=4), head=script.head)
    assert (result.outcome, len(result.sessions)) == (SupervisionOutcome.GAVE_UP, 4)


def test_a_root_that_cannot_be_seen_for_a_while_is_no_progress_and_no_loss() -> None:
    script = Script([CRASH] * 3 + [DONE], steps=[5, None, 5, 7, 7])
    result = script.supervised(RestartLimits(), head=script.head)
    assert [session.has_progressed for session in result.sessions] == [False, False, True, False]


def test_without_a_root_a_long_life_is_progress() -> None:
    script = Script([CRASH] * 9, seconds=[10, 600, 10, 599])
    result = script.supervised(RestartLimits(max_failures=2))
    assert [session.has_progressed for session in result.sessions] == [False, True, False, False]
    assert [session.ending.duration_s for session in result.sessions] == [10, 600, 10, 599]


@pytest.mark.parametrize(
    ("ending", "outcome", "code"),
    [
        (ChildEnding(returncode=75), SupervisionOutcome.REQUEUE, 75),
        (ChildEnding(returncode=75, asked=15), SupervisionOutcome.REQUEUE, 75),
        (ChildEnding(returncode=0, asked=15), SupervisionOutcome.FINISHED, 0),
        (ChildEnding(returncode=1, asked=15), SupervisionOutcome.STOPPED, 1),
        (ChildEnding(returncode=-15, asked=15), SupervisionOutcome.STOPPED, 143),
        (ChildEnding(returncode=-9, asked=2), SupervisionOutcome.STOPPED, 137),
    ],
)
def test_these_endings_are_not_followed_by_another_session(
    ending: ChildEnding, outcome: SupervisionOutcome, code: int
) -> None:
    result = Script([ending]).supervised(RestartLimits())
    assert (result.outcome, result.code, len(result.sessions)) == (outcome, code, 1)


def test_the_code_for_a_requeue_can_be_another() -> None:
    script = Script([ChildEnding(returncode=75), ChildEnding(returncode=85)])
    result = script.supervised(RestartLimits(requeue_code=85))
    assert (result.outcome, result.code, len(result.sessions)) == (
        SupervisionOutcome.REQUEUE,
        85,
        2,
    )


def test_the_trainer_asks_for_a_requeue_with_the_code_that_is_expected() -> None:
    assert REQUEUE_EXIT_CODE == REQUEUE_CODE


def test_a_signal_between_two_lives_is_the_end() -> None:
    result = Script([CRASH, CRASH], signals=[None, 15]).supervised(RestartLimits())
    assert (result.outcome, result.code, len(result.sessions)) == (
        SupervisionOutcome.STOPPED,
        143,
        2,
    )


def test_a_command_that_cannot_be_started_any_more_is_a_failure() -> None:
    script = Script([CRASH, ChildEnding(returncode=None, error="no memory")])
    result = script.supervised(RestartLimits(max_failures=2))
    assert (result.outcome, str(result.sessions[-1].ending)) == (
        SupervisionOutcome.GAVE_UP,
        "not started: no memory",
    )


def test_each_life_is_told_when_it_ends() -> None:
    told: list[ChildSession] = []
    result = Script([CRASH, DONE]).supervised(RestartLimits(), tell=told.append)
    assert tuple(told) == result.sessions


@given(
    failures=st.integers(0, 10**9),
    first_s=st.floats(0, 100),
    longest_s=st.floats(100, 1e6),
    jitter=st.floats(0, 1),
)
def test_a_pause_is_within_its_bounds(
    failures: int, first_s: float, longest_s: float, jitter: float
) -> None:
    limits = RestartLimits(backoff_s=first_s, backoff_max_s=longest_s)
    longest, shorter = limits.pause_s(failures, 0.0), limits.pause_s(failures, jitter)
    assert longest / 2 <= shorter <= longest <= longest_s
    assert longest <= limits.pause_s(failures + 1, 0.0)


@given(
    steps=st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=60),
    most=st.integers(1, 4),
)
def test_it_always_ends_after_so_many_lives_for_each_checkpoint(
    steps: list[int | None], most: int
) -> None:
    endless = iter([*steps, *[steps[-1]] * 100])
    script = Script([CRASH] * 200, steps=endless)
    result = script.supervised(RestartLimits(max_failures=most), head=script.head)
    assert result.outcome is SupervisionOutcome.GAVE_UP
    assert len(result.sessions) <= most * (len({step for step in steps if step is not None}) + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_failures": 0},
        {"requeue_code": 0},
        {"requeue_code": 256},
        {"backoff_s": -1.0},
        {"backoff_max_s": float("nan")},
        {"progress_after_s": float("inf")},
        {"backoff_s": 10.0, "backoff_max_s": 5.0},
    ],
)
def test_wrong_limits_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        RestartLimits(**options)  # type: ignore[arg-type]


# From here on: real processes.

PRELUDE = "import os, signal, subprocess, sys, time\n"


@pytest.fixture(params=[True, False], ids=["waitid", "no waitid"])
def has_waitid(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the call that Python has on macOS since 3.13 only."""
    if not request.param:
        monkeypatch.delattr(os, "waitid")


@pytest.fixture
def child() -> Iterator[Callable[..., ChildProcess]]:
    """Makes children that run a script; signals sent to this process are forwarded to them."""
    opened: list[ChildProcess] = []

    def make(script: str, *, grace_s: float = 60.0) -> ChildProcess:
        command = [sys.executable, "-S", "-c", PRELUDE + script]
        opened.append(ChildProcess(command, grace_s=grace_s).__enter__())
        return opened[-1]

    yield make
    for one in reversed(opened):
        one.__exit__()


def test_a_real_child_is_started_again_until_it_succeeds(tmp_path: object) -> None:
    script = f"import os\nos.chdir({str(tmp_path)!r})\n"
    script += "open(str(len(os.listdir())), 'x')\nos._exit(0 if len(os.listdir()) == 3 else 7)"
    with ChildProcess([sys.executable, "-S", "-c", script], grace_s=1) as process:
        result = supervise(process, RestartLimits(backoff_s=0))
    assert [session.ending.returncode for session in result.sessions] == [7, 7, 0]
    assert all(session.ending.duration_s > 0 for session in result.sessions)


@pytest.mark.parametrize("number", FORWARDED, ids=lambda number: number.name)
def test_a_signal_reaches_the_child_which_may_end_as_it_likes(
    child: Callable[..., ChildProcess], number: signal.Signals
) -> None:
    ending = child(
        f"signal.signal({int(number)}, lambda *_: os._exit(75))\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "while True: time.sleep(0.01)"
    ).run_to_end()
    assert ending == ChildEnding(returncode=75, asked=number)


@pytest.mark.usefixtures("has_waitid")
def test_a_child_that_does_not_listen_is_killed_when_its_grace_ends(
    child: Callable[..., ChildProcess],
) -> None:
    ending = child(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while True: time.sleep(0.01)",
        grace_s=0.0,
    ).run_to_end()
    assert ending == ChildEnding(returncode=-signal.SIGKILL, asked=signal.SIGTERM)


def test_the_first_signal_is_the_one_that_asked_and_later_ones_are_forwarded_too(
    child: Callable[..., ChildProcess],
) -> None:
    ending = child(
        "signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getppid(), signal.SIGTERM))\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "while True: time.sleep(0.01)"
    ).run_to_end()
    assert ending == ChildEnding(returncode=9, asked=signal.SIGUSR1)


def is_alive(pid: int) -> bool:
    """Whether it runs: not gone, and not only waiting to be reaped by whoever adopted it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("has_waitid")
def test_helpers_of_a_crashed_child_do_not_outlive_it(
    child: Callable[..., ChildProcess], tmp_path: object
) -> None:
    """A loader's worker may hold the accelerator that the next session needs."""
    file = f"{tmp_path}/pid"
    ending = child(
        "helper = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        f"open({file!r}, 'w').write(str(helper.pid))\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    ).run_to_end()
    assert ending == ChildEnding(returncode=-signal.SIGSEGV)
    with open(file, encoding="utf-8") as written:
        assert not is_alive(int(written.read()))


@pytest.mark.usefixtures("has_waitid")
def test_a_training_behind_a_shell_may_save_though_the_shell_dies_at_once(
    child: Callable[..., ChildProcess], tmp_path: object
) -> None:
    saving = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    while os.getppid() == shell: os.sched_yield()\n"
        f"    open({f'{tmp_path}/saved'!r}, 'x')\n"
        "    os._exit(0)\n"
        "shell = os.getppid()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "os.kill(int(sys.argv[1]), signal.SIGTERM)\n"
        "while True: time.sleep(0.01)\n"
    )
    ending = child(
        f"subprocess.run([sys.executable, '-S', '-c', {saving!r}, str(os.getppid())])"
    ).run_to_end()
    assert ending == ChildEnding(returncode=-signal.SIGTERM, asked=signal.SIGTERM)
    assert os.path.exists(f"{tmp_path}/saved")


def test_a_signal_ends_the_pause_between_two_sessions(child: Callable[..., ChildProcess]) -> None:
    process = child("")
    assert process.pause(0.0) is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert process.pause(3600.0) == signal.SIGUSR1
    assert process.pause(0.0) is None


def test_handlers_are_put_back_and_an_ignored_signal_stays_ignored() -> None:
    """`nohup holdfast run …` survives the end of its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = [signal.getsignal(number) for number in FORWARDED]
    try:
        with ChildProcess(["true"], grace_s=1):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert [signal.getsignal(number) for number in FORWARDED] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_that_is_not_there_is_a_wrong_call_at_first_and_a_failure_later(
    child: Callable[..., ChildProcess], tmp_path: object
) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ChildProcess([f"{tmp_path}/none"], grace_s=1).run_to_end()
    path = f"{tmp_path}/once"
    with open(path, "w", encoding="utf-8") as file:
        file.write('#!/bin/sh\nrm "$0"\nexit 4\n')
    os.chmod(path, 0o700)
    with ChildProcess([path], grace_s=1) as process:
        assert process.run_to_end() == ChildEnding(returncode=4)
        second = process.run_to_end()
    assert second.returncode is None
    assert "No such file" in second.error


def test_no_command_and_no_time_are_refused() -> None:
    with pytest.raises(UsageError, match="command"):
        ChildProcess([], grace_s=1)
    with pytest.raises(UsageError, match="grace_s"):
        ChildProcess(["true"], grace_s=-1)


def test_supervision_does_not_pay_for_torch() -> None:
    code = "import sys, holdfast.cli.supervisor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
