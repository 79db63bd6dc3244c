"""torchrun, with ranks that are forks of it.

Words: the number of ranks, the largest number of restarts, a script, and its words.

It is the agent of torchrun itself, which starts, watches and ends ranks as it does any program. But
a fork need not import torch, which takes a rank seconds. Each rank prints which process it is. A
process that has not ended by its deadline prints the stacks of its threads, and ends.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import _prctl_pr_set_pdeathsig

DEADLINE_S = 180
_FORKS = multiprocessing.get_context("fork")


class Rank:
    """Process of a rank, with those parts of a `subprocess.Popen` that the agent uses."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        self._process = _FORKS.Process(target=run, args=(args, env))
        self._process.start()
        signal.alarm(DEADLINE_S + 10)  # so that the agent can tell of a rank that has not ended
        assert self._process.pid is not None
        self.pid = self._process.pid
        os.setpgid(self.pid, self.pid)  # the agent ends the group of a rank

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)


def run(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a script in a rank, as Python would."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # nothing is left of an agent that is killed
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # they had the agent's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(DEADLINE_S)
    os.environ.update(env)
    torch.set_num_threads(1)
    os.write(1, f"rank {os.environ['RANK']} is {os.getpid()}\n".encode())  # all of it at once
    sys.argv = [*args]
    runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    faulthandler.register(signal.SIGALRM, chain=True)
    num_ranks, num_restarts, script, *words = sys.argv[1:]
    if int(num_restarts):
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/ranks.md
    subprocess_handler.Popen = Rank  # type: ignore[misc, assignment]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(num_restarts),
    )
    elastic_launch(config, script)(*words)
