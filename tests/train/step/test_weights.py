"""Errors in steps in which more than the Trainer's optimizer changes weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import each
from holdfast import CheckpointManager
from holdfast.policy.triggers import Every, On
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Trainer, Training, Validation
from holdfast.train.callbacks.registry import HookFailed
from holdfast.train.step.undo import StateFingerprint
from train.small import make, network

FAILING = Every("3step") | On("exception")


class Adversary:
    """A loss that trains a critic by itself, in each of its calls, and fails in one of them."""

    def __init__(self, way: str, fails_at: int, *, fails_before: bool = False) -> None:
        self.way, self.fails_at, self.fails_before = way, fails_at, fails_before
        self.calls = 0
        torch.manual_seed(5)
        self.critic = nn.Linear(1, 1)
        self.critic.register_buffer("seen", torch.zeros(1))
        self.target = nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.critic.parameters(), lr=0.1)

    @property
    def state(self) -> dict[str, Any]:
        return {"critic": self.critic, "critic_optimizer": self.optimizer, "target": self.target}

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at and self.fails_before:
            raise ZeroDivisionError
        found = model(batch)
        self.change(model, found.detach())
        if self.calls == self.fails_at:
            raise ZeroDivisionError
        return (self.critic(found) * self.target(found)).square().mean()

    @torch.no_grad()
    def change(self, model: Any, found: Tensor) -> None:
        if self.way == "optimizer":
            self.optimizer.zero_grad()  # what the other loss has left there
            with torch.enable_grad():
                self.critic(found).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        elif self.way == "data":
            self.target.weight.data.mul_(0.995)
        elif self.way == "new data":
            self.target.weight.data = self.target.weight.data * 0.995
        elif self.way == "model":
            model[0].weight.data.clamp_(-0.01, 0.01)
        elif self.way == "rate":
            self.optimizer.param_groups[0]["lr"] *= 0.5
        elif self.way == "slot":
            for slots in self.optimizer.state.values():
                slots["exp_avg"].mul_(0.5)
        elif self.way == "buffer":
            self.critic.seen += random.random()


def trainer(root: Path, loss: Adversary, **options: Any) -> Trainer:
    return make(root, loss=loss, state=loss.state, **{"every": FAILING, **options})


def steps(root: Path) -> dict[int, str]:
    with CheckpointManager(root, {"nothing": {}}) as manager:
        return {checkpoint.step: checkpoint.reason for checkpoint in manager.list()}


CHANGES = {
    "optimizer": "critic, critic_optimizer",
    "data": "target",
    "new data": "target",
    "model": "model",
    "rate": "critic_optimizer",
}


@each("way", CHANGES)
def test_after_an_error_nothing_is_saved_that_the_step_had_changed(
    way: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights of the step that failed are in no checkpoint of the step before.

    The log names the components, and the newest checkpoint, from which a rerun is exact.
    """
    caplog.clear()
    root = tmp_path_factory.mktemp("run")
    straight = trainer(root / "straight", Adversary(way, 0))
    straight.fit(6)
    with pytest.raises(ZeroDivisionError):
        trainer(root / "run", Adversary(way, 5)).fit(6)
    assert steps(root / "run") == {3: "every 3step"}
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert f"step 5 failed when it had changed {CHANGES[way]}" in said[0]
    assert "the newest checkpoint is step-00000003" in said[0]
    again = trainer(root / "run", Adversary(way, 0))
    again.fit(6)
    assert leaf_digests(again.state) == leaf_digests(straight.state)


@each("way", [*CHANGES, "buffer", "nothing"])
def test_what_the_step_had_not_changed_yet_is_saved(
    way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An error before such a change, or with changes that can be put back, is saved, exactly."""
    root = tmp_path_factory.mktemp("run")
    straight = trainer(root / "straight", Adversary(way, 0))
    straight.fit(6)
    is_before = way in CHANGES
    with pytest.raises(ZeroDivisionError):
        trainer(root / "run", Adversary(way, 5, fails_before=is_before)).fit(6)
    assert steps(root / "run") == {3: "every 3step", 4: "exception"}
    again = trainer(root / "run", Adversary(way, 0))
    again.fit(6)
    assert leaf_digests(again.state) == leaf_digests(straight.state)


class Swaps(Callback):
    """Validates with other weights, and fails before it has put the own ones back."""

    def validation_start(self, training: Training, name: str) -> None:
        for parameter in training.model.parameters():
            parameter.data.zero_()

    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        raise ZeroDivisionError


def test_weights_that_a_validation_has_swapped_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that puts other weights into the model and fails leaves no checkpoint of them."""
    validate = Validation(data=[torch.ones(2, 4)], every="4step")
    made = make(tmp_path, every=FAILING, validate=validate, callbacks=[Swaps()])
    with pytest.raises(HookFailed):
        made.fit(6)
    assert steps(tmp_path) == {3: "every 3step"}
    assert "a validation failed when it had changed model" in caplog.text


class FailsTwice(Swaps):
    """Fails in its first validation, with other weights, and later in a step."""

    def __init__(self) -> None:
        self.failures = 0

    def validation_start(self, training: Training, name: str) -> None:
        if not self.failures:
            super().validation_start(training, name)

    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        if not self.failures:
            self.failures = 1
            raise ZeroDivisionError

    def before_forward(self, training: Training, batch: Any) -> None:
        if self.failures == 1 and training.counters.step == 4:
            self.failures = 2
            raise ZeroDivisionError


def test_the_next_fit_saves_after_an_error_again(tmp_path: Path) -> None:
    """A validation that swapped weights forbids one save, not those of later calls of `fit`."""
    validate = Validation(data=[torch.ones(2, 4)], every="4step")
    made = make(tmp_path, every=FAILING, validate=validate, callbacks=[FailsTwice()])
    for saved in ({3: "every 3step"}, {3: "every 3step", 4: "exception"}):
        with pytest.raises(HookFailed):
            made.fit(6)
        assert steps(tmp_path) == saved


class Extra(nn.Module):
    """A module whose state has more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def _halve_one(module: Any) -> None:
    module[2].weight.data.view(-1)[3] *= 0.5


def _swap_two(module: Any) -> None:
    module[0].weight, module[0].bias = nn.Parameter(module[0].weight * 2), module[0].bias


def _count(module: Any) -> None:
    module[-1].count += 1


@each("change", [_halve_one, _swap_two, _count])
def test_every_change_of_a_module_is_seen(change: Callable[[Any], None]) -> None:
    """One value of one parameter, another parameter in its place, and extra state."""
    module = network().append(Extra())
    weights = StateFingerprint({"module": module, "other": network()})
    assert weights.find_changed() == []
    change(module)
    assert weights.find_changed() == ["module"]


@each("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16])
@each("size", [1, 3, 8, 300_001])
def test_every_dtype_and_layout_is_looked_at(dtype: torch.dtype, size: int) -> None:
    """Also tensors of odd lengths, at odd addresses and of other strides."""
    module = nn.Module()
    whole = torch.zeros(size + 1, dtype=dtype)
    module.odd = nn.Parameter(whole[1:])
    module.turned = nn.Parameter(torch.zeros(2, size, dtype=dtype).t())
    module.empty = nn.Parameter(torch.zeros(0, dtype=dtype))
    for tensor in (whole, module.turned.data):
        weights = StateFingerprint({"module": module})
        assert weights.find_changed() == []
        tensor[(-1,) * tensor.dim()] += 1
        assert weights.find_changed() == ["module"]


def test_optimizers_are_looked_at_without_a_step(tmp_path: Path) -> None:
    """Slots, options and further groups; a list of tensors in a slot is no trouble."""
    loss = Adversary("optimizer", 0)
    loss(network(), torch.ones(2, 4))
    state: dict[str, Any] = {"optimizer": loss.optimizer}
    for way in ("rate", "slot"):
        weights = StateFingerprint(state)
        assert weights.find_changed() == []
        loss.way = way
        loss.change(None, torch.ones(1))
        assert weights.find_changed() == ["optimizer"]
    slots = next(iter(loss.optimizer.state.values()))
    slots["history"] = [torch.ones(2), {"a": (1, None)}]
    weights = StateFingerprint(state)
    assert weights.find_changed() == []
    slots["history"].append(torch.ones(1))
    assert weights.find_changed() == ["optimizer"]
    weights = StateFingerprint(state)
    loss.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert weights.find_changed() == ["optimizer"]
