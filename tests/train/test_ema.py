"""The average of the weights: its arithmetic, its place in the checkpoint, its use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Training
from holdfast.train.averages import Average
from holdfast.weights import load_weights
from quantized import bits_of, scaled_model
from train.small import make, network


def test_it_follows_the_weights_step_by_step() -> None:
    """Against the formula, in the arithmetic of a loop."""
    history: list[Tensor] = []

    class Watch(Callback):
        def fit_start(self, training: Training) -> None:
            history.append(next(training.model.parameters()).detach().double())

        def after_optimizer_step(self, training: Training) -> None:
            history.append(next(training.model.parameters()).detach().double())

    trainer = make(MemoryStore(), ema=0.9, callbacks=[Watch()])
    trainer.fit(6)
    expected = history[0]
    for weight in history[1:]:
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(next(trainer.ema.model.parameters()).double(), expected)  # type: ignore[union-attr]


def test_it_begins_with_the_weights_that_training_begins_with() -> None:
    """Also with those that were loaded after the Trainer was made."""
    trainer = make(MemoryStore(), ema=0.5)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(3.0)
    begun: list[float] = []

    class Watch(Callback):
        def fit_start(self, training: Any) -> None:
            begun.extend(float(item.mean()) for item in training.ema.model.parameters())

    with torch.no_grad():
        watched = make(MemoryStore(), ema=0.5, callbacks=[Watch()])
        for weight in watched.model.parameters():
            weight.fill_(3.0)
    watched.fit(1)
    assert set(begun) == {3.0}


def test_buffers_are_averaged_if_they_can_be_and_copied_if_not() -> None:
    live = nn.BatchNorm1d(2)
    average = Average(live, 0.5)
    live.running_mean.fill_(4.0)  # type: ignore[union-attr]
    live.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    average.update_average(live)
    assert average.model.running_mean.tolist() == [2.0, 2.0]  # type: ignore[union-attr, operator]
    assert average.model.num_batches_tracked.item() == 7  # type: ignore[union-attr, operator]


def test_it_is_resumed_and_can_be_loaded_as_weights(tmp_path: Path) -> None:
    """Invariant 7."""
    straight = make(MemoryStore(), ema=0.9)
    straight.fit(6)
    make(tmp_path, ema=0.9).fit(3)
    again = make(tmp_path, ema=0.9)
    again.fit(6)
    loaded = network()
    load_weights(tmp_path, loaded, component="ema")
    assert straight.ema is not None
    assert again.ema is not None
    for one, two, three, live in zip(
        straight.ema.model.parameters(),
        again.ema.model.parameters(),
        loaded.parameters(),
        straight.model.parameters(),
        strict=True,
    ):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert not torch.equal(one, live)


def test_validation_uses_it_and_training_does_not() -> None:
    from holdfast.train import Validation

    seen: list[nn.Module] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(model)
        return model(batch).square().mean()

    data = [torch.ones(2, 4)]
    for use_ema in (True, False):
        plan = Validation(data=data, use_ema=use_ema)
        trainer = make(MemoryStore(), ema=0.9, validate=plan, loss=loss)
        seen.clear()
        trainer.fit(1)
        assert trainer.ema is not None
        assert seen == [trainer.model, trainer.ema.model if use_ema else trainer.model]
        assert not any(item.requires_grad for item in trainer.ema.model.parameters())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, True])
def test_what_is_no_decay_is_refused(decay: Any) -> None:
    with pytest.raises(UsageError, match="ema"):
        make(MemoryStore(), ema=decay)


def half_network() -> nn.Sequential:
    return network().to(torch.bfloat16)


def half_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.bfloat16()).float().square().mean()


def test_the_average_of_a_bfloat16_model_moves(tmp_path: Path) -> None:
    """It is float32 in memory and in the checkpoint, and is cast where the model is used."""
    trainer = make(
        tmp_path, model=half_network(), ema=0.999, loss=half_loss, validate=[torch.ones(2, 4)]
    )
    started = [weight.float() for weight in trainer.model.parameters()]
    trainer.fit(6)
    assert trainer.ema is not None
    averages = [*trainer.ema.model.parameters()]
    assert {average.dtype for average in averages} == {torch.float32}
    assert any(not torch.equal(a, b) for a, b in zip(averages, started, strict=True))
    stored = load_weights(tmp_path, component="ema")
    assert all(torch.equal(stored[n], v) for n, v in trainer.ema.model.state_dict().items())
    found = load_weights(tmp_path, loaded := half_network(), component="ema")
    assert "cast to the model's dtypes" in found.notes[-1]
    for one, average in zip(loaded.parameters(), averages, strict=True):
        assert torch.equal(one, average.bfloat16())


def test_an_average_that_was_saved_in_bfloat16_is_resumed_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Narrows(Callback):
        def edit_save(self, training: Training, state: Any) -> None:
            for path in [*state["ema"]]:
                state["ema"][path] = state["ema"][path].bfloat16()

    options = {"ema": 0.9, "loss": half_loss}
    make(tmp_path, model=half_network(), callbacks=[Narrows()], **options).fit(3)
    again = make(tmp_path, model=half_network(), **options)
    again.fit(4)
    assert "continues from them in float32" in caplog.text
    assert again.counters.step == 4


def test_shared_buffers_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    for part in model:
        part.register_buffer("table", model[0].weight.detach() if part is model[0] else None)
    model[1].table = model[0].table
    average = Average(model, 0.5)
    average.update_average(model)
    assert average.model[0].table is average.model[1].table  # type: ignore[index, union-attr]


def test_quantized_weights_are_not_averaged() -> None:
    """They stay as they are in the average of a model; those that train are refused."""
    model, moved = scaled_model(), nn.Linear(4, 2)
    average = Average(model, 0.5)
    before = average.model[1].weight.clone()
    model[1].load_state_dict(moved.state_dict())
    average.update_average(model)
    assert torch.equal(average.model[1].weight, before.lerp(moved.weight, 0.5))
    assert bits_of(average.model[0].weight) == bits_of(model[0].weight)
    model[0].weight.requires_grad_()
    with pytest.raises(UsageError, match=r"0\.weight: Scaled"):
        Average(model, 0.5)
