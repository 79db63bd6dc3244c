"""Habits on several ranks: exact after a resume, and the same decision on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.run import run_ranks
from holdfast.data import Loader
from holdfast.train import SWA, Freeze, Limits
from marks import full
from train.parallel.test_ranks import GLOBAL_BATCH, Net, assert_same, fit, loss, make, samples


def bad_on_one_rank(rank: int) -> Any:
    calls = []

    def spoiled(model: nn.Module, batch: list[Tensor]) -> Any:
        calls.append(1)
        value, metrics = loss(model, batch)
        return (value * float("nan") if rank == 1 and len(calls) == 2 else value), metrics

    return spoiled


def _skip(strategy: str, rank: int) -> Any:
    trainer = make(
        None,
        2,
        every=None,
        strategy=strategy,
        skip_nan=1,
        loss=bad_on_one_rank(rank),
        validate=None,
        clip=None,
    )
    trainer.fit(3)
    weights = [
        getattr(v, "full_tensor", lambda v=v: v)() for v in trainer.model.state_dict().values()
    ]
    return trainer.state["nan-count"].num_skipped, all(bool(v.isfinite().all()) for v in weights)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_skip_a_step_that_is_bad_on_one(strategy: str) -> None:
    assert run_ranks(2, partial(_skip, strategy)) == [(1, True), (1, True)]


def options(strategy: str, limits: Limits) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "limits": limits,
        "skip_nan": 3,
        "swa": SWA(
            start="2step",
            every="1step",
            batch_norm=Loader(samples(24), batch_size=6, shuffle=False),
        ),
        "callbacks": [Freeze("first.*", until="5step"), Freeze("last.*", since="3step")],
    }


def _fit(root: Path, until: str, strategy: str, rank: int) -> Any:
    return fit(root, until, 2, options(strategy, Limits(train=3, sanity=1)), rank)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [*full("ddp"), "fsdp2"])
def test_a_resumed_run_with_all_of_them_is_the_same(strategy: str, tmp_path: Path) -> None:
    once = run_ranks(2, partial(_fit, tmp_path / "once", "7step", strategy))
    run_ranks(2, partial(_fit, tmp_path / "twice", "4step", strategy))
    twice = run_ranks(2, partial(_fit, tmp_path / "twice", "7step", strategy))
    assert_same(twice, once)
    assert_same(once[0]["weights"], once[1]["weights"])


def _frozen(rank: int) -> Any:
    trainer = make(None, 2, every=None, callbacks=[Freeze("first.*", until="3step")], validate=None)
    before = trainer.model.first.weight.detach().clone()  # type: ignore[union-attr]
    trainer.fit(3)
    is_same = torch.equal(trainer.model.first.weight, before)  # type: ignore[union-attr, arg-type]
    return is_same, torch.equal(trainer.model.last.weight, Net().last.weight)  # type: ignore[union-attr, arg-type]


def test_frozen_parameters_stay_on_all_ranks() -> None:
    assert run_ranks(2, _frozen) == [(True, False)] * 2
    assert GLOBAL_BATCH % 2 == 0
