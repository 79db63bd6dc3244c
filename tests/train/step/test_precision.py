"""Precision: autocast, scaled losses and clipping, and a skipped update that is a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Clip, HookFailed, Precision, Training
from train.small import make, network

LOW = Precision(dtype="fp16", loss_scale=8.0)
"""A scale at which no gradient of these tests overflows."""


def spiking(at: int) -> Any:
    """A loss whose `at`th batch gives gradients that fp16 cannot hold."""
    calls = iter(range(1, 1000))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean() * (1e38 if next(calls) == at else 1.0)

    return loss


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_forward_pass_runs_in_the_precision_and_the_weights_stay(
    precision: str, dtype: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        seen.append(output.dtype)
        return output.float().square().mean()

    trainer = make(MemoryStore(), precision=precision, loss=loss)
    trainer.fit(2)
    assert seen == [dtype, dtype]
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert ("scaler" in trainer.state) is (precision == "fp16")


def test_a_skipped_update_is_a_step_and_halves_a_dynamic_scale() -> None:
    """A3: counted and scheduled, and the weights stay."""
    weights: list[Tensor] = []

    class Watch(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            weights.append(next(training.model.parameters()).detach().clone())

    trainer = make(
        MemoryStore(),
        precision=Precision(dtype="fp16", loss_scale=1024.0),
        loss=spiking(at=1),
        callbacks=[Watch()],
    )
    before = next(trainer.model.parameters()).detach().clone()
    trainer.fit(3)
    assert trainer.counters.step == 3
    assert trainer.schedulers["scheduler"].last_epoch == 3
    assert torch.equal(weights[0], before)
    assert not torch.equal(weights[1], before)
    assert trainer.state["scaler"].get_scale() == 512.0


def test_a_dynamic_scale_grows() -> None:
    precision = Precision(dtype="fp16", loss_scale=8.0, growth_interval=2)
    trainer = make(MemoryStore(), precision=precision)
    trainer.fit(4)
    assert trainer.state["scaler"].get_scale() == 32.0


def test_a_static_scale_stays() -> None:
    precision = Precision(dtype="fp16", loss_scale=8.0, growth_interval=1, dynamic=False)
    trainer = make(MemoryStore(), precision=precision, loss=spiking(at=1))
    trainer.fit(3)
    assert trainer.state["scaler"].get_scale() == 8.0


def test_the_scale_is_resumed(tmp_path: Path) -> None:
    """K37."""
    precision = Precision(dtype="fp16", loss_scale=8.0, growth_interval=2)
    make(tmp_path, precision=precision).fit(3)
    again = make(tmp_path, precision=precision)
    again.fit(5)
    straight = make(MemoryStore(), precision=precision)
    straight.fit(5)
    assert again.state["scaler"].state_dict() == straight.state["scaler"].state_dict()


@pytest.mark.parametrize("precision", ["fp32", LOW])
@pytest.mark.parametrize("clip", [0.001, Clip(norm=0.001), Clip(value=0.001)])
def test_gradients_are_clipped_after_they_are_unscaled(
    precision: str | Precision, clip: float | Clip
) -> None:
    found: list[float] = []

    class Largest(Callback):
        def before_optimizer_step(self, training: Training) -> None:
            gradients = [weight.grad for weight in training.model.parameters()]
            flat = torch.cat([item.flatten() for item in gradients if item is not None])
            found.append(float(flat.norm() if clip != Clip(value=0.001) else flat.abs().max()))

    trainer = make(
        MemoryStore(), precision=precision, callbacks=[Largest()], accumulate=2, clip=clip
    )
    trainer.fit(3)
    assert found == [pytest.approx(0.001, rel=1e-2)] * 3


def test_a_scaled_loss_gives_the_gradients_of_the_loss() -> None:
    gradients: list[list[Tensor]] = []
    for precision in (LOW, "bf16"):
        seen: list[Tensor] = []
        gradients.append(seen)

        class Watch(Callback):
            def before_optimizer_step(self, training: Training) -> None:
                seen.extend(weight.grad.clone() for weight in training.model.parameters())  # type: ignore[union-attr]  # noqa: B023

        make(MemoryStore(), precision=precision, callbacks=[Watch()], accumulate=2).fit(1)
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp8"},
        {"precision": 15},
        {"precision": None},
        {"clip": -1.0},
        {"clip": "norm"},
    ],
)
def test_what_is_no_precision_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"precision|clip"):
        make(MemoryStore(), **options)


@pytest.mark.parametrize(
    "options",
    [{"loss_scale": 0.0}, {"loss_scale": float("inf")}, {"growth_interval": 0}, {"dtype": "x"}],
)
def test_what_is_no_scale_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Precision(**options)


def test_the_network_of_these_tests_is_the_same_each_time() -> None:
    left, right = network().state_dict(), network().state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_update_that_an_error_cut_short_does_not_stand_in_the_way_of_the_next(
    tmp_path: Path,
) -> None:
    """Between the unscaling of its gradients and its end, and in the same process."""

    class Fails(Callback):
        times = 0

        def before_optimizer_step(self, training: Training) -> None:
            self.times += 1
            if self.times == 4:
                raise RuntimeError

    straight = make(tmp_path / "straight", precision=LOW)
    straight.fit(6)
    trainer = make(tmp_path / "run", precision=LOW, callbacks=[Fails()])
    with pytest.raises(HookFailed):
        trainer.fit(6)
    assert trainer.fit(6).reason == "goal"
    for left, right in zip(straight.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(left, right)
