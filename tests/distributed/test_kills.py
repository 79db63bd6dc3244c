"""Invariant 7, R1: a training on several ranks that is killed again and again is the same run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def torchrun(num_ranks: int, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={num_ranks}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            "--max-restarts=0",
            str(EXAMPLE),
            str(root),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def trained(root: Path) -> list[torch.Tensor]:
    return torch.load(root / "trained.pt")  # type: ignore[no-any-return]


def run_to_the_end(num_ranks: int, root: Path) -> None:
    said, _ = (process := torchrun(num_ranks, root)).communicate(timeout=200)
    assert process.returncode == 0, said


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that an agent has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def kill_once(num_ranks: int, root: Path, draw: random.Random) -> bool:
    """Start the training, and kill one rank or all of them at some moment; whether it was alive."""
    process = torchrun(num_ranks, root)
    try:
        time.sleep(draw.uniform(2, 9))
        workers = workers_of(process)
        killed = draw.choice([workers, workers[:1], workers[-1:]])
        for worker in killed:
            os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return bool(killed) and process.returncode != 0


@pytest.mark.parametrize(
    ("num_ranks", "num_kills"),
    [
        pytest.param(2, 6, marks=pytest.mark.full),
        pytest.param(2, 30, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(3, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_kills_of_one_or_all_ranks_lose_nothing(
    num_ranks: int, num_kills: int, tmp_path: Path
) -> None:
    run_to_the_end(num_ranks, tmp_path / "whole")
    draw = random.Random(num_kills)
    killed = sum(kill_once(num_ranks, tmp_path / "killed", draw) for _ in range(num_kills))
    assert killed
    run_to_the_end(num_ranks, tmp_path / "killed")
    pairs = zip(trained(tmp_path / "whole"), trained(tmp_path / "killed"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
