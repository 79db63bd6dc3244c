"""A training that uses an optimizer, scheduler or scaler outside of its state is warned of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from holdfast import CheckpointManager
from holdfast.store.memory import MemoryStore

State = dict[str, Any]
Step = Callable[[], None]


def network() -> nn.Module:
    return nn.Linear(2, 2)


def stepping(model: nn.Module, *optimizers: Any) -> Step:
    """Return a training step of a model by each optimizer."""

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    return step


def warnings_of(caplog: pytest.LogCaptureFixture, state: State, *steps: Step) -> list[str]:
    """Train and save four times; return the warnings of omissions."""
    state = {"data": {"batches": 0}, **state}
    with caplog.at_level(logging.WARNING), CheckpointManager(MemoryStore(), state) as manager:
        for number in range(1, 5):
            for step in steps:
                step()
            manager.save(number, wait=True)
    return [text for text in caplog.messages if "used in training" in text]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    return lambda state, *steps: warnings_of(caplog, state, *steps)


Warned = Callable[..., list[str]]


def test_an_omitted_average_is_named_once_unless_it_is_not_updated(warned: Warned) -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    average, idle = AveragedModel(model), AveragedModel(model)
    idle.update_parameters(model)
    step = stepping(model, optimizer)
    state = {"model": model, "optimizer": optimizer}

    def averaging() -> None:
        step()
        average.update_parameters(model)

    assert warned(state, step) == []
    assert warned({**state, "average": average}, averaging) == []
    assert warned({**state, "average": average.state_dict()}, averaging) == []
    (text,) = warned(state, averaging)
    assert "AveragedModel" in text


def test_an_omitted_optimizer_is_named_once(warned: Warned) -> None:
    model = network()
    (text,) = warned({"model": model}, stepping(model, AdamW(model.parameters())))
    assert "AdamW" in text
    assert "to the state" in text


def test_one_of_two_optimizers_is_named(warned: Warned) -> None:
    model = network()
    one, two = SGD([model.weight], momentum=0.9), Adam([model.bias])
    (text,) = warned({"model": model, "optimizer": one}, stepping(model, one, two))
    assert ": Adam." in text
    assert "SGD" not in text


def test_an_optimizer_made_after_the_manager_is_named(warned: Warned) -> None:
    """One that replaces the optimizer of the state, as after more layers are trained."""
    model = network()
    state = {"model": model, "optimizer": Adam(model.parameters())}
    (text,) = warned(state, stepping(model, AdamW(model.parameters())))
    assert "AdamW" in text


def test_an_omitted_scheduler_is_named(warned: Warned) -> None:
    model = network()
    optimizer = SGD(model.parameters())
    scheduler = StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer}
    (text,) = warned(state, stepping(model, optimizer), scheduler.step)
    assert "StepLR" in text


def test_an_omitted_scaler_is_named(warned: Warned) -> None:
    model = network()
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    (text,) = warned({"model": model, "optimizer": optimizer}, step)
    assert "GradScaler" in text


class Holder(nn.Module):
    """A module that has its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer


class Outer(SGD):
    """An optimizer around another."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups)
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Engine:
    """An object that saves its optimizer in a form of its own."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = [optimizer]

    def state_dict(self) -> State:
        return {"steps": 1}

    def load_state_dict(self, state: State) -> None:
        pass


def test_an_optimizer_in_another_component_is_not_named(warned: Warned) -> None:
    for hold in (lambda one: Holder(network(), one), Outer, Engine):
        model = network()
        optimizer = Adam(model.parameters())
        holder = hold(optimizer)
        trains = holder if isinstance(holder, Outer) else optimizer
        assert warned({"model": model, "holder": holder}, stepping(model, trains)) == []


def test_schedulers_inside_one_of_the_state_are_not_named(warned: Warned) -> None:
    model = network()
    optimizer = Adam(model.parameters())
    parts = [ExponentialLR(optimizer, 0.9), StepLR(optimizer, 2)]
    scheduler = SequentialLR(optimizer, parts, milestones=[2])
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    assert warned(state, stepping(model, optimizer), scheduler.step) == []


def test_optimizers_of_other_models_and_of_other_managers_are_not_named(warned: Warned) -> None:
    model, other = network(), network()
    mine, theirs = Adam(model.parameters()), Adam(other.parameters())
    weights_only: State = {"model": other}
    with CheckpointManager(MemoryStore(), {"model": other, "optimizer": theirs}):
        steps = (stepping(model, mine), stepping(other, theirs))
        assert warned({"model": model, "optimizer": mine}, *steps) == []
        assert warned(weights_only, *steps) == []


def test_a_scaler_of_two_models_in_one_of_their_managers_is_not_named(warned: Warned) -> None:
    model, other = network(), network()
    mine, theirs = Adam(model.parameters()), Adam(other.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(model(other(torch.ones(1, 2))).sum()).backward()
        scaler.step(mine)
        scaler.step(theirs)
        scaler.update()

    with CheckpointManager(MemoryStore(), {"model": other, "optimizer": theirs, "scaler": scaler}):
        assert warned({"model": model, "optimizer": mine}, step) == []


def test_a_scheduler_whose_state_the_script_keeps_in_a_dict_is_not_named(warned: Warned) -> None:
    model = network()
    optimizer = Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "schedule": {"epochs": 0}}
    scheduler = StepLR(optimizer, 1)
    assert warned(state, stepping(model, optimizer), scheduler.step) == []


@pytest.mark.parametrize(
    "extra",
    [
        lambda scaler, scheduler: {"amp": scaler.state_dict(), "lr": scheduler.state_dict()},
        lambda scaler, scheduler: {"all": [scaler.state_dict(), {"lr": scheduler.state_dict()}]},
    ],
    ids=["dict", "list"],
)
def test_state_dicts_anywhere_in_the_state_are_found(warned: Warned, extra: Any) -> None:
    model = network()
    optimizer, scaler = Adam(model.parameters()), torch.amp.GradScaler("cpu")
    scheduler = StepLR(optimizer, 1)
    state: State = {"model": model, "optimizer": optimizer, "extra": {}}

    def step() -> None:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        state["extra"].update(extra(scaler, scheduler))

    assert warned(state, step) == []


def test_optimizers_without_state_or_made_for_one_task_are_not_named(warned: Warned) -> None:
    model = network()
    assert warned({"model": model}, stepping(model, SGD(model.parameters()))) == []
    tasks = []

    def task() -> None:
        tasks.append(Adam(model.parameters()))
        stepping(model, tasks[-1])()

    assert warned({"model": model}, task) == []


def test_new_optimizers_with_the_id_of_a_deleted_one_are_not_named(warned: Warned) -> None:
    model, optimizers = network(), list[Any]()

    def task() -> None:
        optimizers.clear()
        optimizers.append(SGD(model.parameters(), momentum=0.9))
        stepping(model, *optimizers)()

    assert warned({"model": model}, task) == []


def test_an_optimizer_whose_state_is_declared_to_be_none_is_not_named(warned: Warned) -> None:
    model = network()
    optimizer: Any = Adam(model.parameters())
    optimizer.not_state = ("state",)
    assert warned({"model": model}, stepping(model, optimizer)) == []
