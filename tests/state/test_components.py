"""Which objects can be components, and how each is saved."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.state.capture.capture import capture
from holdfast.state.components import check_state, kind_of


class Stateful(UserDict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class StatefulDict(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_every_kind_of_component_is_known() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert kind_of(model) == "module"
    assert kind_of(optimizer) == "optimizer"
    assert kind_of(torch.optim.lr_scheduler.StepLR(optimizer, 1)) == "object"
    assert kind_of(torch.Generator()) == "generator"
    assert kind_of(np.random.default_rng()) == "generator"
    assert kind_of(np.random.RandomState()) == "generator"
    assert kind_of(random.Random()) == "generator"
    assert kind_of({}) == "tree"
    assert kind_of([]) == "tree"
    assert kind_of(OrderedDict()) == "tree"
    assert kind_of(Stateful()) == "object"
    assert kind_of(StatefulDict()) == "object"


def test_an_optimizer_with_a_patched_state_dict_is_left_to_itself() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state_dict = dict  # type: ignore[method-assign]
    assert kind_of(optimizer) == "object"


@pytest.mark.parametrize("value", [1, "x", None, (1,), {1}, torch.ones(1), np.ones(1), object(),
                                   nn.Linear, Stateful])  # fmt: skip
def test_what_cannot_be_updated_in_place_is_refused_and_the_message_says_why(value: Any) -> None:
    with pytest.raises(UsageError, match="in place"):
        check_state({"x": value})


def test_every_wrong_component_is_listed() -> None:
    with pytest.raises(UsageError) as caught:
        capture({"Bad Name": {}, "x": 1, "y": {}, 3: {}})  # type: ignore[dict-item]
    assert all(text in str(caught.value) for text in ("Bad Name", "x: a int", "3: "))


@pytest.mark.parametrize("state", [{}, [], None])
def test_a_state_of_nothing_is_refused(state: Any) -> None:
    with pytest.raises(UsageError):
        check_state(state)
