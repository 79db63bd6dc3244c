"""The demo's training process: its digest sees every leaf."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.demo.record import fast_plan
from holdfast.demo.worker import digest, make_state


def _trained() -> dict[str, Any]:
    state = make_state(fast_plan(5))
    for windows in state["data"].until(step=2):
        state["model"].loss(windows).backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()
    return state


def _flip_weight(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["model"].position.view(-1).view(torch.int32)[7] ^= 1


def _flip_moment(state: dict[str, Any]) -> None:
    next(iter(state["optimizer"].state.values()))["exp_avg_sq"].view(-1)[0] += 1e-6


def _change_rate(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["lr"] *= 1.0 + 2**-50


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "weight": _flip_weight,
    "moment": _flip_moment,
    "learning rate": _change_rate,
    "schedule": lambda state: state["scheduler"].state_dict() and state["scheduler"].step(),
    "data": lambda state: next(state["data"].until(step=1)),
    "python": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "torch": lambda _: torch.rand(()),
}


def test_the_same_training_gives_the_same_digest() -> None:
    assert digest(_trained()) == digest(_trained())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_gives_another_digest(change: Callable[[dict[str, Any]], object]) -> None:
    state = _trained()
    before = digest(state)
    change(state)
    assert digest(state) != before
