"""A resume that cannot be exact says so."""

from __future__ import annotations

import logging

import pytest
import torch

from holdfast.launched import Ranks
from holdfast.train.parallel.group import Group
from holdfast.train.parallel.strategies import DDP, parallel_of


@pytest.mark.parametrize(
    ("world_size", "strategy", "rank", "is_told"),
    [
        (2, DDP(), 0, False),
        (3, DDP(), 0, True),
        (3, DDP(), 1, False),
        (3, DDP(find_unused_parameters=True), 0, False),
    ],
    ids=["two ranks", "three ranks", "a follower", "first buckets are kept"],
)
def test_ddp_on_three_ranks_or_more_tells_what_makes_a_resume_exact(
    world_size: int, strategy: DDP, rank: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parallel = parallel_of(strategy, Group(ranks, torch.device("cpu")), None)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        parallel.resumed()
    assert ("DDP(find_unused_parameters=True)" in caplog.text) is is_told
