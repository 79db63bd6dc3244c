"""`holdfast train`: fit the Trainer that a function of a script makes, with restarts.

The training is a process of its own, which `holdfast.cli.fitting` runs, so that a crash ends that
process only. Under a launcher such as torchrun, which restarts ranks itself, it runs in this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.cli.run import Restarts, run_command
from holdfast.errors import UsageError
from holdfast.launched import present_ranks
from holdfast.policy.clock import parse_goal, parse_limit_s


def train_command(
    script: str,
    *,
    until: str,
    sets: Sequence[str],
    max_time: str | None,
    restarts: Restarts,
    as_json: bool,
) -> int:
    """Train, and start again after a crash, as `holdfast run` does; return the exit code."""
    parse_goal(until)
    if max_time is not None:
        parse_limit_s(max_time)
    path = script.partition(":")[0]
    if path.endswith(".py") and not os.path.isfile(path):
        raise UsageError(f"{script}: there is no such file")
    arguments = [script, until, max_time or "", *sets]
    if present_ranks().world_size > 1:
        from holdfast.cli.fitting import fit

        return fit(arguments)
    return run_command(
        [sys.executable, "-m", "holdfast.cli.fitting", *arguments],
        restarts,
        as_json=as_json,
        is_final_usage=True,
    )
