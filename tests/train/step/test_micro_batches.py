"""Micro-batches: the gradient of the whole batch, in parts that fit into memory."""

from __future__ import annotations

import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Measured, StepOutput, Training
from holdfast.train.group import ALONE
from holdfast.train.step.micro_batches import MicroBatches
from train.small import Noisy, make
from train.step.test_step import update, weight

SAYS = {
    "device": torch.OutOfMemoryError("CUDA out of memory."),
    "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_the_gradient_is_that_of_the_whole_batches(size: int, num_batches: int) -> None:
    batches = [*torch.randn(num_batches, 7, 3)]
    split, whole = update(micro_batches=MicroBatches(size, ALONE)), update()
    found, expected = split(batches), whole(batches)
    torch.testing.assert_close(weight(split), weight(whole), rtol=1e-6, atol=1e-7)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_weights_of_the_loss_are_those_of_the_parts() -> None:
    def loss(model: nn.Module, batch: Tensor) -> StepOutput:
        rows = batch[batch[:, 0] > 0]
        return StepOutput(model(rows).square().sum() / max(1, len(rows)), weight=len(rows))

    batches = [*torch.randn(2, 7, 3)]
    split, whole = update(loss=loss, micro_batches=MicroBatches(2, ALONE)), update(loss=loss)
    split(batches)
    whole(batches)
    torch.testing.assert_close(weight(split), weight(whole), rtol=1e-6, atol=1e-7)


def test_every_container_is_split_with_what_belongs_to_its_samples() -> None:
    pair = namedtuple("pair", "a b")
    batch = {
        "x": torch.arange(5),
        "pair": pair(torch.arange(10).view(5, 2), np.arange(5)),
        "names": ["a", "b", "c", "d", "e"],
        "scalar": torch.tensor(3.0),
        "same": ["x", "y"],
        "number": 7,
    }
    pieces = MicroBatches(2, ALONE).split_window([batch])
    assert [piece.batch["x"].tolist() for piece in pieces] == [[0], [1, 2], [3, 4]]
    assert [piece.batch["names"] for piece in pieces] == [["a"], ["b", "c"], ["d", "e"]]
    assert [piece.share for piece in pieces] == [0.2, 0.4, 0.4]
    last = pieces[-1].batch
    assert type(last["pair"]) is pair
    assert last["pair"].a.tolist() == [[6, 7], [8, 9]]
    assert last["pair"].b.tolist() == [3, 4]
    assert (last["scalar"], last["same"], last["number"]) == (3.0, ["x", "y"], 7)


class Custom:
    pass


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (Custom(), "a Custom in a batch cannot be split"),
        ({"x": torch.ones(2), "more": Custom()}, "a Custom in a batch"),
        ([torch.ones(2), torch.ones(3)], r"first dimensions \[2, 3\]"),
        ("text", "no tensors with a dimension"),
        (torch.ones(0, 3), "has no samples"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        update(micro_batches=MicroBatches(1, ALONE))([batch])


class Limited:
    """A loss that has memory for so many samples, and notes how many it got."""

    def __init__(self, limit: int, error: BaseException = SAYS["device"]) -> None:
        self.limit, self.error = limit, error
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        self.sizes.append(len(batch))
        draw = random.random()  # as what a failed try draws must be put back
        output = model(batch)
        if len(batch) > self.limit:
            raise self.error
        return output.square().mean(), {"draw": draw}


def auto(root: Any, limit: int, **options: Any) -> Any:
    loss = Limited(limit, options.pop("error", SAYS["device"]))
    options = {
        "data": Loader(Noisy(), batch_size=8, drop_last=True),
        "loss": loss,
        "micro_batch": "auto",
        "metrics": {"mean": Measured(MeanMetric(), lambda batch, outputs: batch)},
        **options,
    }
    return make(root, **options)


@pytest.mark.parametrize("says", SAYS)
def test_the_size_is_halved_until_it_fits_and_stays(
    says: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = auto(MemoryStore(), 3, error=SAYS[says], data=Loader(Noisy(), batch_size=8))
    made.fit(3)
    loss = made._parts.update.loss
    assert loss.sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert caplog.text.count("out of memory with") == 2
    assert "out of memory with 4 samples at once" in caplog.text


class Counts(Callback):
    """A state that each forward pass changes."""

    def __init__(self) -> None:
        self.count = 0

    def after_forward(self, training: Training, batch: Any, outputs: StepOutput) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Spiky(Limited):
    """Memory runs out once, after a part that did fit: in the second micro-batch of a step."""

    def __call__(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        found = super().__call__(model, batch)
        if len(batch) == 4 and self.sizes[-2:] == [4, 4]:
            raise self.error
        return found


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def state(made: Any) -> list[Any]:
    return [
        *made.model.state_dict().values(),
        *[slot for slots in made.optimizer.state.values() for slot in slots.values()],
        torch.rand(3),
        torch.tensor(random.random()),
        made.state["metrics"].state_dict()["ranks"][0]["metrics"]["mean"]["states"][0]["values"],
        torch.tensor([item.count for item in made._callbacks._all if isinstance(item, Counts)]),
    ]


def test_a_step_that_is_done_again_is_the_same_as_with_that_size_at_once() -> None:
    """Generators, buffers, callbacks and gradients are as before the failed tries."""
    spiky = Spiky(4)
    tried = auto(MemoryStore(), 4, model=batch_norm(), callbacks=[Counts()], loss=spiky)
    at_once = auto(MemoryStore(), 4, model=batch_norm(), callbacks=[Counts()], micro_batch=2)
    tried.fit(4)
    found = state(tried)
    at_once.fit(4)
    torch.testing.assert_close(found, state(at_once), rtol=0, atol=0)
    assert spiky.sizes[:5] == [8, 4, 4, 2, 2]


def test_the_size_is_in_the_checkpoint_and_the_resume_is_exact(tmp_path: Path) -> None:
    once = auto(tmp_path / "once", 3)
    once.fit(6)
    expected = state(once)
    auto(tmp_path / "twice", 3).fit(3)
    twice = auto(tmp_path / "twice", 3)
    twice.fit(6)
    torch.testing.assert_close(state(twice), expected, rtol=0, atol=0)
    assert {*twice._parts.update.loss.sizes} == {2}, "it was not tried again"
    assert twice.state["micro_batch"].max_samples == 2


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        auto(MemoryStore(), 0).fit(1)


def test_another_error_is_not_taken_for_one_of_memory() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        auto(MemoryStore(), 3, error=RuntimeError("mine")).fit(1)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "most"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="micro_batch="):
        make(MemoryStore(), micro_batch=given)


@pytest.mark.parametrize("state", [{}, {"size": 0}, {"size": True}, {"size": "2"}, {"other": 2}])
def test_a_stored_size_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="micro-batches"):
        MicroBatches("auto", ALONE).load_state_dict(state)
