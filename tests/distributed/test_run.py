"""The helper that runs ranks as processes: results, tracebacks, deadlines, losses."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.run import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item() + dist.get_world_size()


def fail_in(failing: int, rank: int) -> int:
    if rank == failing:
        raise ValueError("planted")
    return wait_forever(rank)


def wait_forever(rank: int) -> int:
    threading.Event().wait()
    return rank


def be_lost(how: signal.Signals, rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), how)
    return rank


def num_frozen(rank: int) -> int:
    return gc.get_freeze_count()


@pytest.mark.skipif(Path.cwd() != ROOT, reason="the server of forks imports `tests.frozen` here")
def test_no_collection_in_a_rank_visits_what_the_server_of_forks_has_imported() -> None:
    assert all(num and num > 100_000 for num in run_ranks(2, num_frozen))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_are_processes_of_a_group_and_their_results_come_in_order(num_ranks: int) -> None:
    expected = sum(range(num_ranks)) + num_ranks
    assert run_ranks(num_ranks, sum_of_ranks) == [expected] * num_ranks


def test_a_rank_that_raises_is_named_with_its_traceback_at_once() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised\n(.|\n)*in fail_in\n(.|\n)*planted"):
        run_ranks(2, partial(fail_in, 1))


def test_ranks_that_do_not_end_are_named_at_the_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] are not done"):
        run_ranks(2, wait_forever, timeout_s=2.0)


def test_a_rank_that_ends_without_a_result_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended: -9"):
        run_ranks(2, partial(be_lost, signal.SIGKILL))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_a_rank_that_is_lost_on_purpose(how: signal.Signals) -> None:
    assert run_ranks(2, partial(be_lost, how), lost=[1]) == [0, None]
