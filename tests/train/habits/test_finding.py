"""The finder of a learning rate finds it, and changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.run import run_ranks
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import SWA, Callback, Perplexity, StepOutput, Training
from train.small import make, mean_square


class Never(Callback):
    def batch_start(self, training: Training, batch: Any) -> None:
        raise AssertionError("called in a trial")


def everything(trainer: Any) -> Any:
    return (
        dict(leaf_digests(trainer.state)),
        [(name, item.requires_grad, item.grad) for name, item in trainer.model.named_parameters()],
        trainer.model.training,
        [
            {k: v for k, v in group.items() if k != "params"}
            for group in trainer.optimizer.param_groups
        ],
        torch.get_rng_state().tolist(),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"precision": "fp16", "accumulate": 2},
    "averages": {"ema": 0.9, "swa": SWA(start="1step", every="1step"), "clip": 1.0},
    "batch norm": {"model": nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))},
    "skip": {"skip_nan": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_finders_leave_no_trace(name: str, steps_before: int, tmp_path: Path) -> None:
    """The state, the generators, the root, and the run that goes on are those without them."""
    root = tmp_path / "run"
    trainer = make(root, **OPTIONS[name])
    if steps_before:
        trainer.fit(steps_before)
    before, files = everything(trainer), sorted(root.rglob("*"))
    found = trainer.find_learning_rate(steps=12)
    assert everything(trainer) == before
    assert sorted(root.rglob("*")) == files
    assert len(found.rates) == len(found.losses) > 1


def test_a_run_that_goes_on_after_finders_is_the_same(tmp_path: Path) -> None:
    plain, tried = make(tmp_path / "plain"), make(tmp_path / "tried")
    for trainer in (plain, tried):
        trainer.fit(3)
    tried.find_learning_rate(steps=7)
    for trainer in (plain, tried):
        trainer.fit(7)
    assert dict(leaf_digests(plain.state)) == dict(leaf_digests(tried.state))
    with pytest.raises(UsageError, match="lowest"):
        tried.find_learning_rate(lowest=1, highest=0.1)


def test_finders_do_not_count_in_metrics_of_the_training() -> None:
    metric = Perplexity(len)
    trainer = make(
        MemoryStore(),
        loss=lambda model, batch: StepOutput(model(batch).square().mean()),
        metrics={"perplexity": metric},
    )
    before = metric.state_dict()
    trainer.find_learning_rate(steps=7)
    assert metric.state_dict() == before


def test_a_size_of_micro_batches_that_a_finder_has_halved_is_restored() -> None:
    def hungry(model: nn.Module, batch: Tensor) -> Any:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return mean_square(model, batch)

    trainer = make(MemoryStore(), loss=hungry, micro_batch="auto")
    assert trainer.find_learning_rate(steps=7).rates
    assert trainer.state["micro_batch"].max_samples is None


def test_the_suggested_rate_is_where_the_loss_falls() -> None:
    """A square bowl under plain SGD: too low changes nothing, above 1 it diverges."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = make(
        MemoryStore(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler=None,
        callbacks=[Never()],
        data=Loader([torch.eye(4)[at % 4] for at in range(16)], batch_size=16),
        loss=lambda model, batch: (model(batch) - 3).square().mean(),
    )
    found = trainer.find_learning_rate(lowest=1e-5, highest=100.0, steps=60)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 3
    assert found.rates[-1] < 100  # it ended when the loss had diverged


def _find(options: dict[str, Any], rank: int) -> Any:
    trainer = make(None, optimizer=lambda model: torch.optim.AdamW(model.parameters()), **options)

    def weights() -> list[Any]:
        values = trainer.model.state_dict().values()
        return [getattr(value, "_local_tensor", value).tolist() for value in values]

    before, draws = weights(), torch.get_rng_state().tolist()
    found = trainer.find_learning_rate(steps=6)
    is_same = weights() == before and torch.get_rng_state().tolist() == draws
    return is_same and not trainer.optimizer.state, found.losses, found.suggestion


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_find_the_same_and_leave_no_trace(strategy: str) -> None:
    first, second = run_ranks(2, partial(_find, {"strategy": strategy, "every": None}))
    assert first[0]
    assert second[0]
    assert first[1:] == second[1:]
