"""A save that is not between two steps is warned of, and no correct loop is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import CheckpointManager

Loop = Callable[["Run"], None]


class Run:
    """A small model with its optimizer, and a manager that saves after each step."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.root = root
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "data": {}}
        self._manager: CheckpointManager | None = None
        self.step = 0

    @property
    def manager(self) -> CheckpointManager:
        """The manager; made at the first use, of the state at that time."""
        if self._manager is None:
            self._manager = CheckpointManager(self.root, self.state)
        return self._manager

    def backward(self, model: nn.Module | None = None) -> None:
        (model or self.model)(torch.ones(2, 4)).square().mean().backward()

    def save(self) -> None:
        self.step += 1
        self.manager.save(self.step, wait=True)


@pytest.fixture
def said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[[Loop], list[str]]:
    def run(loop: Loop) -> list[str]:
        made = Run(tmp_path)
        if loop in EARLY:
            assert made.manager is not None
        loop(made)
        made.manager.close()
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    return run


# Correct loops


def zeroes_before(run: Run) -> None:
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.save()


def writes_zeros(run: Run) -> None:
    for _ in range(3):
        run.backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.save()


def accumulates(run: Run) -> None:
    for number in range(1, 7):
        run.backward()
        if number % 2 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.save()


def has_two_optimizers(run: Run) -> None:
    """As a GAN: the second loss leaves gradients in the first model, which are dropped."""
    other = nn.Linear(4, 4)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    run.state |= {"other": other, "second": second}
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
        run.optimizer.step()
        second.zero_grad()
        run.model(other(torch.ones(2, 4))).mean().backward()
        second.step()
        run.save()


class Broken(torch.optim.SGD):
    """Its step begins and does not end, as one in another thread at the time of a save."""

    def step(self, closure: Any = None) -> None:
        raise ArithmeticError


def has_an_optimizer_of_something_else_in_its_step(run: Run) -> None:
    other = Broken(nn.Linear(4, 4).parameters(), lr=0.1)
    for _ in range(2):
        run.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with suppress(ArithmeticError):
            other.step()
        run.save()


def skips_a_step(run: Run) -> None:
    """As a loss scaler whose gradients are not finite."""
    for number in range(4):
        run.optimizer.zero_grad()
        run.backward()
        if number != 2:
            run.optimizer.step()
        run.save()


def skips_a_step_and_writes_zeros(run: Run) -> None:
    """As a loss scaler, of a loop that keeps its gradients' memory."""
    for number in range(4):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward()
        if number == 2:
            run.model[0].weight.grad.fill_(torch.inf)
            run.model[1].bias.grad.fill_(torch.inf)
        else:
            run.optimizer.step()
        run.save()


def attacks_in_validation(run: Run) -> None:
    for _ in range(3):
        run.optimizer.zero_grad()
        run.backward()
        run.optimizer.step()
        run.backward()
        run.save()


def gives_a_closure(run: Run) -> None:
    run.optimizer = run.state["optimizer"] = torch.optim.LBFGS(run.model.parameters())

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        run.optimizer.step(closure)
        run.save()

    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run.optimizer.step(interrupted)
    run.save()


def steps_in_backward(run: Run) -> None:
    each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in run.model.parameters()}
    run.state = {"model": run.model, "data": {}}
    run.state |= {f"optimizer{i}": one for i, one in enumerate(each.values())}

    def step(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        run.backward()
        run.save()


def updates_by_hand(run: Run) -> None:
    del run.state["optimizer"]
    for _ in range(3):
        run.backward()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter -= 0.1 * parameter.grad
        run.save()


def clips_weights(run: Run) -> None:
    """As the first WGANs, at the beginning of a step."""
    other = nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    run.state |= {"other": other, "second": second}
    for _ in range(4):
        for parameter in run.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        train(run)
        second.step()
        run.save()


def saves_in_a_hook(run: Run) -> None:
    run.optimizer.register_step_post_hook(lambda *_: run.save())
    for _ in range(3):
        train(run)


def loads_an_older_state(run: Run) -> None:
    for _ in range(3):
        train(run)
        run.save()
    run.manager.load("step=1")
    for _ in range(3):
        train(run)
        run.save()


def keeps_an_average(run: Run) -> None:
    run.state["ema"] = ema = torch.optim.swa_utils.AveragedModel(run.model)
    for _ in range(3):
        train(run)
        ema.update_parameters(run.model)
        run.save()
    run.model.load_state_dict(ema.module.state_dict())
    run.save()


def saves_its_gradients(run: Run) -> None:
    run.state["gradients"] = gradients = {}
    for number in range(1, 7):
        run.backward()
        gradients.update(run.model.named_parameters())
        gradients.update({name: p.grad for name, p in run.model.named_parameters()})
        if number % 2 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
            gradients.clear()
        run.save()


def train(run: Run) -> None:
    run.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def loads_other_weights_at_the_end(run: Run) -> None:
    """Weights are kept in a range after each step, and other ones follow the last save."""
    for _ in range(3):
        train(run)
        for weight in run.model.parameters():
            weight.data.mul_(0.5)
        run.save()
    for weight in run.model.parameters():
        weight.data.fill_(0.25)


def normalizes_weights(run: Run) -> None:
    """Weights are clamped after each step, and normalized before the next forward pass."""
    for _ in range(3):
        for weight in run.model.parameters():
            weight.data.div_(weight.data.norm())
        train(run)
        for weight in run.model.parameters():
            weight.data.clamp_(-0.1, 0.1)
        run.save()


CORRECT = (
    normalizes_weights,
    zeroes_before,
    writes_zeros,
    accumulates,
    has_two_optimizers,
    has_an_optimizer_of_something_else_in_its_step,
    skips_a_step,
    skips_a_step_and_writes_zeros,
    attacks_in_validation,
    gives_a_closure,
    steps_in_backward,
    updates_by_hand,
    clips_weights,
    saves_in_a_hook,
    loads_an_older_state,
    loads_other_weights_at_the_end,
    keeps_an_average,
    saves_its_gradients,
)


# Saves off a boundary


def saves_within_a_window(run: Run) -> None:
    for number in range(1, 7):
        run.backward()
        if number % 2 == 0:
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.save()


def ends_within_a_window(run: Run) -> None:
    train(run)
    run.backward()
    run.save()


def is_interrupted_in_a_step(run: Run) -> None:
    train(run)
    run.save()
    run.backward()
    with interrupting(), suppress(KeyboardInterrupt):
        run.optimizer.step()
    run.save()


def saves_from_a_signal_in_a_step(run: Run) -> None:
    train(run)
    run.backward()
    with interrupting(run.save):
        run.optimizer.step()


def saves_a_swapped_average(run: Run) -> None:
    ema = torch.optim.swa_utils.AveragedModel(run.model)
    ema.not_state = ("module",)  # type: ignore[assignment]  # its omission is another warning
    for number in range(1, 7):
        train(run)
        ema.update_parameters(run.model)
        if number % 3 == 0:
            trained = [weight.detach().clone() for weight in run.model.parameters()]
            for weight, average in zip(run.model.parameters(), ema.parameters(), strict=True):
                weight.data.copy_(average)
            run.save()
            for weight, before in zip(run.model.parameters(), trained, strict=True):
                weight.data.copy_(before)


def saves_an_exchanged_average(run: Run) -> None:
    averages = [weight.detach() * 0.5 for weight in run.model.parameters()]

    def swap() -> None:
        for number, weight in enumerate(run.model.parameters()):
            weight.data, averages[number] = averages[number], weight.data

    for _ in range(4):
        train(run)
        swap()
        run.save()
        swap()


def saves_an_average_at_the_end(run: Run) -> None:
    train(run)
    trained = [weight.detach().clone() for weight in run.model.parameters()]
    for weight in run.model.parameters():
        weight.data.mul_(0.5)
    run.save()
    for weight, before in zip(run.model.parameters(), trained, strict=True):
        weight.data.copy_(before)


@contextmanager
def interrupting(act: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt, or act, inside Adam's step."""

    def inside(*_: Any) -> None:
        if act is None:
            raise KeyboardInterrupt
        act()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "_init_group", inside)
        yield


EARLY = (
    ends_within_a_window,
    saves_from_a_signal_in_a_step,
    saves_a_swapped_average,
    saves_an_average_at_the_end,
)
"""Loops that begin after the manager was made."""

WRONG = {
    saves_within_a_window: "accumulation window",
    ends_within_a_window: "accumulation window",
    is_interrupted_in_a_step: "middle of step() of Adam",
    saves_from_a_signal_in_a_step: "middle of step() of Adam",
    saves_a_swapped_average: "weights that training did not continue with",
    saves_an_exchanged_average: "weights that training did not continue with",
    saves_an_average_at_the_end: "weights that training did not continue with",
}


@pytest.mark.parametrize("loop", CORRECT, ids=lambda loop: loop.__name__)
def test_a_correct_loop_hears_nothing(loop: Loop, said: Callable[[Loop], list[str]]) -> None:
    assert [text for text in said(loop) if "no optimizer" not in text] == []


@pytest.mark.parametrize("loop", WRONG, ids=lambda loop: loop.__name__)
def test_a_save_off_a_boundary_is_warned_of_once(
    loop: Loop, said: Callable[[Loop], list[str]]
) -> None:
    (text,) = said(loop)
    assert WRONG[loop] in text


def test_a_resume_avoids_half_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    is_interrupted_in_a_step(run)
    run.manager.close()
    with CheckpointManager(tmp_path, run.state) as again:
        found = again.resume()
    assert found is not None
    assert found.step == 1


def test_a_closure_is_given_to_an_optimizer_whose_groups_are_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.backward()
    run.optimizer.step()
    run.optimizer.param_groups[0]["params"] = []
    assert run.optimizer.step(lambda: 0.5) == 0.5
    run.manager.close()
