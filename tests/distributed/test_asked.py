"""R38: saves by the clock, by signals and by requests are made by all ranks at the same step."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.run import run_ranks
from holdfast.control.save_requests import put_save_request
from holdfast.control.stop import Stop
from holdfast.errors import RanksFailed
from holdfast.manager import CheckpointManager
from holdfast.policy.triggers import Trigger, When
from marks import full

STEP_S = 0.005
MAX_STEPS = 4000

Saved = list[int]


def train(
    root: Path,
    every: str | Trigger | None,
    at_step: Callable[[CheckpointManager, int], None],
    num_saves: int,
    rank: int,
) -> tuple[Saved, int, object]:
    """Train until so many saves or a signal; return their steps, the last step and exit code."""
    state = {"model": {"weight": torch.zeros(64)}}
    saved: Saved = []
    step, code = 0, None
    try:
        with Stop() as stop, CheckpointManager(root, state, every=every, stop=stop) as manager:
            manager.resume()
            while len(saved) < num_saves and stop.requested is None:
                step += 1
                assert step < MAX_STEPS, f"rank {rank} has saved {saved}"
                dist.all_reduce(state["model"]["weight"])
                time.sleep(STEP_S)
                at_step(manager, step)
                if manager.maybe_save(step) is not None:
                    saved.append(step)
            manager.wait()
    except SystemExit as ending:
        code = ending.code
    return saved, step, code


def nothing(manager: CheckpointManager, step: int) -> None:
    """No one asks for anything."""


def send(
    ranks: Collection[int], number: signal.Signals, manager: CheckpointManager, step: int
) -> None:
    """Send a signal to some ranks at step 20."""
    if step == 20 and dist.get_rank() in ranks:
        os.kill(os.getpid(), number)


def request(manager: CheckpointManager, step: int) -> None:
    """Ask for a save as `holdfast save` does, once the run is claimed."""
    if step == 20 and dist.get_rank() == 0:
        put_save_request(manager.store, "0" * 32, reason="a look", tags=["seen"])


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, *full(4)])
def test_all_ranks_save_by_the_leaders_clock(tmp_path: Path, num_ranks: int) -> None:
    results = run_ranks(num_ranks, partial(train, tmp_path, "1s", nothing, 2))
    assert results == [results[0]] * num_ranks
    with CheckpointManager(tmp_path, {"model": {}}) as manager:
        assert results[0] is not None
        assert [found.step for found in manager.list()][::-1] == results[0][0]
        assert {found.reason for found in manager.list()} == {"every 1s"}


def is_rank_0_at_30(now: object, metrics: object, event: object) -> bool:
    """True in the leader only."""
    return getattr(now, "step", 0) == 30 and dist.get_rank() == 0


@pytest.mark.full
def test_a_function_decides_in_the_leader(tmp_path: Path) -> None:
    results = run_ranks(2, partial(train, tmp_path, When(is_rank_0_at_30), nothing, 1))
    assert results == [results[0]] * 2


@pytest.mark.parametrize("ranks", [[1], *full([0], [0, 1])])
def test_a_signal_is_saved_and_ends_all_ranks_at_one_step(tmp_path: Path, ranks: list[int]) -> None:
    at_step = partial(send, ranks, signal.SIGTERM)
    results = run_ranks(2, partial(train, tmp_path, "100000step", at_step, 9))
    assert results == [results[0]] * 2
    assert results[0] is not None
    saved, step, code = results[0]
    assert (saved, code) == ([step], 75)


def test_a_request_is_answered_by_one_save_of_all(tmp_path: Path) -> None:
    results = run_ranks(2, partial(train, tmp_path, None, request, 1))
    assert results == [results[0]] * 2
    with CheckpointManager(tmp_path, {"model": {}}) as manager:
        (found,) = manager.list()
        assert found.reason == "request: a look"
        assert found.tags == ("seen",)


def lose_rank_1(root: Path, rank: int) -> str:
    """What the leader says when a scheduler ends it after another rank has died."""
    try:
        with Stop() as stop, CheckpointManager(root, {"model": {}}, stop=stop) as manager:
            manager.resume()
            manager.maybe_save(1)
            os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGTERM)
            for step in range(2, MAX_STEPS):
                time.sleep(STEP_S)
                manager.maybe_save(step)
    except RanksFailed as error:
        return str(error)
    return "no error"


@pytest.mark.full
def test_a_signal_after_the_death_of_a_rank_is_no_preemption(tmp_path: Path) -> None:
    """The leader saves nothing, and says soon why: with the default deadline of half an hour."""
    said, _ = run_ranks(2, partial(lose_rank_1, tmp_path), lost=[1])
    assert re.search(r"rank 1, .*: process \d+ on \S+ has ended", str(said))
    with CheckpointManager(tmp_path, {"model": {}}) as manager:
        assert not manager.list()
