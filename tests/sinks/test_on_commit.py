"""`on_commit`: commands and functions after each commit, in order, which no save waits for."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm
from distributed.run import run_ranks
from holdfast import Checkpoint, CheckpointManager, Checkpoints, MemoryStore
from holdfast.control.reporter import CommandFailed, run_command
from holdfast.errors import UsageError
from holdfast.format.manifest import manifest_digest
from holdfast.root.catalog import Catalog
from holdfast.sinks import OnCommit
from holdfast.store import open_store

WRITE = "import json, sys; print(json.dumps(sys.argv[2:]), file=open(sys.argv[1], 'a'))"
"""A program that adds its arguments, as a line, to the file that is the first."""


def writing(file: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", WRITE, str(file), *arguments]


def lines(file: Path) -> list[list[str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def train(root: Path | MemoryStore, on_commit: Any, steps: Sequence[int] = (1, 2)) -> None:
    state = {"a": {"b": 0}}
    with CheckpointManager(root, state, on_commit=on_commit) as manager:
        for step in steps:
            state["a"]["b"] = step
            manager.save(step, wait=True)


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_a_command_is_run_after_each_commit_in_order_with_what_it_asks_for(tmp_path: Path) -> None:
    """The close waits for it; of a step that is saved again unchanged nothing is run."""
    root, file = tmp_path / "a run", tmp_path / "file"
    train(root, writing(file, "{folder}", "{step}", "{root}", "{path}", "{digest}"), [1, 2, 2])
    entries = sorted(Catalog(open_store(root)).checkpoints(), key=lambda entry: entry.order)
    assert lines(file) == [
        [
            entry.folder,
            str(entry.step),
            str(root),
            f"{root}/{entry.folder}",
            manifest_digest(entry.manifest),
        ]
        for entry in entries
    ]
    for entry in entries:
        last_line = (root / entry.folder / "manifest.json").read_text().splitlines()[-1]
        assert manifest_digest(entry.manifest) in last_line


def test_no_shell_sees_a_command(tmp_path: Path) -> None:
    """Whatever is in the name of the root, and in the command."""
    root, file = tmp_path / "run $(touch injected); `touch injected` '\" *", tmp_path / "file"
    text = f"{shlex.join(writing(file))} {{path}} '$(touch injected)' ';' step={{step}} '{{}}'"
    train(root, text, [5])
    (found,) = lines(file)
    assert found[0].startswith(str(root))
    assert found[1:] == ["$(touch injected)", ";", "step=5", "{}"]
    assert [path.name for path in tmp_path.iterdir() if path.name == "injected"] == []
    assert not Path("injected").exists()


def test_a_shell_is_used_where_the_command_is_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    script = f'echo "$1" >> {shlex.quote(str(file))}'
    train(tmp_path / "a 'run'", ["sh", "-c", script, "name", "{path}"], [5])
    assert file.read_text().startswith(str(tmp_path / "a 'run'"))


def test_a_function_gets_the_checkpoint(tmp_path: Path) -> None:
    found: list[Checkpoint] = []
    train(tmp_path / "run", found.append)
    assert [checkpoint.step for checkpoint in found] == [1, 2]
    assert Path(found[0].path, "manifest.json").exists()


def test_a_failure_is_a_warning_and_the_next_command_is_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    code = f"import sys; {WRITE}; print('out of quota'); sys.exit(len(sys.argv[2]))"
    train(tmp_path / "run", [sys.executable, "-c", code, str(file), "{step}"], [1, 2])
    assert lines(file) == [["1"], ["2"]]
    assert "status 1; its output is in this process's output" in warnings(caplog)
    assert "out of quota" in capfd.readouterr().out


def test_a_function_that_raises_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails(checkpoint: Checkpoint) -> None:
        raise KeyError("mine")

    train(MemoryStore(), fails)
    train(MemoryStore(), lambda checkpoint: sys.exit("end"))
    assert "SystemExit: end" in warnings(caplog)
    assert "fails: failed for committed step-00000001" in warnings(caplog)
    assert "KeyError: 'mine'" in warnings(caplog)


def test_a_command_that_hangs_is_killed_with_what_it_has_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At its time limit; no save waits for it."""
    pid = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {shlex.quote(str(pid))}; wait"
    train(tmp_path / "run", OnCommit(["sh", "-c", script], timeout_s=1.0), [1])
    assert "killed after 1 s" in warnings(caplog)
    with suppress(ProcessLookupError):  # it has ended, and was waited for
        child = os.pidfd_open(int(pid.read_text()))
        assert select.select([child], [], [], 60)[0], "it ends soon after its signal"
        os.close(child)


def test_a_signal_that_ended_a_command_is_named() -> None:
    with pytest.raises(CommandFailed, match="ended by SIGTERM"):
        run_command(["sh", "-c", "kill -TERM $$"], 60)


def test_a_process_that_a_command_leaves_running_is_not_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_command(["sh", "-c", "sleep 1000 & echo $!"], 60)
    psutil.Process(int(capfd.readouterr().out)).kill()


def test_a_save_commits_while_the_command_of_the_one_before_is_running(tmp_path: Path) -> None:
    may_end, seen = threading.Event(), []

    def waits(checkpoint: Checkpoint) -> None:
        assert may_end.wait(60)
        seen.append(checkpoint.step)

    state = {"a": {"b": 0}}
    with CheckpointManager(tmp_path / "run", state, on_commit=waits) as manager:
        for step in (1, 2, 3):
            state["a"]["b"] = step
            manager.save(step, wait=True)
        assert [checkpoint.step for checkpoint in manager.list()] == [3, 2, 1]
        assert seen == []
        may_end.set()
    assert seen == [1, 2, 3]


def leads(root: Path, rank: int) -> list[int]:
    found: list[int] = []
    train(root, lambda checkpoint: found.append(checkpoint.step), [1])
    return found


@pytest.mark.full
def test_of_several_ranks_the_leader_runs_it(tmp_path: Path) -> None:
    assert run_ranks(2, partial(leads, tmp_path / "run")) == [[1], []]


@pytest.mark.full
def test_a_program_that_ends_without_a_close_runs_it_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, holdfast\n"
        "root, *command = sys.argv[1:]\n"
        "manager = holdfast.CheckpointManager(root, {'a': {'b': 1}}, on_commit=command)\n"
        "manager.save(7)\n"
    )
    file = tmp_path / "file"
    process = warm.Popen([script, tmp_path / "run", *writing(file, "{step}")])
    assert process.wait(60) == 0
    assert lines(file) == [["7"]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "must be a command and its arguments"),
        ("true 'x", "No closing quotation"),
        ("true {foldr}", "on_commit='true {foldr}': {foldr} is none of {folder}, {step}"),
        ("no-such-command {folder}", "there is no command 'no-such-command'"),
        (["true", 3], "must be a command and its arguments, as text"),
        ("sh -c 'ls {path}'", 'write "$1" in the script'),
        ("bash -o pipefail -euc 'ls {path}'", 'write "$1" in the script'),
        ("env bash -lc 'ls {root}'", 'write "$1" in the script'),
        ("touch step-{step:06d}", "{step:06d}: a placeholder is a name alone"),
        ("touch {folder!r}", "{folder!r}: a placeholder is a name alone"),
        (3, "on_commit=3: must be OnCommit or str"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(wrong: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpoints("run", on_commit=wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "command",
    ["sh -c 'echo ${step:-1} {}' {path}", "bash script.sh -subject {path}", "echo {path} -c"],
)
def test_braces_and_options_of_another_language_are_let_be(command: str) -> None:
    assert OnCommit(command).arguments == tuple(shlex.split(command))


def test_a_secret_of_a_command_is_in_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    train(MemoryStore(), "false https://me:secret@hook/x?token=abc {step}")
    assert "https://***@hook/x" in warnings(caplog)
    assert not {"secret", "abc"} & {*re.findall(r"\w+", warnings(caplog))}


def test_a_time_limit_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        OnCommit("true", timeout_s=0)
