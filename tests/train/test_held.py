"""Parameters that an optimizer steps are in the checkpoints, or somebody is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import each
from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.events import Event
from train.small import make, network


class Weighed(nn.Module):
    """A loss with weights of its own, which the optimizer learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * self.scale.square().sum()


class Holder:
    """An object whose state is a live tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": self.weight.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weight.data.copy_(state["weight"])


def adam(*more: Tensor) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW([*model.parameters(), *more], lr=0.01)


def test_a_trainer_refuses_an_optimizer_of_what_no_component_holds(tmp_path: Path) -> None:
    """Parameters that would be trained and not saved are an error that names them, and `state=`."""
    loss, other = Weighed(), nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(UsageError) as raised:
        make(tmp_path, optimizer=adam(*loss.parameters(), other), loss=loss)
    text = str(raised.value)
    assert "loss.scale [3]" in text
    assert "group0.param5 [2, 5]" in text
    assert "trained and not saved" in text
    assert 'state={"loss": loss}' in text
    assert list(tmp_path.iterdir()) == []


def test_a_second_optimizer_is_looked_at_too(tmp_path: Path) -> None:
    """An optimizer in `state=` whose module is not there is refused in the same way."""
    critic = nn.Linear(4, 1)
    stepped = torch.optim.SGD(critic.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"critic_optimizer: group0\.param0 "):
        make(tmp_path, state={"critic_optimizer": stepped})
    make(tmp_path, state={"critic_optimizer": stepped, "critic": critic})


@each("kind", ["module", "dict", "object", "view"])
def test_what_any_component_holds_is_fine(kind: str, tmp_path: Path) -> None:
    """A module, a dict and an object of the state all save what they hold, and a part of it."""
    loss = Weighed()
    whole = torch.zeros(7)
    loss.scale = nn.Parameter(whole[2:5]) if kind == "view" else loss.scale
    holders: dict[str, Any] = {
        "module": loss,
        "dict": {"nested": [{"scale": loss.scale}]},
        "object": Holder(loss.scale),
        "view": {"whole": whole},
    }
    make(tmp_path, optimizer=adam(loss.scale), loss=loss, state={"loss": holders[kind]})


def test_a_resume_is_exact_when_the_loss_is_a_component(tmp_path: Path) -> None:
    """What the refusal asks for works: straight and resumed training end alike."""

    def run(root: Path, *goals: int) -> Tensor:
        for goal in goals:
            loss = Weighed()
            make(root, optimizer=adam(loss.scale), loss=loss, state={"loss": loss}).fit(goal)
        return loss.scale.detach()

    assert torch.equal(run(tmp_path / "straight", 6), run(tmp_path / "resumed", 3, 6))


def test_a_manager_warns_of_them_and_again_when_others_join(tmp_path: Path) -> None:
    """A warning names them at the first whole save, and once more after `add_param_group`."""
    seen: list[Event] = []
    model, head = network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), head.weight], lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, state, sinks=(seen.append,)) as manager:
        manager.save(1, components=["model"], wait=True)
        for step in (2, 3):
            manager.save(step, wait=True)
        optimizer.add_param_group({"params": [head.bias]})
        for step in (4, 5):
            manager.save(step, wait=True)
    warnings = [event.message for event in seen if event.kind == "warning"]
    assert len(warnings) == 2
    assert "group0.param4 [2, 2]" in warnings[0]
    assert "trained and not saved" in warnings[0]
    assert "group1.param0 [2]" in warnings[1]


def test_a_manager_is_silent_where_all_is_held(tmp_path: Path) -> None:
    """Held by a dict: no warning, at no save."""
    seen: list[Event] = []
    model, scale = network(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    state = {"model": model, "optimizer": optimizer, "scale": {"value": scale}}
    with CheckpointManager(tmp_path, state, sinks=(seen.append,)) as manager:
        manager.save(1, components=["model"], wait=True)
        manager.save(2, wait=True)
    assert [event.message for event in seen if event.kind == "warning"] == []
