"""Counters come from the checkpoint, and from nothing that is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Counters, Counts
from train.small import make


def test_counters_come_back() -> None:
    """D34."""
    counters = Counters(step=5, epoch=1, batch=2, samples=40, tokens=None)
    again = Counters()
    again.load_state_dict(counters.state_dict())
    assert again == counters
    assert (again.timestamp.step, again.timestamp.epoch, again.timestamp.samples) == (5, 1, 40)


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"step": True}, {"epoch": None}, {"batch": 1.5}, {"tokens": "1"}, {"more": 1}],
)
def test_what_are_no_counters_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    counters = Counters(step=3)
    with pytest.raises(UsageError):
        counters.load_state_dict({**Counters(step=4).state_dict(), **change})
    assert counters == Counters(step=3)


def test_what_is_still_to_be_validated_is_stored_only_if_there_is_any() -> None:
    """So that older checkpoints have counters, too."""
    counters = Counters(step=5)
    assert "unvalidated" not in counters.state_dict()
    counters.unvalidated = ["", "long"]
    again = Counters()
    again.load_state_dict(counters.state_dict())
    assert again.unvalidated == ["", "long"]
    again.load_state_dict(Counters(step=6).state_dict())
    assert again.unvalidated == []
    with pytest.raises(UsageError, match="unvalidated"):
        again.load_state_dict({**counters.state_dict(), "unvalidated": "all"})


def test_an_epochs_end_begins_the_next_one() -> None:
    counters = Counters(batch=7)
    counters.end_epoch()
    assert (counters.epoch, counters.batch) == (1, 0)


def test_a_step_counts_all_batches_of_its_window() -> None:
    counters = Counters(step=1, batch=3, samples=12)
    counters.add_step(3, 10, None)
    assert counters == Counters(step=2, batch=6, samples=22, tokens=None)


def test_totals_go_on_where_another_trainer_ended() -> None:
    """D34, D25: and the goal is not passed."""
    store, counts = MemoryStore(), Counts(samples=len, tokens=torch.numel)
    make(store, counts=counts).fit(2)
    again = make(store, counts=counts)
    again.fit(4)
    found = (again.counters.step, again.counters.samples, again.counters.tokens)
    assert found == (4, 4 * 2, 4 * 2 * 4)
