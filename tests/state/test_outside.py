"""Attributes that are state and in no component are named, and caches are not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import CheckpointManager
from holdfast.errors import UsageError


class Model(nn.Module):
    """A model that does something with its attributes in each forward pass."""

    def __init__(self, does: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.net, self._does = nn.Linear(4, 2), does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, batch: Tensor) -> Tensor:
        self._does(self, batch)
        out: Tensor = self.net(batch)
        return out


class Hidden(torch.optim.SGD):
    """An optimizer with momenta, a count, or another optimizer in an attribute."""

    def __init__(self, parameters: Any, what: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.what, self.count, self.momenta = what, 0, dict[Tensor, Tensor]()
        self.base = torch.optim.Adam(self.param_groups)

    def step(self, closure: Any = None) -> None:
        if self.what == "count":
            self.count += 1
        elif self.what == "base":
            self.base.step()
        else:
            for parameter in self.param_groups[0]["params"]:
                self.momenta.setdefault(parameter, torch.zeros_like(parameter)).add_(1)


class Progress:
    """An object that saves only some of what it counts, under another name."""

    def __init__(self) -> None:
        self.seen, self.lost, self.shadow = 0, 0, torch.zeros(2)

    def advance(self) -> None:
        self.seen += 3
        self.lost += 5
        self.shadow += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.seen, "average": self.shadow.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def add(model: Any, batch: Tensor) -> None:
    model.held = model.held + 1


def add_in_place(model: Any, batch: Tensor) -> None:
    model.held += 1


def cache(model: Any, batch: Tensor) -> None:
    model.size, model.map = len(batch), batch.detach().softmax(1)
    model.loss, model.last = batch.sum(), float(batch.sum())
    model.output = model.net(batch)
    model.masks[len(batch)] = torch.ones(len(batch))


@pytest.fixture
def said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    def run(model: nn.Module, optimizer: Any = None, **state: Any) -> list[str]:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        whole = {"model": model, "optimizer": optimizer, "data": {}, **state}
        with CheckpointManager(tmp_path, whole) as manager:
            for step in range(1, 5):
                model(torch.full((7 - step % 3, 4), float(step))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for value in state.values():
                    value.advance()
                manager.save(step, wait=True)
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]

    return run


@pytest.mark.parametrize(
    ("held", "does"),
    [
        (0, add),
        (torch.zeros(3), add_in_place),
        (np.zeros(3), add_in_place),
        ({"a": torch.zeros(2)}, lambda model, _: model.held["a"].add_(1)),
        ([torch.zeros(2)], lambda model, _: model.held[0].add_(1)),
        ([], lambda model, _: model.held.append(1.0)),
        (False, lambda model, _: setattr(model, "held", True)),
    ],
    ids=["count", "tensor", "array", "dict", "list", "grows", "flag"],
)
def test_state_in_an_attribute_of_a_module_is_named_once(
    held: Any, does: Callable[[Any, Tensor], Any], said: Callable[..., list[str]]
) -> None:
    (text,) = said(nn.Sequential(Model(does, held=held), nn.Linear(2, 1)))
    assert "model.0.held" in text


@pytest.mark.parametrize("what", ["count", "base", "momenta"])
def test_state_in_an_attribute_of_an_optimizer_is_named(
    what: str, said: Callable[..., list[str]]
) -> None:
    model = nn.Linear(4, 2)
    (text,) = said(model, Hidden(model.parameters(), what))
    assert f"optimizer.{what}" in text


def test_what_an_object_leaves_out_is_named(said: Callable[..., list[str]]) -> None:
    (text,) = said(nn.Linear(4, 2), progress=Progress())
    assert "progress.lost" in text
    assert "seen" not in text
    assert "shadow" not in text


def test_what_a_forward_pass_writes_anew_is_no_state(said: Callable[..., list[str]]) -> None:
    assert said(Model(cache, size=7, masks={})) == []


def test_attributes_that_a_component_holds_are_no_loss(said: Callable[..., list[str]]) -> None:
    class Saves(Model):
        def get_extra_state(self) -> Any:
            return {"held": self.held}

    assert said(Saves(add, held=0)) == []


def test_sizes_features_and_messages_of_a_forward_pass_are_no_state(
    said: Callable[..., list[str]],
) -> None:
    def note(model: Any, batch: Tensor) -> None:
        model.seq_len, model._warned = batch.shape[1], True
        model.features = [batch, batch]

    assert said(Model(note, seq_len=0, _warned=False, features=[])) == []


def test_attributes_named_in_not_state_are_not_reported(said: Callable[..., list[str]]) -> None:
    def note(model: Any, batch: Tensor) -> None:
        model.seen += 1
        model.scratch += 1

    (text,) = said(Model(note, seen=0, scratch=torch.zeros(3), not_state=("scratch",)))
    assert "model.seen" in text
    assert "scratch" not in text
    assert "not_state" in text


def test_not_state_that_is_no_tuple_of_names_is_refused(tmp_path: Path) -> None:
    model = Model(add, held=0, not_state="held")
    with pytest.raises(UsageError, match="not_state='held'"):
        CheckpointManager(tmp_path, {"model": model})
