"""torchrun, with ranks that are forks of it. Words: the number of ranks, a script, and its words.

It is the agent of torchrun itself. A fork need not import torch, which takes a rank seconds. Each
rank prints which process it is.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(script: str, words: list[str]) -> None:
    """Run a script in a rank, as Python would."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # they had the agent's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.write(1, f"rank {os.environ['RANK']} is {os.getpid()}\n".encode())  # all of it at once
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    os.setsid()
    num_ranks, name, *others = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run)(name, others)
