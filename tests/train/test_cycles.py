"""Cycles: rounds of training of a fixed length, for triggers. And options that are a manager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import CheckpointManager, On
from holdfast.errors import UsageError
from holdfast.policy.triggers import Trigger
from holdfast.train import Counts
from train.small import make


def saves(root: Path) -> list[tuple[int, int | None, int | None]]:
    """Step, cycle and step within the cycle of every checkpoint, oldest first."""
    found = CheckpointManager(root, make(root).state).list()
    stamps = [checkpoint.timestamp for checkpoint in reversed(found)]
    return [(now.step, now.cycle, now.step_in_cycle) for now in stamps]


@pytest.mark.parametrize(
    ("every", "expected"),
    [("2cycle", [(20, 2, 0), (40, 4, 0)]), (On("cycle"), [(10 * n, n, 0) for n in range(1, 5)])],
)
def test_saves_follow_cycles_also_over_a_resume(
    tmp_path: Path, every: str | Trigger, expected: list[tuple[int, int, int]]
) -> None:
    """Five steps an epoch; a cycle is two epochs."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    make(whole, counts=Counts(cycle="2ep"), every=every).fit("8ep")
    assert saves(whole) == expected
    make(cut, counts=Counts(cycle="2ep"), every=every).fit(13)
    make(cut, counts=Counts(cycle="2ep"), every=every).fit("8ep")
    assert saves(cut) == sorted([*expected, (13, 1, 3)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": "2cycle"}, r"give counts=Counts\(cycle=…\)"),
        ({"every": On("cycle")}, "no event 'cycle'"),
    ],
)
def test_cycles_that_could_not_be_counted_are_refused(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    """D47."""
    with pytest.raises(UsageError, match=says):
        make(tmp_path, **options)


@pytest.mark.parametrize(
    ("cycle", "says"),
    [("2h", "cycle='2h'"), ("100tok", "tokens are not counted"), ("0ep", "cycle")],
)
def test_a_cycle_of_what_is_not_counted_is_refused(cycle: str, says: str) -> None:
    """D47."""
    with pytest.raises(UsageError, match=says):
        Counts(cycle=cycle)


def test_the_checkpoints_of_a_trainer_have_the_label_that_is_wanted(tmp_path: Path) -> None:
    made = make(tmp_path, label="{run_name}-{step:04d}", run_name="gpt", every="4step")
    made.fit(5)
    found = CheckpointManager(tmp_path, made.state).list()
    assert [c.folder.split(".")[0] for c in found] == ["gpt-0005", "gpt-0004"]
    with pytest.raises(UsageError, match="nothing"):
        make(tmp_path, label="{nothing}")


@pytest.mark.parametrize(
    "options", [{"keep": 4}, {"stop": "SIGTERM"}, {"takeover": "no"}, {"memory_budget": 1}]
)
def test_what_a_manager_would_refuse_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        make(tmp_path, **options)
