"""Workers of a loader do not outlive the training that they fetch for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from children import Child, environment
from marks import full

SCRIPT = Path(__file__).parent / "worker_child.py"
DEADLINE_S = 120


def has_ended(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ends within that time."""
    ends = select.poll()  # `select` takes no number beyond 1023
    ends.register(pidfd, select.POLLIN)
    return bool(ends.poll(1000 * timeout_s))


@pytest.mark.parametrize("context", ["fork", *full("forkserver", "spawn")])
def test_a_worker_in_the_middle_of_a_fetch_ends_with_a_training_that_is_killed(
    context: str,
) -> None:
    """SIGKILL; also where a fork server made the worker, which then ends, too."""
    with Child(SCRIPT, context) as child:
        pids = [int(word) for word in child.says().split()]
        watched = {pid: os.pidfd_open(pid) for pid in pids}
        child.kill()
        try:
            for pid, ended in watched.items():
                assert has_ended(ended, DEADLINE_S), f"{pid} of {pids} lives on"
        finally:
            for ended in watched.values():
                if not has_ended(ended, 0):
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                os.close(ended)


@pytest.mark.full
@pytest.mark.parametrize("context", ["fork", *full("forkserver")])
def test_a_training_ends_though_it_left_iterators_in_the_middle(context: str) -> None:
    """multiprocessing waits at the exit for each worker, and asks it to end once."""
    script = Path(__file__).parent / "unfinished.py"
    ended = subprocess.run(
        [sys.executable, script, context],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")
