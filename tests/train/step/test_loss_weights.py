"""Losses with weights: a step is the mean over all tokens, however they lie in its batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Metrics, Precision, StepOutput, Training, Validation
from holdfast.train.group import ALONE
from holdfast.train.step.micro_batches import Weighing
from holdfast.train.step.numerics import Numerics
from holdfast.train.step.step import Clip, Update
from train.small import make
from train.step.test_step import update, weight

IGNORED = -100


def masked_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> StepOutput:
    """Mean over the tokens that are not masked."""
    inputs, labels = batch
    is_token = labels != IGNORED
    errors = (model(inputs).squeeze(-1) - labels).square()
    count = is_token.sum()
    mean = torch.where(is_token, errors, 0.0).sum() / count.clamp(min=1)
    return StepOutput(mean, {"mean": mean.detach()}, weight=count)


def tokens(*counts: int, length: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of small whole numbers, of which so many tokens are not masked."""
    own = torch.Generator().manual_seed(3)
    batches = []
    for count in counts:
        inputs = torch.randint(-4, 5, (length, 3), generator=own).float()
        labels = torch.randint(-4, 5, (length,), generator=own).float()
        labels[count:] = IGNORED
        batches.append((inputs, labels))
    return batches


def joined(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    inputs, labels = zip(*batches, strict=True)
    return [(torch.cat(inputs), torch.cat(labels))]


def whole_numbers(loss: Any = masked_loss, **options: Any) -> Update:
    """A model of whole numbers, of which sums are exact."""
    one = update(loss=loss, **options)
    with torch.no_grad():
        one.model.weight.fill_(2.0)
        one.model.bias.fill_(1.0)
    return one


def test_unequal_micro_batches_give_the_weights_of_the_whole_batch_bit_for_bit() -> None:
    """Where each count and the total are powers of two, nothing is rounded."""
    batches = tokens(4, 1, 8, 2, 1)
    split, whole = whole_numbers(), whole_numbers()
    found, expected = split(batches), whole(joined(batches))
    assert torch.equal(weight(split), weight(whole))
    assert dict(found) == dict(expected)


@pytest.mark.parametrize("counts", [(7, 1, 3), (0, 5), (8, 8, 6, 1)])
def test_unequal_micro_batches_give_the_whole_batch_but_for_roundings(
    counts: tuple[int, ...],
) -> None:
    """Measured: at most 2 units in the last place of float32."""
    batches = tokens(*counts)
    split, whole = whole_numbers(), whole_numbers()
    found, expected = split(batches), whole(joined(batches))
    torch.testing.assert_close(weight(split), weight(whole), rtol=3e-7, atol=0)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["mean"] == pytest.approx(expected["mean"], rel=1e-6)


def test_without_weights_batches_count_alike() -> None:
    """So that the test above could fail."""
    batches = tokens(7, 1)

    def unweighted(model: nn.Module, batch: Any) -> Tensor:
        return masked_loss(model, batch).loss

    split, whole = whole_numbers(unweighted), whole_numbers(unweighted)
    split(batches)
    whole(joined(batches))
    assert not torch.allclose(weight(split), weight(whole))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_weight_of_all_batches_alike_changes_nothing(kind: Any) -> None:
    def same(model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(batch).square().mean(), weight=kind(4))

    batches = list(torch.randn(2, 4, 3))
    weighted = update(loss=same)
    plain = update()
    assert dict(weighted(batches)) == dict(plain(batches))
    assert torch.equal(weight(weighted), weight(plain))


def test_a_total_of_zero_makes_no_nan() -> None:
    one = whole_numbers()
    found = one(tokens(0, 0))
    assert torch.equal(weight(one), torch.full((1, 3), 2.0))
    assert dict(found) == {"loss": 0.0, "mean": 0.0}


def test_gradients_are_clipped_after_they_are_divided() -> None:
    clipped, whole = (whole_numbers(clip=Clip(norm=1e-3)) for _ in range(2))
    batches = tokens(4, 1, 8, 2, 1)
    assert clipped(batches)["grad_norm"] == whole(joined(batches))["grad_norm"]
    assert torch.equal(weight(clipped), weight(whole))


def test_weights_that_only_some_batches_have_are_refused() -> None:
    given = iter([StepOutput, lambda loss: StepOutput(loss, weight=2)])

    def some(model: nn.Module, batch: Tensor) -> StepOutput:
        return next(given)(model(batch).mean())

    with pytest.raises(UsageError, match="has a weight, and earlier ones had none"):
        update(loss=some)([torch.ones(2, 3)] * 2)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "4", torch.ones(2)])
def test_a_weight_that_is_no_number_is_refused(value: Any) -> None:
    def wrong(model: nn.Module, batch: Tensor) -> StepOutput:
        return StepOutput(model(batch).mean(), weight=value)

    with pytest.raises(UsageError, match="weight="):
        update(loss=wrong)([torch.ones(2, 3)])


def test_large_weights_do_not_overflow_a_scaled_loss() -> None:
    """In half precision 60,000 tokens would be beyond the range with any scale."""

    def many(model: nn.Module, batch: Tensor) -> StepOutput:
        return StepOutput(model(batch).square().mean(), weight=60_000)

    numerics = Numerics(Precision(dtype="fp16", loss_scale=2.0**10), "cpu")
    plain = Numerics(Precision(dtype="fp16", loss_scale=2.0**10), "cpu")
    one = update(loss=many, numerics=numerics, weighing=Weighing(ALONE, is_scaled=True))
    other = update(numerics=plain)
    batches = list(torch.randn(2, 4, 3))
    before = weight(one)
    one(batches)
    other(batches)
    assert not torch.equal(weight(one), before)
    torch.testing.assert_close(weight(one), weight(other), rtol=1e-3, atol=1e-4)


def test_weights_that_are_tensors_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.step.device_metrics.is_at_hand", lambda value: False)
    one = whole_numbers()
    read: list[Tensor] = []
    real = {name: getattr(Tensor, name) for name in ("item", "__bool__", "__float__", "tolist")}
    for name, function in real.items():

        def reading(tensor: Tensor, function: Any = function) -> Any:
            read.append(tensor)
            return function(tensor)

        monkeypatch.setattr(Tensor, name, reading)
    found = one(tokens(4, 1, 3))
    assert not read
    assert found["loss"] > 0
    assert read


def test_a_validation_weighs_as_the_loss_says() -> None:
    batches = tokens(7, 1)
    model = nn.Linear(3, 1)
    seen: dict[str, float] = {}

    class Watch(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            seen[name] = metrics["loss" if "loss" in metrics else f"val/{name}/loss"]

    plans = [
        Validation(name="tokens", data=batches),
        Validation(name="whole", data=joined(batches)),
        Validation(name="alike", data=batches, weigh=lambda batch: 1.0),
    ]
    trainer = make(
        MemoryStore(), model=model, loss=masked_loss, validate=plans, callbacks=[Watch()]
    )
    trainer.validate()
    assert seen["tokens"] == pytest.approx(seen["whole"], rel=1e-6)
    assert seen["alike"] != pytest.approx(seen["whole"], rel=1e-3)


def test_a_validation_refuses_weights_that_only_some_batches_have() -> None:
    def some(model: nn.Module, batch: Tensor) -> StepOutput:
        loss = model(batch).mean()
        return StepOutput(loss, weight=2 if len(batch) == 2 else None)

    validation = Validation(data=[torch.ones(2, 4), torch.ones(3, 4)], loss=some)
    with pytest.raises(UsageError, match="some batches a weight"):
        make(MemoryStore(), validate=validation).validate()
