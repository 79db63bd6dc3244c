"""Steps that are left out: data and counters go on, weights stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Counts, Metrics, Training
from train.small import make


class Watch(Callback):
    """Which batches were trained on, and what the weights were after each step."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.weights: list[Tensor] = []
        self.names: list[list[str]] = []

    def batch_start(self, training: Training, batch: Tensor) -> None:
        self.batches.append(batch[:, 0].tolist())

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.weights.append(next(training.model.parameters()).detach().clone())
        self.names.append(sorted(metrics))


def numbers() -> Loader:
    return Loader(
        [torch.full((4,), float(value)) for value in range(12)], batch_size=2, shuffle=False
    )


def test_data_and_schedules_go_on_and_weights_stay() -> None:
    """O61: half-open ranges; the same data as without them comes afterwards."""
    watch = Watch()
    trainer = make(
        MemoryStore(),
        data=numbers(),
        skip_steps=[range(1, 2), range(3, 5)],
        callbacks=[watch],
        counts=Counts(samples=len),
    )
    first = next(trainer.model.parameters()).detach().clone()
    trainer.fit(6)
    assert watch.batches == [[2.0, 3.0], [8.0, 9.0], [10.0, 11.0]]
    assert torch.equal(watch.weights[0], first)
    assert torch.equal(watch.weights[1], watch.weights[3])
    assert not torch.equal(watch.weights[3], watch.weights[4])
    assert watch.names == [[], ["draw", "loss"], [], [], *[["draw", "loss"]] * 2]
    assert (trainer.counters.step, trainer.counters.samples) == (6, 12)
    assert trainer.schedulers["scheduler"].last_epoch == 6


def test_a_resume_among_them_is_exact(tmp_path: Path) -> None:
    """O61: a checkpoint may be made of a step that was left out."""
    states: list[Any] = []
    for root, goals in ((MemoryStore(), (7,)), (tmp_path, (4, 7))):
        for goal in goals:
            trainer = make(root, skip_steps=[range(3, 6)], ema=0.9)
            trainer.fit(goal)
        states.append(leaf_digests(trainer.state))
    assert states[0] == states[1]


@pytest.mark.parametrize("given", [[3], [(3, 5)], [range(2)], [range(5, 5)], [range(1, 9, 2)]])
def test_what_is_no_range_of_steps_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="skip_steps"):
        make(MemoryStore(), skip_steps=given)
