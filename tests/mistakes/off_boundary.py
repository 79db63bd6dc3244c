"""Saves off a step boundary, and state that no component holds or no checkpoint can."""

from __future__ import annotations

from typing import Any

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User
from torch import Tensor, nn

import holdfast

THEME = Theme("Saves within a step, and state outside of the components")
case = THEME.case


def a_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    made = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": made, "data": {}}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def trains(user: User, state: dict[str, Any], **options: Any) -> None:
    with holdfast.CheckpointManager(user.new, state, **options) as manager:
        manager.resume()
        for number in (1, 2, 3):
            step(state)
            manager.save(number, wait=True)


@case("`save` between `backward()` and `optimizer.step()`", names="accumulation window")
def _(user: User) -> None:
    state = a_state(nn.Linear(2, 2))
    with holdfast.CheckpointManager(user.new, state) as manager:
        step(state)
        state["model"](torch.ones(1, 2)).sum().backward()
        manager.save(1, wait=True)
        step(state)


@case("`except KeyboardInterrupt: save()` for Ctrl-C in `optimizer.step()`", names="in the middle")
def _(user: User) -> None:
    class Stopped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.add_(1)
            raise KeyboardInterrupt

    model = nn.Linear(2, 2)
    state = a_state(model, Stopped(model.parameters(), lr=0.1))
    with holdfast.CheckpointManager(user.new, state) as manager:
        try:
            step(state)
        except KeyboardInterrupt:
            manager.save(1, wait=True)


@case("`save` while an average is in the model for a validation", names="average")
def _(user: User) -> None:
    state = a_state(nn.Linear(2, 2))
    with holdfast.CheckpointManager(user.new, state) as manager:
        step(state)
        own = {name: value.clone() for name, value in state["model"].state_dict().items()}
        state["model"].load_state_dict({name: value + 1 for name, value in own.items()})
        manager.save(1, wait=True)
        state["model"].load_state_dict(own)
        step(state)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.num_batches, self.history, self.shadow = 0, list[int](), torch.zeros(2)

    def forward(self, batch: Tensor) -> Tensor:
        self.does()
        return super().forward(batch)

    def does(self) -> None:
        """Change one of the attributes."""


class Counter(Counting):
    def does(self) -> None:
        self.num_batches += 1


class Historian(Counting):
    def does(self) -> None:
        self.history.append(1)


class Shadowed(Counting):
    def does(self) -> None:
        self.shadow.add_(1)


for kind, what in (
    (Counter, "num_batches"),
    (Historian, "history"),
    (Shadowed, "shadow"),
):

    @case(f"a module that keeps its state in the attribute `{what}`", names=what)
    def _(user: User, kind: type[Counting] = kind) -> None:
        trains(user, a_state(kind()))


@case("an optimizer with its moments in an attribute", names="moments")
def _(user: User) -> None:
    class Own(torch.optim.SGD):
        moments: dict[str, Tensor]

        def step(self, closure: Any = None) -> None:
            self.__dict__.setdefault("moments", {"0": torch.zeros(2)})["0"].add_(1)
            super().step()

    model = nn.Linear(2, 2)
    trains(user, a_state(model, Own(model.parameters(), lr=0.1)))


class Packed(Tensor):
    """A quantized tensor of a library."""


@case("a quantized base, which is a tensor subclass, in the model", names="model.base")
def _(user: User) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("base", torch.ones(2).as_subclass(Packed))
    holdfast.CheckpointManager(user.new, a_state(model))


@case('`every="100step"` with moments that are a tensor subclass', names="weight.moment")
def _(user: User) -> None:
    class Eight(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["moment"] = torch.zeros(2).as_subclass(Packed)

    model = nn.Linear(2, 2)
    state = a_state(model, Eight(model.parameters(), lr=0.1))
    with holdfast.CheckpointManager(user.new, state, every="100step") as manager:
        step(state)
        manager.maybe_save(1)


@case("a sparse tensor in a dict of the state", names="progress.pairs")
def _(user: User) -> None:
    state = {**a_state(nn.Linear(2, 2)), "progress": {"pairs": torch.eye(2).to_sparse()}}
    holdfast.CheckpointManager(user.new, state)


@case("`edit_save` that reads a tensor that cannot be saved", names="model.base")
def _(user: User) -> None:
    def edit(view: Any) -> None:
        view["model"]["base"] = view["model"]["base"] + 1

    model = nn.Linear(2, 2)
    model.register_buffer("base", torch.eye(2).to_sparse())
    hooks = holdfast.StateHooks(edit_save=edit)
    with holdfast.CheckpointManager(user.new, a_state(model), hooks=hooks) as manager:
        manager.save(1)
