"""Claims about `holdfast run`, with real trainings that really die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result

from holdfast.cli.app import load_command
from holdfast.cli.supervisor import FORWARDED, RestartLimits
from holdfast.policy.clock import parse
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

Command = Callable[..., Result]
DOOMED = Path(__file__).with_name("doomed.py")
NO_PAUSE = ("--backoff", "0")


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """As they are for a job in the background of a script, or under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def doomed(root: Path, last: int, die_after: int, how: str) -> tuple[object, ...]:
    return "--", sys.executable, DOOMED, root, last, die_after, how


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.out.splitlines()]


def head(root: Path) -> int:
    entry = Catalog(LocalStore(root)).head()
    assert entry is not None
    return entry.step


@pytest.mark.full
def test_a_training_that_dies_again_and_again_gets_to_its_end(
    holdfast: Command, tmp_path: Path
) -> None:
    """D36: where it stands is what is committed, not which file is found first."""
    root = tmp_path / "run"
    options = ("--root", root, *NO_PAUSE, "--max-failures", 1, "--json")
    result = holdfast("run", *options, *doomed(root, 5, 2, "kill"))
    assert result.code == 0
    *sessions, last = lines(result)
    assert [(session["from_step"], session["to_step"]) for session in sessions] == [
        (None, 2),
        (2, 4),
        (4, 5),
    ]
    assert [session["signal"] for session in sessions] == ["SIGKILL", "SIGKILL", None]
    assert [session["restart_in_s"] for session in sessions] == [0.0, 0.0, None]
    assert last["summary"]["sessions"] == [
        {name: value for name, value in session.items() if name != "holdfast"}
        for session in sessions
    ]
    assert {session["holdfast"] for session in (*sessions, last)} == {1}
    assert head(root) == 5


@pytest.mark.full
def test_it_gives_up_with_a_table_when_there_is_no_progress(
    holdfast: Command, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    once = ("--root", root, *NO_PAUSE, "--max-failures", 2)
    assert holdfast("run", *once, *doomed(root, 1, 9, "kill")).code == 0
    result = holdfast("run", *once, *doomed(root, 5, 0, "kill"))
    assert (result.code, result.out) == (4, "")
    told = result.err.splitlines()
    assert "session 1 ended: SIGKILL" in told[0]
    assert "step 1 to 1, no progress (1 in a row); next in 0.0 s" in told[0]
    assert told[1].split("  ")[0] == "session"
    assert [line.split()[:2] + line.split()[3:] for line in told[2:4]] == [
        ["1", "SIGKILL", "1", "1", "no"],
        ["2", "SIGKILL", "1", "1", "no"],
    ]
    assert told[4] == "holdfast: gave up: 2 in a row made no progress; the last ended with SIGKILL"
    assert len(told) == 5


def test_a_training_that_is_asked_to_stop_saves_and_its_code_is_passed_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    command = [sys.executable, "-m", "holdfast.cli", "run", "--json", "--root", root]
    done = subprocess.run(
        [str(item) for item in (*command, *doomed(root, 9, 3, "ask"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, "")
    session, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert (session["exit_status"], session["asked"], session["to_step"]) == (75, "SIGTERM", 4)
    assert (last["summary"]["outcome"], last["summary"]["code"]) == ("requeue", 75)
    assert head(root) == 4


def test_json_has_what_the_text_says(holdfast: Command) -> None:
    result = holdfast("run", "--json", *NO_PAUSE, "--max-failures", 1, "sh", "-c", "exit 9")
    session, last = lines(result)
    assert (result.code, last["summary"]["outcome"], session["exit_status"]) == (4, "gave-up", 9)


def test_a_success_is_silent_and_the_streams_are_those_of_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "run", "sh", "-c", "cat; echo b --json >&2"],
        input="a",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "a", "b --json\n")


def test_without_a_root_a_long_life_is_progress(holdfast: Command, tmp_path: Path) -> None:
    script = 'echo >> "$0"; [ "$(wc -l < "$0")" -ge 4 ]'
    options = ("--max-failures", 1, "--progress-after", "0")
    result = holdfast("run", *NO_PAUSE, *options, "sh", "-c", script, tmp_path / "count")
    assert result.code == 0
    assert result.err.endswith("holdfast: finished in session 4\n")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 75", 75),
        ("kill -TERM $PPID; exec sleep 600", 143),
        ("kill -INT $PPID; exec sleep 600", 130),
        ("trap 'exit 9' USR1; kill -USR1 $PPID; while :; do :; done", 9),
    ],
)
def test_the_exit_code_says_how_it_ended(holdfast: Command, script: str, code: int) -> None:
    assert holdfast("run", *NO_PAUSE, "sh", "-c", script).code == code


def test_a_root_that_cannot_be_read_is_told_and_is_no_progress(
    holdfast: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    options = ("--root", tmp_path / "file", *NO_PAUSE, "--max-failures", 1)
    result = holdfast("run", *options, "false")
    assert result.code == 4
    assert "cannot read the head of the run" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "--max-failures", "0", "true"],
        ["run", "--backoff", "5", "true"],
        ["run", "--backoff", "5step", "true"],
        ["run", "--backoff", "2min", "true"],
        ["run", "--root", "x@latest", "true"],
        ["run", "--root", "memory://x", "true"],
        ["run", "--root", "x", "--progress-after", "1s", "true"],
        ["run", "--requeue-code", "0", "true"],
        ["run", "./nothing-here"],
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    holdfast: Command, arguments: list[str]
) -> None:
    assert holdfast(*arguments).code == 2


def test_the_defaults_on_the_command_line_are_those_of_the_supervisor() -> None:
    defaults: dict[Any, Any] = {item.name: item.default for item in load_command("run").params}
    limits = RestartLimits()
    assert defaults["requeue_code"] == limits.requeue_code
    assert defaults["max_failures"] == limits.max_failures
    assert parse(defaults["backoff"]).value == limits.backoff_s
    assert parse(defaults["backoff_max"]).value == limits.backoff_max_s


def test_nothing_of_it_pays_for_torch(tmp_path: Path) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv = ['holdfast', 'run', '--root', 'nowhere', 'true']\n"
        "from holdfast.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
    assert list(tmp_path.iterdir()) == []
