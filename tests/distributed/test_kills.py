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

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAININGS: dict[str, list[str]] = {
    "manager fsdp2": ["fsdp2.py"],
    "trainer ddp": ["trainer_ranks.py", "ddp"],
    "trainer fsdp2": ["trainer_ranks.py", "fsdp2"],
}


def torchrun(num_ranks: int, training: list[str], root: Path) -> subprocess.Popen[str]:
    script, *options = training
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={num_ranks}",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            "--max-restarts=0",
            str(EXAMPLES / script),
            str(root),
            *options,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def trained(root: Path) -> list[torch.Tensor]:
    return torch.load(root / "trained.pt")  # type: ignore[no-any-return]


def run_to_the_end(num_ranks: int, training: list[str], root: Path) -> None:
    said, _ = (process := torchrun(num_ranks, training, root)).communicate(timeout=200)
    assert process.returncode == 0, said


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of the ranks that an agent has started."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


def is_killed(num_ranks: int, training: list[str], root: Path, draw: random.Random) -> bool:
    """Start the training, and kill one rank or all at some moment; False if it had ended."""
    process = torchrun(num_ranks, training, root)
    try:
        time.sleep(draw.uniform(2, 7))
        workers = workers_of(process)
        for worker in draw.choice([workers, workers[:1], workers[-1:]]):
            os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode != 0


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize(
    ("num_ranks", "num_kills"),
    [
        pytest.param(2, 3, marks=pytest.mark.full),
        pytest.param(2, 30, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(3, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_kills_of_one_or_all_ranks_lose_nothing(
    num_ranks: int, num_kills: int, training: list[str], tmp_path: Path
) -> None:
    """A run that has come to its end between kills is compared, and another one is begun."""
    run_to_the_end(num_ranks, training, tmp_path / "whole")
    draw = random.Random(num_kills)
    num_killed = num_runs = 0
    while num_killed < num_kills:
        root = tmp_path / f"killed-{num_runs}"
        if is_killed(num_ranks, training, root, draw):
            num_killed += 1
        else:
            expect_same(root, tmp_path / "whole")
            num_runs += 1
    run_to_the_end(num_ranks, training, tmp_path / f"killed-{num_runs}")
    expect_same(tmp_path / f"killed-{num_runs}", tmp_path / "whole")


def expect_same(root: Path, other: Path) -> None:
    found, expected = trained(root), trained(other)
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
