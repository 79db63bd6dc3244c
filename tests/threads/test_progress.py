"""Claims about progress bars of loads and saves."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from children import environment
from holdfast.threads.progress import progress, shown_by
from runs import new_run


def test_a_load_and_a_save_say_how_far_they_are(tmp_path: Path) -> None:
    shown: list[tuple[str, str, int, int]] = []
    with shown_by(lambda *call: shown.append(call)), new_run().manager(tmp_path) as manager:
        saved = manager.save(1).wait()
        assert shown[-1] == ("save of step 1", "save of step 1: done", 1, 1)
        shown.clear()
        manager.load()
    assert {name for name, *_ in shown} == {f"reading {saved.path}"}
    assert [(done, total) for _, _, done, total in shown][-1] == (shown[0][3], shown[0][3])
    before = len(shown)
    with new_run().manager(tmp_path) as manager:
        manager.resume()
    assert len(shown) == before


@pytest.mark.full
def test_without_a_terminal_nothing_is_shown(tmp_path: Path) -> None:
    script = (
        "import sys, holdfast\n"
        "sys.path.insert(0, 'tests')\n"
        "from runs import new_run\n"
        "with holdfast.progress(), new_run().manager(sys.argv[1], sinks=()) as manager:\n"
        "    manager.save(1).wait()\n"
        "    manager.load()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    quiet = subprocess.run(command, stderr=subprocess.PIPE, env=environment(), timeout=120)
    assert (quiet.returncode, quiet.stderr) == (0, b"")
    ours, theirs = pty.openpty()
    command[-1] = str(tmp_path / "other")
    terminal = {**environment(), "TERM": "xterm", "COLUMNS": "200"}
    child = subprocess.Popen(command, stderr=theirs, env=terminal)
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:
        pass  # the other end was closed
    assert child.wait(timeout=120) == 0
    os.close(ours)
    assert b"save of step 1" in said


def test_an_error_ends_the_bars(tmp_path: Path) -> None:
    try:
        with progress():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with new_run().manager(tmp_path) as manager:
        assert manager.save(1).wait().step == 1
