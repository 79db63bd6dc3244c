"""Invariant 7, R1: a training on several ranks that is killed again and again is the same run.

On another number of ranks it goes on with the same samples in the same order.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import warm
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

HERE = Path(__file__).parent
NUM_STEPS = 200

Samples = Sequence[int]


@dataclass(frozen=True)
class Training:
    """A training of `recorded.py`, and where it is."""

    way: str
    strategy: str
    root: Path
    num_steps: int = NUM_STEPS

    @property
    def num_batches(self) -> int:
        """Batches of a step."""
        return 2 if self.way == "trainer" else 1

    def at(self, name: str) -> Training:
        """The same training in another folder beside this one."""
        return replace(self, root=self.root.with_name(name))


class Run:
    """Training that torchrun has started, whose ranks run already."""

    def __init__(
        self, num_ranks: int, training: Training, first_life: int = 0, max_restarts: int = 0
    ) -> None:
        self._training, self._num_ranks = training, num_ranks
        self.life = first_life - 1
        self.has_lost_agent = False
        words = (training.way, training.strategy, training.num_steps, first_life)
        launched = [HERE / "launched.py", num_ranks, max_restarts, HERE / "recorded.py"]
        self.process = warm.Popen(
            [*launched, training.root, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.said = ""
        self.ranks: list[int] = []
        assert self.begins(), self.said

    def begins(self) -> bool:
        """Wait until the ranks of the next life run; return whether there is one.

        Raises:
            AssertionError: a process did not end by its deadline, with the stacks of its threads.
        """
        assert self.process.stdout is not None
        self.life, self.ranks = self.life + 1, []
        while len(self.ranks) < self._num_ranks and (line := self.process.stdout.readline()):
            self.said += line
            if line.startswith("rank "):
                self.ranks.append(int(line.split()[-1]))
        assert "Current thread 0x" not in self.said, self.said
        return len(self.ranks) == self._num_ranks

    def ends(self) -> bool:
        """Wait for the end of the last life; return whether all ranks have ended well."""
        assert not self.begins(), f"ranks have failed that nobody killed: {self.said}"
        return self.process.wait(60) == 0

    def wait_for_step(self, number: int) -> None:
        """Wait until this life has begun so many steps, or the run has ended."""
        num_lines = number * self._training.num_batches
        while self.process.poll() is None and self._num_lines() < num_lines:
            time.sleep(0.01)

    def _num_lines(self) -> int:
        path = self._training.root / "samples" / f"{self.life}-0-{self._num_ranks}"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill(self, draw: random.Random) -> bool:
        """Kill one rank, those of a host, all, or the agent, with which all end.

        One time in four the disk of that host is emptied, too. Returns whether any was there.
        """
        hosts = sorted(self._training.root.glob("host-*"))
        number = draw.randrange(len(self.ranks))
        host = [number - number % 2, number - number % 2 + 1]
        victims = draw.choice([[number], host, [*range(len(self.ranks))], None])
        self.has_lost_agent = victims is None and self.process.poll() is None
        if self.has_lost_agent:
            self.process.kill()
            self.process.wait(60)
        is_there = self.has_lost_agent
        for rank in victims or ():
            with suppress(ProcessLookupError, IndexError):
                os.kill(self.ranks[rank], signal.SIGKILL)
                is_there = True
        if hosts and draw.random() < 0.25:
            shutil.rmtree(hosts[number // 2 % len(hosts)], ignore_errors=True)
        return is_there


@contextmanager
def running(
    num_ranks: int, training: Training, first_life: int = 0, max_restarts: int = 0
) -> Iterator[Run]:
    """A training, of which nothing is left after the block."""
    run = Run(num_ranks, training, first_life, max_restarts)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate(timeout=60)


def run_to_the_end(num_ranks: int, training: Training) -> None:
    with running(num_ranks, training) as run:
        assert run.ends(), run.said


def is_killed(run: Run, draw: random.Random) -> bool:
    """Kill at some moment, after which torchrun starts all ranks again; False if it does not.

    One time in five that is while it starts and resumes, else after some steps, of which every
    tenth is saved.
    """
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 1))
    else:
        run.wait_for_step(draw.randint(1, NUM_STEPS // 2))
        time.sleep(draw.uniform(0, 0.02))
    were_there = run.kill(draw)
    if not run.begins():
        return False
    assert were_there, f"ranks have failed that nobody killed: {run.said}"
    return True


def train_with_kills(
    num_ranks: int, training: Training, num_kills: int, draw: random.Random
) -> int:
    """Train to the end, with at most so many kills; return how many there were."""
    num_killed = life = 0
    while True:
        with running(num_ranks, training, life, max_restarts=num_kills) as run:
            while num_killed < num_kills and is_killed(run, draw):
                num_killed += 1
            if not run.has_lost_agent:
                assert run.ends(), run.said
                return num_killed
        num_killed, life = num_killed + 1, run.life + 1


def expect_kills_lose_nothing(num_ranks: int, num_kills: int, whole: Training) -> None:
    """A run that has come to its end between kills is compared, and another one is begun."""
    run_to_the_end(num_ranks, whole)
    draw = random.Random(num_kills)
    num_killed = num_runs = 0
    while num_killed < num_kills:
        killed, num_runs = whole.at(f"killed-{num_runs}"), num_runs + 1
        num_killed += train_with_kills(num_ranks, killed, num_kills - num_killed, draw)
        expect_same(killed, whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", ["manager", "trainer"])
@pytest.mark.parametrize(
    ("num_ranks", "num_kills"),
    [
        pytest.param(2, 3, marks=pytest.mark.full),
        pytest.param(2, 30, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(3, 20, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_kills_of_ranks_and_their_agent_lose_nothing(
    num_ranks: int, num_kills: int, way: str, strategy: str, tmp_path: Path
) -> None:
    expect_kills_lose_nothing(num_ranks, num_kills, Training(way, strategy, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("num_ranks", "num_kills"),
    [
        pytest.param(4, 4, marks=pytest.mark.full),
        pytest.param(8, 50, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_kills_and_lost_disks_of_hosts_lose_nothing(
    num_ranks: int, num_kills: int, tmp_path: Path
) -> None:
    """Two ranks a host; after some kills the disk of one host is empty, and its copies are used."""
    expect_kills_lose_nothing(num_ranks, num_kills, Training("hosts", "fsdp2", tmp_path / "whole"))


def expect_same(training: Training, other: Training) -> None:
    found, expected = (torch.load(one.root / "trained.pt") for one in (training, other))
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    order = lives(other)[0]
    for life, steps in lives(training).items():
        for step, samples in steps.items():
            assert samples == order[step], (life, step)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("way", ["manager", "trainer"])
@pytest.mark.parametrize(
    ("numbers", "num_steps"),
    [
        pytest.param([2, 3, 1], 200, marks=pytest.mark.full, id="few"),
        pytest.param(
            *([2, 4, 1, 3] * 5, 1000),
            marks=[pytest.mark.long, pytest.mark.timeout(1800)],
            id="many",
        ),
    ],
)
def test_on_other_numbers_of_ranks_a_killed_run_has_the_same_order_of_samples(
    numbers: Sequence[int], num_steps: int, way: str, strategy: str, tmp_path: Path
) -> None:
    """Each life but the last is killed, somewhere after its first checkpoint."""
    whole = Training(way, strategy, tmp_path / "whole", num_steps)
    run_to_the_end(2, whole)
    (order,) = lives(whole).values()
    assert [*order] == [*range(1, num_steps + 1)]
    killed, draw = whole.at("killed"), random.Random(len(numbers))
    for life, num_ranks in enumerate(numbers):
        with running(num_ranks, killed, life) as run:
            if life + 1 < len(numbers):
                wait_for_a_checkpoint(run, killed.root)
                time.sleep(draw.uniform(0, 0.05))
                assert run.kill(draw), f"life {life} has come to the end: {run.said}"
                assert not run.begins()
            else:
                assert run.ends(), run.said
    found = lives(killed)
    assert {step for steps in found.values() for step in steps} == {*order}
    for life, steps in found.items():
        assert life == 0 or min(steps) > 1, "it goes on from a checkpoint of fewer or more ranks"
        for step, samples in steps.items():
            assert samples == order[step], (life, step)


def wait_for_a_checkpoint(run: Run, root: Path) -> None:
    """Wait until the training has saved, or has ended."""
    before = newest_step(root)
    while run.process.poll() is None and newest_step(root) == before:
        time.sleep(0.01)


def newest_step(root: Path) -> int:
    """Step of the newest checkpoint; a manifest's file may also say that none came of a save."""
    return max((entry.step for entry in Catalog(LocalStore(root)).checkpoints()), default=0)


def lives(training: Training) -> dict[int, dict[int, Samples]]:
    """Samples of each step that all ranks have recorded, in their order, by life."""
    parts: dict[int, dict[int, dict[tuple[int, int], list[int]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    sizes = {}
    for path in (training.root / "samples").iterdir():
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
            if len(of_step) == sizes[life] * training.num_batches
        }
        for life, steps in sorted(parts.items())
    }
