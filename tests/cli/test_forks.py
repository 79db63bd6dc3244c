"""Forks that share a computation. Each test runs a program of one thread, as commands are."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.children import Child, environment

from holdfast.system import IS_LINUX

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="elsewhere nothing is forked")

_START = """
import os, sys, time
from holdfast.errors import CorruptData, HoldfastError
from holdfast.cli import stats
stats.num_cores = lambda: 3

def squares(start, stop):
    for number in range(start, stop):
        yield number * number

def damaged(_):
    yield "first"
    raise CorruptData("a block is damaged")

def killed(_):
    yield "first"
    os.kill(os.getpid(), 9)

def endless(_):
    while True:
        yield os.getpid()
"""


def said(body: str) -> str:
    """Run a program that may use the functions above; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _START + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_task_is_done_and_its_items_are_in_order() -> None:
    body = """
    with stats.Forks() as some:
        found = {0: [], 1: []}
        for task, item in some.run(squares, [(0, 4), (4, 3000)]):
            found[task].append(item)
    print(len(some), found[0], found[1] == [n * n for n in range(4, 3000)])
    """
    assert said(body) == "3 [0, 1, 4, 9] True\n"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("damaged", "CorruptData: a block is damaged"),
        ("killed", "OutOfMemory: a worker process ended with code -9"),
    ],
)
def test_an_error_in_a_fork_is_raised_in_the_parent(function: str, message: str) -> None:
    body = f"""
    try:
        with stats.Forks() as some:
            for task, item in some.run({function}, [(1,)]):
                print(task, item)
    except HoldfastError as error:
        print(f"{{type(error).__name__}}: {{error}}")
    """
    assert said(body).startswith(f"0 first\n{message}")


def test_no_fork_outlives_the_with_whether_it_had_work_or_not() -> None:
    body = """
    with stats.Forks() as some:
        pids = [process.pid for process in some._processes]
        print(next(some.run(endless, [(1,)]))[1] == pids[0])
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            print("ended")
    """
    assert said(body) == "True\nended\nended\nended\n"


def test_nothing_is_forked_beside_another_thread_which_may_hold_a_lock() -> None:
    body = """
    import threading
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    with stats.Forks() as some:
        print(len(some))
    event.set()
    """
    assert said(body) == "0\n"


def test_forks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        _START
        + textwrap.dedent("""
        some = stats.Forks()
        print(*(process.pid for process in some._processes), flush=True)
        for _ in some.run(endless, [(1,)]):
            time.sleep(60)
        """)
    )
    with Child(script) as child:
        pids = [int(pid) for pid in child.says().split()]
        assert len(pids) == 3
        ends = [os.pidfd_open(pid) for pid in pids]
        child.kill()
    try:
        for end in ends:
            assert select.select([end], [], [], 30)[0], "it still runs"
    finally:
        for end in ends:
            os.close(end)
