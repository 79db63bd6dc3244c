"""Runs of a test as forks of its process, which has imported the framework; killed anywhere."""

from __future__ import annotations

import inspect
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from holdfast.manager import CheckpointManager

Say = Callable[..., None]
"""Notes a moment of the run at which it may be killed; takes and ignores any arguments."""
Job = Callable[[Path, Say], dict[str, Any]]
"""Trains in a root, from wherever that stands, and returns what is compared."""


def finish(job: Job, root: Path, *, kill_at: int = 0, at_calls: bool = False) -> int:
    """Run a job in a fork, which is killed at its moment number `kill_at`; return the exit code.

    With `at_calls` each call of a function is a moment, from the resume on; otherwise the job says
    which are. A job that ends by itself leaves its result in `root.result`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, of which none matters here
        pid = os.fork()
    if pid == 0:
        _become(job, root, kill_at, at_calls)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _become(job: Job, root: Path, kill_at: int, at_calls: bool) -> NoReturn:
    moments = itertools.count(1)

    def say(*_: Any, **__: Any) -> None:
        if next(moments) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        warnings.simplefilter("ignore")
        if at_calls:
            _say_calls(say)
        found = job(root, say)
        sys.setprofile(None)
        torch.save({"moments": next(moments), "found": found}, root.with_suffix(".result"))
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _say_calls(say: Say) -> None:
    """Note each call of a Python function in the main thread, once a manager resumes."""
    begin, has_begun = inspect.unwrap(CheckpointManager.resume).__code__, False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun
        if event == "call":
            has_begun = has_begun or frame.f_code is begin
            if has_begun:
                say()

    sys.setprofile(note)


def result(root: Path) -> dict[str, Any]:
    """What the job that ended in this root returned."""
    found: dict[str, Any] = torch.load(root.with_suffix(".result"), weights_only=False)
    return found


def assert_kills_change_nothing(
    job: Job, folder: Path, *, kills: int, seed: int, at_calls: bool = False
) -> None:
    """Kill a run that often, at random moments, and compare its end with that of one in one go."""
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    assert finish(job, undisturbed, at_calls=at_calls) == 0
    expected, draw = result(undisturbed), random.Random(seed)
    longest = max(min(expected["moments"] // 2, 3 * expected["moments"] // (2 * kills)), 2)
    for number in range(kills):
        code = finish(job, killed, kill_at=draw.randrange(1, longest), at_calls=at_calls)
        assert code == -signal.SIGKILL, f"life {number + 1} ended with {code}"
    assert finish(job, killed) == 0
    assert_equal(result(killed)["found"], expected["found"])


def assert_equal(found: Any, expected: Any, at: str = "result") -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_equal(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{at}: {found} is not {expected}"
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{at}.{number}")
    else:
        assert found == expected, f"{at}: {found!r} is not {expected!r}"


def run_page(page: Path) -> dict[str, Any]:
    """Run the snippets of a page, one after the other; returns the names that they define."""
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        exec(compile(code, str(page), "exec"), names)
    return names


def run_example(path: Path) -> list[str]:
    """Run an example as a user runs it; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
