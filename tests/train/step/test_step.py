"""One optimizer window: gradients, metrics, clipping, and where batches go."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.train import Callback, Precision
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.group import ALONE
from holdfast.train.step.batches import Batches
from holdfast.train.step.device_metrics import Numbers, RankMeans
from holdfast.train.step.epoch_metrics import Scores
from holdfast.train.step.micro_batches import MicroBatches, Weighing
from holdfast.train.step.numerics import Numerics
from holdfast.train.step.step import Clip, Update
from holdfast.train.strategies import Parallel


def update(*callbacks: Callback, **options: Any) -> Update:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    options = {
        "model": model,
        "called": model,
        "parallel": Parallel(ALONE),
        "means": RankMeans(ALONE),
        "weighing": Weighing(ALONE, is_scaled=False),
        "micro_batches": MicroBatches(None, ALONE),
        "scores": Scores({}, ALONE, what="metrics"),
        "snapshot": lambda: None,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "schedulers": (),
        "loss": lambda model, batch: model(batch).square().mean(),
        "clip": Clip(),
        "numerics": Numerics(Precision(), "cpu"),
        "device": None,
        "callbacks": Callbacks(callbacks, None),  # type: ignore[arg-type]
        "numbers": Numbers(),
        **options,
    }
    return Update(**options)


def weight(update: Update) -> Tensor:
    return update.model.weight.detach().clone()  # type: ignore[operator, union-attr]


def test_a_window_is_the_mean_of_its_batches() -> None:
    batches = list(torch.randn(3, 2, 3))
    windowed, whole = update(), update()
    metrics = windowed(batches)
    expected = whole([torch.cat(batches)])
    torch.testing.assert_close(weight(windowed), weight(whole))
    assert metrics["loss"] == pytest.approx(expected["loss"])


def test_metrics_are_means_over_the_window() -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return model(batch).mean(), {"size": torch.tensor(float(len(batch)))}

    found = update(loss=loss)([torch.zeros(2, 3), torch.zeros(4, 3)])
    assert found["size"] == 3.0


def test_gradients_are_clipped_before_the_hook_and_their_norm_is_told() -> None:
    norms: list[float] = []

    class Norm(Callback):
        def before_optimizer_step(self, training: Any) -> None:
            squares = [item.grad.square().sum() for item in clipped.model.parameters()]  # type: ignore[union-attr]
            norms.append(float(torch.stack(squares).sum().sqrt()))

    clipped = update(Norm(), clip=Clip(norm=1e-3))
    metrics = clipped([torch.ones(2, 3)])
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)
    assert metrics["grad_norm"] > 1e-3


def test_no_gradient_is_left_over_or_taken_over() -> None:
    first, second = update(), update()
    second.model(torch.ones(1, 3)).sum().backward()
    for one in (first, second):
        one([torch.ones(2, 3)])
    assert torch.equal(weight(first), weight(second))
    assert all(item.grad is None for item in first.model.parameters())


def test_the_scheduler_steps_once_a_window() -> None:
    one = update()
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 1, gamma=0.5)
    scheduled = update(model=one.model, optimizer=one.optimizer, schedulers=[scheduler])
    scheduled([torch.ones(2, 3)] * 4)
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model(batch),
        lambda model, batch: 1.0,
        lambda model, batch: (model(batch).mean(), {"loss": 1.0}),
        lambda model, batch: (model(batch).mean(), {"grad_norm": 1.0}),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(UsageError, match="loss"):
        update(loss=loss)([torch.ones(2, 3)])


def test_batches_are_moved_in_any_container() -> None:
    pair = namedtuple("pair", "a b")
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        return model(torch.ones(1, 3)).mean()

    x = torch.ones(2)
    batch = {"x": x, "list": [x, (x, 5)], "pair": pair(x, "text")}
    update(loss=loss, device=torch.device("meta"))([batch])
    moved = seen[0]
    tensors = [moved["x"], moved["list"][0], moved["list"][1][0], moved["pair"].a]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved["list"][1][1], moved["pair"].b) == (5, "text")
    assert type(moved["pair"]) is pair


class Own:
    """A batch as others have them: it knows how to move, with or without returning itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device))


class OwnInPlace(Own):
    def to(self, device: torch.device) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


@pytest.mark.parametrize("kind", [Own, OwnInPlace])
def test_a_batch_of_a_class_of_its_own_is_moved_by_its_to(kind: type[Own]) -> None:
    """As those of graphs or of tokenizers; otherwise it would stay on the host."""
    seen: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch)
        return model(torch.ones(1, 3)).mean()

    update(loss=loss, device=torch.device("meta"))([[kind(torch.ones(2))]])
    assert [batch.x.device.type for batch in seen] == ["meta"]


def test_a_window_takes_no_batch_beyond_itself() -> None:
    batches = Batches(range(5))
    batches.start_iterating(0)
    assert [batches.take_window(2) for _ in range(4)] == [[0, 1], [2, 3], [4], []]
