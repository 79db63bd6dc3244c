"""Processes that are forked warm behave as those that Python starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm

ENDS = [
    "print('a')",
    "import sys; print('b', file=sys.stderr); sys.exit(3)",
    "import atexit; atexit.register(print, 'at exit'); raise ValueError('no')",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import sys; print(sys.argv[1:], input() if len(sys.argv) > 9 else '', __name__)",
    "import threading; threading.Timer(0.01, print, ['late']).start()",
]


@pytest.mark.parametrize("code", ENDS)
def test_it_prints_and_ends_as_python_does(code: str) -> None:
    plain = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True)
    done = warm.run(["-c", code, "x"])
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_it_is_a_child_that_has_torch_in_the_folder_and_environment_that_were_asked_for(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print('torch' in sys.modules, os.getcwd(), os.getppid())\n")
    done = warm.run([script], cwd=tmp_path, env={"A": "1"})
    assert done.stdout.split() == ["True", str(tmp_path), str(os.getpid())], done.stderr
    done = warm.run(["-c", "import os; print(*os.environ)"], env={"A": "1"})
    assert done.stdout.split()[0] == "A"


def test_it_is_spoken_to_and_killed() -> None:
    code = "print(input(), flush=True); input()"
    process = warm.Popen(["-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("x\n")
        process.stdin.flush()
        assert process.stdout.readline() == "x\n"
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
