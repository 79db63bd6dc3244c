"""Schedulers: several, one for each group, and what cannot be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, ReduceLROnPlateau, StepLR

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Trainer, for_group
from train.small import make, network


def two_groups(root: Any, scheduler: Any) -> Trainer:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[2].parameters()}],
            lr=0.5,
        )

    return make(root, model=network(), optimizer=optimizer, scheduler=scheduler)


def rates(trainer: Trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizer.param_groups]


def by_group() -> list[Any]:
    return [
        for_group(1, lambda optimizer: ExponentialLR(optimizer, 0.1)),
        for_group(0, lambda optimizer: StepLR(optimizer, 2, gamma=0.5)),
    ]


def test_each_group_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    """K37."""
    trainer = two_groups(tmp_path, by_group())
    trainer.fit(3)
    assert rates(trainer) == [0.5, pytest.approx(0.5e-3)]
    assert {"scheduler-0", "scheduler-1"} <= set(trainer.state)


def test_they_are_resumed(tmp_path: Path) -> None:
    """K37."""
    two_groups(tmp_path, by_group()).fit(3)
    again, straight = two_groups(tmp_path, by_group()), two_groups(MemoryStore(), by_group())
    again.fit(5)
    straight.fit(5)
    assert rates(again) == rates(straight)
    for name in ("scheduler-0", "scheduler-1"):
        assert again.state[name].state_dict() == straight.state[name].state_dict()


def chained(optimizer: Any) -> ChainedScheduler:
    return ChainedScheduler([StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 2)])


def test_several_on_one_group_are_chained(tmp_path: Path) -> None:
    """K37: and the chain is resumed."""
    for until in (1, 2):
        trainer = two_groups(tmp_path, [for_group(0, chained), for_group(1, chained)])
        trainer.fit(until)
    assert rates(trainer) == [pytest.approx(0.025), pytest.approx(0.0125)]


@pytest.mark.parametrize(
    "schedulers",
    [
        [for_group(1, lambda optimizer: StepLR(optimizer, 1)), for_group(1, chained)],
        [for_group(1, lambda optimizer: StepLR(optimizer, 1)), chained],
        [lambda optimizer: StepLR(optimizer, 1), lambda optimizer: StepLR(optimizer, 2)],
    ],
)
def test_two_that_set_the_rate_of_one_group_are_refused(schedulers: list[Any]) -> None:
    """K37."""
    with pytest.raises(UsageError, match="numbers 0 and 1 both set"):
        two_groups(MemoryStore(), schedulers)


def test_what_is_no_scheduler_of_torch_may_share_a_group() -> None:
    class Momentum:
        def __init__(self) -> None:
            self.num_steps = 0

        def step(self) -> None:
            self.num_steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"num_steps": self.num_steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.num_steps = state["num_steps"]

    own = Momentum()
    two_groups(MemoryStore(), [own, lambda optimizer: StepLR(optimizer, 1)]).fit(3)
    assert own.num_steps == 3


def test_an_object_is_taken_as_it_is() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer = make(MemoryStore(), model=model, optimizer=optimizer, scheduler=scheduler)
    trainer.fit(2)
    assert trainer.schedulers == {"scheduler": scheduler}
    assert rates(trainer) == [0.25]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda optimizer: ReduceLROnPlateau(optimizer), "steps on a metric"),
        (lambda optimizer: None, r"no step\(\)"),
        (5, r"no step\(\)"),
        ([for_group(2, lambda optimizer: StepLR(optimizer, 1))], "2 groups"),
        ([for_group(-1, lambda optimizer: StepLR(optimizer, 1))], "2 groups"),
    ],
)
def test_what_is_no_scheduler_is_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        two_groups(MemoryStore(), scheduler)
