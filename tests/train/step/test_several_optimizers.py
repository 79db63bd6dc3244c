"""Several optimizers: a loss for each, or a function that does the whole update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from holdfast import Checkpoints, On
from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.train import Callback, Clip, Control, StepOutput, Trainer, Training, Validation
from marks import full


class Gan(nn.Module):
    """A generator of points on a circle, and what tells them from drawn ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))


def network() -> Gan:
    torch.manual_seed(0)
    return Gan()


def points() -> TensorDataset:
    angles = torch.arange(40.0)
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))


def truth(logits: Tensor, value: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def losses(model: Any, batch: list[Tensor]) -> dict[str, Any]:
    fake = model.generator(torch.randn(len(batch[0]), 3))
    told = truth(model.critic(batch[0]), 1.0) + truth(model.critic(fake.detach()), 0.0)
    return {
        "generator": truth(model.critic(fake), 1.0),
        "critic": StepOutput(told, {"spread": fake.detach().std()}),
    }


def alternate(control: Control, batch: list[Tensor]) -> Mapping[str, Any]:
    """Two updates of the critic, then one of the generator."""
    model: Any = control.model
    for _ in range(2):
        fake = model.generator(torch.randn(len(batch[0]), 3)).detach()
        told = truth(model.critic(batch[0]), 1.0) + truth(model.critic(fake), 0.0)
        control.backward(told)
        control.step("critic")
    with control.toggle("critic"):
        assert not any(item.requires_grad for item in model.generator.parameters())
    fooled = truth(model.critic(model.generator(torch.randn(len(batch[0]), 3))), 1.0)
    control.backward(fooled, "generator")
    control.step("generator")
    control.zero_grad()
    return {"loss": fooled, "critic": told}


def gan(root: Path | None, **options: Any) -> Trainer:
    given = {
        "optimizer": {
            "generator": lambda model: torch.optim.Adam(model.generator.parameters(), lr=0.01),
            "critic": lambda model: torch.optim.SGD(
                model.critic.parameters(), lr=0.05, momentum=0.9
            ),
        },
        "scheduler": {"critic": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)},
        "clip": {"critic": Clip(norm=0.5)},
        "data": Loader(points(), batch_size=8),
        "progress": False,
        **options,
    }
    every = given.pop("every", "2step")
    return Trainer(network, checkpoints=root and Checkpoints(root, every=every), **given)


def bits(trainer: Trainer) -> list[Any]:
    slots = [
        value
        for optimizer in trainer.optimizer.values()
        for of_parameter in optimizer.state.values()
        for value in of_parameter.values()
    ]
    weights = [*trainer.model.state_dict().values()]
    return [*weights, *slots, torch.get_rng_state()]


WAYS: dict[str, dict[str, Any]] = {
    "losses": {"loss": losses},
    "losses of windows": {"loss": losses, "accumulate": 2},
    "update": {"update": alternate},
    "bf16": {"update": alternate, "precision": "bf16"},
    "fp16": {"loss": losses, "precision": "fp16"},
}


@pytest.mark.parametrize("way", ["losses of windows", "fp16", *full("losses", "update", "bf16")])
def test_a_resumed_run_is_the_same_bit_for_bit(way: str, tmp_path: Path) -> None:
    """Invariant 7: ended in the middle of an epoch."""
    options = WAYS[way]
    once = gan(tmp_path / "once", **options)
    once.fit("7step")
    gan(tmp_path / "twice", **options).fit("3step")
    twice = gan(tmp_path / "twice", **options)
    twice.fit("7step")
    torch.testing.assert_close(bits(twice), bits(once), rtol=0, atol=0)
    assert {"optimizer-generator", "optimizer-critic", "scheduler-critic"} <= set(twice.state)
    assert twice.optimizer["critic"].param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**2)


class Told(Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.num_updates = 0

    def step_end(self, training: Training, metrics: Any) -> None:
        self.metrics.append(dict(metrics))

    def after_optimizer_step(self, training: Training) -> None:
        self.num_updates += 1


def test_each_loss_trains_the_parameters_of_its_optimizer_alone() -> None:
    torch.manual_seed(3)
    trainer = gan(None, loss=losses, clip=None, scheduler=None)
    model: Any = network()
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer.fit("1step")
    torch.manual_seed(0)
    (batch,) = [next(iter(Loader(points(), batch_size=8)))]
    expected = losses(model, batch)
    names = [name for name, _ in model.named_parameters()]
    gradients: dict[str, Tensor] = {}
    for of, loss in (("generator", expected["generator"]), ("critic", expected["critic"].loss)):
        own = [name for name in names if name.startswith(of)]
        parts = [model.get_parameter(name) for name in own]
        gradients |= zip(own, torch.autograd.grad(loss, parts, retain_graph=True), strict=True)
    for name, weight, old in zip(names, trainer.model.parameters(), before, strict=True):
        moved = weight.detach() - old
        assert torch.equal(moved.sign(), -gradients[name].sign()), name


def test_metrics_are_the_losses_by_name_and_norms_of_those_that_clip() -> None:
    told = Told()
    gan(None, loss=losses, callbacks=[told]).fit("2step")
    assert [set(found) for found in told.metrics] == [
        {"loss", "loss/generator", "loss/critic", "spread", "grad_norm/critic"}
    ] * 2
    first = told.metrics[0]
    assert first["loss"] == pytest.approx(first["loss/generator"] + first["loss/critic"])


def test_an_update_steps_as_often_as_it_likes() -> None:
    told = Told()
    gan(None, update=alternate, callbacks=[told]).fit("2step")
    assert told.num_updates == 6
    assert [set(found) for found in told.metrics] == [{"loss", "critic", "grad_norm/critic"}] * 2


def test_validations_take_the_sum_of_the_losses() -> None:
    plan = Validation(data=Loader(points(), batch_size=8, shuffle=False), every="2step")
    trainer = gan(None, loss=losses, validate=plan)
    trainer.fit("2step")
    found = trainer.validate()
    total = found["val/loss/generator"] + found["val/loss/critic"]
    assert found["val/loss"] == pytest.approx(total)


def solve(control: Control, batch: list[Tensor]) -> dict[str, Any]:
    """Least squares by an optimizer that computes the loss again."""

    def again() -> Tensor:
        control.zero_grad()
        loss: Tensor = (control.model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        control.backward(loss)
        return loss

    return {"loss": control.step(closure=again)}


def lbfgs(root: Path) -> Trainer:
    torch.manual_seed(1)
    return Trainer(
        nn.Linear(2, 1),
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3),
        data=Loader(points(), batch_size=20),
        update=solve,
        checkpoints=Checkpoints(root, every="1step"),
        progress=False,
    )


def test_an_optimizer_that_needs_a_closure_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Invariant 7."""
    once = lbfgs(tmp_path / "once")
    once.fit("6step")
    lbfgs(tmp_path / "twice").fit("2step")
    twice = lbfgs(tmp_path / "twice")
    twice.fit("6step")
    assert torch.equal(once.model.weight, twice.model.weight)  # type: ignore[arg-type]


def failing(control: Control, batch: list[Tensor]) -> dict[str, Any]:
    found = alternate(control, batch)
    if control.optimizers["generator"].state and len(failing.calls) == 2:  # type: ignore[attr-defined]
        raise RuntimeError("after its steps")
    failing.calls.append(1)  # type: ignore[attr-defined]
    return dict(found)


def test_an_error_after_a_step_of_an_optimizer_saves_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing.calls = []  # type: ignore[attr-defined]
    trainer = gan(tmp_path, update=failing, every=On("exception"))
    with pytest.raises(RuntimeError, match="after its steps"):
        trainer.fit("9step")
    assert "step 3 failed in its update, so nothing of it can be saved" in caplog.text


def no_step(control: Control, batch: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": losses, "update": alternate}, "replaces loss"),
        ({"loss": lambda model, batch: torch.zeros(())}, "a mapping with a loss for each"),
        ({"loss": losses, "micro_batch": 2}, "micro_batch: not with several"),
        ({"loss": losses, "clip": {"other": 1.0}}, "clip: .'other'. must be some of"),
        ({"loss": losses, "scheduler": lambda optimizer: None}, "a mapping from their names"),
        ({"update": no_step}, "did not step any optimizer"),
        (
            {
                "loss": losses,
                "optimizer": lambda model: torch.optim.SGD(model.parameters()),
                "scheduler": None,
            },
            "names are for several optimizers, and there is one",
        ),
        ({"update": alternate, "precision": "fp16"}, "can step only once per step"),
        ({"update": lambda control, batch: control.step("other")}, "optimizer 'other': there are"),
        ({"loss": losses, "optimizer": {"Big": network}}, "must match"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gan(None, **options).fit("1step")
