"""Pruning: how much of what, when, with masks in the checkpoint, resumed bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from holdfast.errors import MismatchError, UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import Report, StepReporter, assert_resume_equivalent
from holdfast.train import Callback, HookFailed, Metrics, Pruning, Training
from holdfast.train.callbacks.early_stopping import sparsity
from marks import full
from train.small import make, network

METHODS = ["l1_unstructured", "random_unstructured", "ln_structured", "random_structured"]


class Watch(Callback):
    def __init__(self) -> None:
        self.parts: list[float] = []
        self.logged: list[float] = []

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.parts.append(sparsity(training.model))

    def log(self, training: Training, metrics: Metrics) -> None:
        self.logged += [value for name, value in metrics.items() if name == "sparsity"]


@pytest.mark.parametrize("method", METHODS)
def test_the_part_that_is_pruned_grows_by_steps(method: Any) -> None:
    watch = Watch()
    pruning = Pruning({0: 0.125, 2: 0.25, 4: 0.75}, method=method, modules=["0"])
    trainer = make(MemoryStore(), callbacks=[watch, pruning], ema=0.5)
    assert sparsity(trainer.model) == 0.0
    trainer.fit(5)
    assert watch.parts == [0.125, 0.25, 0.25, 0.75, 0.75]
    assert watch.logged == [0.125, 0.25, 0.75]
    mask = trainer.model[0].weight_mask
    if method.endswith("_structured"):
        assert all(len(row.unique()) == 1 for row in mask)
    assert trainer.ema is not None
    assert torch.equal(trainer.ema.model[0].weight_mask, mask)  # type: ignore[index, arg-type]
    trainer.model(torch.zeros(1, 4))
    assert bool((trainer.model[0].weight[mask == 0] == 0).all())
    prune.remove(trainer.model[0], "weight")
    assert float((trainer.model[0].weight == 0).float().mean()) == 0.75


def test_the_smallest_weights_go_and_stay_away() -> None:
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[4.0, -1.0, 2.0, -3.0]]))
    masks: list[list[float]] = []

    class Masks(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            masks.append(training.model[0].weight_mask.flatten().tolist())  # type: ignore[index]

    trainer = make(
        MemoryStore(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[Pruning({1: 0.25, 2: 0.5}), Masks()],
    )
    trainer.fit(2)
    assert masks == [[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]]


def test_a_checkpoint_without_masks_is_refused_and_one_with_masks_too(tmp_path: Path) -> None:
    """K38: strict in both directions, before anything is changed."""
    make(tmp_path / "dense").fit(2)
    sparse = make(tmp_path / "dense", callbacks=[Pruning({1: 0.5})])
    with pytest.raises(MismatchError, match="weight_mask"):
        sparse.fit(4)
    make(tmp_path / "sparse", callbacks=[Pruning({1: 0.5})]).fit(2)
    with pytest.raises(MismatchError, match="weight_mask"):
        make(tmp_path / "sparse").fit(4)


def test_masks_are_in_checkpoints_from_the_first_one_on(tmp_path: Path) -> None:
    """K38."""
    make(tmp_path, callbacks=[Pruning({1: 0.5})]).fit(1)
    other = make(tmp_path, callbacks=[Pruning({1: 0.5, 9: 0.75})])
    other.fit(2)
    assert sparsity(other.model) == 0.5


def run(method: str, root: str, steps: int, report: Report) -> None:
    pruning = Pruning({2: 0.25, 5: 0.5, 7: 0.75}, method=method)  # type: ignore[arg-type]
    make(
        Path(root),
        model=network,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        every="1step",
        ema=0.9,
        callbacks=[pruning, StepReporter(report)],
    ).fit(steps)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["random_unstructured", *full("l1_unstructured")])
def test_a_sparse_run_that_is_killed_goes_on_bit_for_bit(method: str) -> None:
    """K38, invariant 7: masks, draws of random masks, optimizer and average."""
    assert_resume_equivalent(partial(run, method), 8, [4, 6], start_method="forkserver")


def test_modules_are_those_with_a_weight() -> None:
    with pytest.raises(HookFailed, match="'1', 'nothing'"):
        make(MemoryStore(), callbacks=[Pruning({1: 0.5}, modules=["0", "1", "nothing"])])
    with pytest.raises(HookFailed, match="no linear or convolutional"):
        make(MemoryStore(), model=nn.Embedding(4, 1), callbacks=[Pruning({1: 0.5})])


@pytest.mark.parametrize(
    ("amounts", "method"),
    [
        ({}, "l1_unstructured"),
        ({-1: 0.5}, "l1_unstructured"),
        ({1: 0.0}, "l1_unstructured"),
        ({1: 1.0}, "l1_unstructured"),
        ({1: True}, "l1_unstructured"),
        ({2: 0.5, 1: 0.6}, "l1_unstructured"),
        ({1: 0.5, 2: 0.5}, "l1_unstructured"),
        ({1: 0.5}, "magnitude"),
    ],
)
def test_what_cannot_work_is_refused(amounts: Any, method: Any) -> None:
    with pytest.raises(UsageError, match="Pruning"):
        Pruning(amounts, method=method)


def test_what_is_pruned_before_the_first_step_is_logged(tmp_path: Path) -> None:
    make(tmp_path, callbacks=[Pruning({0: 0.5})], every=None).fit(1)
    first = (tmp_path / "log" / "train.jsonl").read_text().splitlines()[0]
    line = json.loads(first)
    assert (line["step"], line["metrics"]) == (0, {"sparsity": 0.5})
