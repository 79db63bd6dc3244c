"""State that would come back otherwise than it was saved."""

from __future__ import annotations

from pathlib import PureWindowsPath
from typing import Any

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User, new_state
from torch import nn

import holdfast

THEME = Theme("State that does not load unchanged")
case = THEME.case


def saved(user: User, model: nn.Module) -> None:
    with holdfast.CheckpointManager(user.new, {"model": model, "data": {}}) as manager:
        manager.save(1, wait=True)


def resumed(user: User, state: dict[str, Any]) -> None:
    with holdfast.CheckpointManager(user.new, state) as manager:
        manager.resume()


def loaded(user: User, model: nn.Module) -> None:
    holdfast.load_weights(user.new, model)


class Table(nn.Linear):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.full((3,), value), persistent=False)


class Head(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        weight = self.first.weight.data
        self.register_buffer("last", weight.t() if is_tied else weight.t() + 1)


class Format(nn.Linear):
    """Reads states of its own format only."""

    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.register_buffer("format", torch.tensor(number))
        self.register_load_state_dict_pre_hook(self.check)

    @staticmethod
    def check(module, state, prefix, *_) -> None:
        if state[prefix + "format"] != module.format:
            raise ValueError("this is of another format")


class Scaled(nn.Linear):
    def _save_to_state_dict(self, state, prefix, keep_vars) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "weight.scale"] = torch.ones(1)


class Late(nn.Linear):
    seen = None

    def get_extra_state(self):
        return {"seen": len(self.seen)}

    def set_extra_state(self, state) -> None:
        self.seen = [0] * state["seen"]


class Meter:
    def __init__(self, total) -> None:
        self.total = total

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state) -> None:
        self.total = [*state["total"]]


@case("a model from `meta` whose table is not filled again", names="table")
def _(user: User) -> None:
    saved(user, Table())
    loaded(user, Table(0.25))


@case("a head that is the transposed first layer, only in the new script", names="share memory")
def _(user: User) -> None:
    saved(user, Head(is_tied=False))
    loaded(user, Head(is_tied=True))


@case("a module whose loading hook refuses the older format", names="another format")
def _(user: User) -> None:
    saved(user, Format(1))
    loaded(user, Format(2))


@case("a module that saves a scale which it cannot load", names="weight.scale")
def _(user: User) -> None:
    saved(user, Scaled(2, 2))


@case("an extra state that is there only after the first batch", names="_extra_state")
def _(user: User) -> None:
    saved(user, Late(2, 2))


@case("a meter of another version, which refuses the saved total", names="Meter")
def _(user: User) -> None:
    state = {**new_state(), "meter": Meter(3)}
    with holdfast.CheckpointManager(user.new, state) as manager:
        manager.save(1, wait=True)
    resumed(user, {**new_state(), "meter": Meter([])})


@case("mixed precision is switched on in the second run", names="scaler")
def _(user: User) -> None:
    off = {**new_state(), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    with holdfast.CheckpointManager(user.new, off) as manager:
        manager.save(1, wait=True)
    on = torch.amp.GradScaler("cpu")
    resumed(user, {**new_state(), "scaler": on})


@case("weights of a model in two wrappers", names="rename=lambda name")
def _(user: User) -> None:
    saved(user, nn.ModuleDict({"model": nn.ModuleDict({"module": nn.Linear(2, 2)})}))
    loaded(user, nn.Linear(2, 2))


@case("a Windows path in the state", names="PureWindowsPath")
def _(user: User) -> None:
    state = {**new_state(), "paths": {"data": PureWindowsPath("C:/data")}}
    with holdfast.CheckpointManager(user.new, state) as manager:
        manager.save(1, wait=True)


@case("a layer replaced after the optimizer was made", names="trained and not saved")
def _(user: User) -> None:
    state = new_state()
    state["model"][1] = nn.Linear(3, 1)
    with holdfast.CheckpointManager(user.new, state) as manager:
        manager.save(1, wait=True)
