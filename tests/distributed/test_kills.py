"""Invariant 7, R1: a training on several ranks that is killed again and again is the same run.

On another number of ranks it goes on with the same samples in the same order.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import warm

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
RECORDED = HERE / "recorded.py"
TRAININGS: Mapping[str, Sequence[object]] = {
    "manager ddp": [RECORDED, "manager", "ddp", 60, 0],
    "manager fsdp2": [EXAMPLES / "fsdp2.py"],
    "trainer ddp": [EXAMPLES / "trainer_ranks.py", "ddp"],
    "trainer fsdp2": [EXAMPLES / "trainer_ranks.py", "fsdp2"],
}
DEADLINE_S = 200.0

Training = Sequence[object]
Samples = Sequence[int]


class Run:
    """Training that torchrun has started, whose ranks run already."""

    def __init__(self, num_ranks: int, training: Training, root: Path) -> None:
        script, *options = training
        pipe = subprocess.PIPE
        self.process = warm.Popen(
            [HERE / "launched.py", num_ranks, script, root, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=pipe,
            stderr=subprocess.STDOUT,
        )
        self.said = ""
        self.ranks: list[int] = []
        assert self.process.stdout is not None
        while len(self.ranks) < num_ranks:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line
            if line.startswith("rank "):
                self.ranks.append(int(line.split()[-1]))
        self.began_s = time.monotonic()

    def end(self) -> bool:
        """Wait for the end; return whether all ranks have ended well."""
        self.said += self.process.communicate(timeout=DEADLINE_S)[0]
        return self.process.returncode == 0

    def kill(self, draw: random.Random) -> None:
        """Kill one rank or all."""
        for rank in draw.choice([self.ranks, self.ranks[:1], self.ranks[-1:]]):
            with suppress(ProcessLookupError):  # it has ended
                os.kill(rank, signal.SIGKILL)


@contextmanager
def running(num_ranks: int, training: Training, root: Path) -> Iterator[Run]:
    """A training, of which nothing is left after the block."""
    run = Run(num_ranks, training, root)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait(60)


def run_to_the_end(num_ranks: int, training: Training, root: Path) -> float:
    """Train; return how many seconds the ranks have run."""
    with running(num_ranks, training, root) as run:
        assert run.end(), run.said
        return time.monotonic() - run.began_s


def is_killed(
    num_ranks: int, training: Training, root: Path, draw: random.Random, whole_s: float
) -> bool:
    """Start the training, and kill one rank or all at some moment; False if it had ended."""
    with running(num_ranks, training, root) as run:
        time.sleep(draw.uniform(0, whole_s))
        run.kill(draw)
        return not run.end()


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
    num_ranks: int, num_kills: int, training: Training, tmp_path: Path
) -> None:
    """A run that has come to its end between kills is compared, and another one is begun."""
    whole_s = run_to_the_end(num_ranks, training, tmp_path / "whole")
    draw = random.Random(num_kills)
    num_killed = num_runs = 0
    while num_killed < num_kills:
        root = tmp_path / f"killed-{num_runs}"
        if is_killed(num_ranks, training, root, draw, whole_s):
            num_killed += 1
        else:
            expect_same(root, tmp_path / "whole")
            num_runs += 1
    run_to_the_end(num_ranks, training, tmp_path / f"killed-{num_runs}")
    expect_same(tmp_path / f"killed-{num_runs}", tmp_path / "whole")


def expect_same(root: Path, other: Path) -> None:
    found, expected = (torch.load(path / "trained.pt") for path in (root, other))
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", ["manager", "trainer"])
@pytest.mark.parametrize(
    ("numbers", "num_steps"),
    [
        pytest.param([2, 3, 1], 60, marks=pytest.mark.full, id="few"),
        pytest.param(
            *([2, 4, 1, 3] * 5, 400), marks=[pytest.mark.long, pytest.mark.timeout(1800)], id="many"
        ),
    ],
)
def test_on_other_numbers_of_ranks_a_killed_run_has_the_same_order_of_samples(
    numbers: Sequence[int], num_steps: int, way: str, strategy: str, tmp_path: Path
) -> None:
    """Each life but the last is killed, somewhere after its first checkpoint."""
    whole, root = tmp_path / "whole", tmp_path / "killed"
    run_to_the_end(2, [RECORDED, way, strategy, num_steps, 0], whole)
    num_batches = 2 if way == "trainer" else 1
    (order,) = lives(whole, num_batches).values()
    assert [*order] == [*range(1, num_steps + 1)]
    draw = random.Random(len(numbers))
    for life, num_ranks in enumerate(numbers):
        with running(num_ranks, [RECORDED, way, strategy, num_steps, life], root) as run:
            if life + 1 < len(numbers):
                wait_for_a_checkpoint(run, root)
                time.sleep(draw.uniform(0, 0.5))
                run.kill(draw)
                run.end()
            else:
                assert run.end(), run.said
    found = lives(root, num_batches)
    assert {step for steps in found.values() for step in steps} == {*order}
    for life, steps in found.items():
        assert life == 0 or min(steps) > 1, "it goes on from a checkpoint of fewer or more ranks"
        for step, samples in steps.items():
            assert samples == order[step], (life, step)


def wait_for_a_checkpoint(run: Run, root: Path) -> None:
    """Wait until the training has saved, or has ended."""
    pattern = "step-*/manifest.json"
    before, end = {*root.glob(pattern)}, time.monotonic() + DEADLINE_S
    while run.process.poll() is None and not {*root.glob(pattern)} - before:
        assert time.monotonic() < end
        time.sleep(0.02)


def lives(root: Path, num_batches: int) -> dict[int, dict[int, Samples]]:
    """Samples of each step that all ranks have recorded, in their order, by life."""
    parts: dict[int, dict[int, dict[tuple[int, int], list[int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    sizes = {}
    for path in (root / "samples").iterdir():
        life, rank, sizes[life] = map(int, path.name.split("-"))
        for line in path.read_text().splitlines():
            step, *samples = map(int, line.split())
            of_step = parts[life][step]
            batch = sum(other == rank for _, other in of_step)
            of_step[batch, rank] = samples
    return {
        life: {
            step: [sample for place in sorted(of_step) for sample in of_step[place]]
            for step, of_step in sorted(steps.items())
            if len(of_step) == sizes[life] * num_batches
        }
        for life, steps in sorted(parts.items())
    }
