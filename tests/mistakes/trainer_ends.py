"""Longer schedules, averages, predictions, and the end of a run in two tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User
from torch import nn
from torch.optim import lr_scheduler as schedules

import holdfast
from holdfast.data import Loader
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from holdfast.train import SWA, Csv

THEME = Theme("Schedules, averages and ends of runs")
case = THEME.case


def longer(did: str, names: str, first: Any, second: Any, **options: Any) -> None:
    """A second `fit` of a run whose script has another schedule."""

    @case(did, names=names, state=None)
    def _(user: User) -> None:
        user.trainer(scheduler=first).fit("3step")
        user.trainer(scheduler=second).fit("4step", **options)


def one_cycle(total_steps: int) -> Any:
    return lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=total_steps)


def warm_up(t_max: int, milestone: int) -> Any:
    return lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1), schedules.CosineAnnealingLR(optimizer, t_max)],
        [milestone],
    )


longer(
    "a longer `OneCycleLR` in the second run",
    "override=['scheduler.total_steps']",
    one_cycle(6),
    one_cycle(12),
)
longer(
    "a longer schedule inside `SequentialLR`", "scheduler.1.T_max", warm_up(6, 2), warm_up(12, 2)
)
longer("other milestones of `SequentialLR`", "scheduler.milestones", warm_up(6, 2), warm_up(6, 5))
longer(
    "another `max_lr` of `CyclicLR`",
    "scheduler.max_lr",
    lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.5, cycle_momentum=False),
)
longer(
    '`override=["scheduler.total_step"]`',
    "'scheduler.total_step'",
    one_cycle(6),
    one_cycle(12),
    override=["scheduler.total_step"],
)
longer(
    '`override=["total_steps"]` for a schedule shorter than what is done',
    "ends before the 3 steps",
    one_cycle(9),
    one_cycle(2),
    override=["total_steps"],
)


@case("a later goal, so that `SWA` starts later", names="begins again", state=None)
def _(user: User) -> None:
    plan = SWA(start="0.5dur", every="1step")
    user.trainer(swa=plan).fit("3step")
    user.trainer(swa=plan).fit("9step")


@case("an iterator as `SWA(batch_norm=…)`", names="batch_norm gave no batch", state=None)
def _(user: User) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = SWA(start="1step", every="1step", batch_norm=iter([]))
    user.trainer(model=model, optimizer=optimizer, swa=plan).fit("2step")


def predictions(user: User) -> tuple[Any, Loader]:
    trainer = user.trainer()
    data = Loader(torch.ones(4, 4), batch_size=2, shuffle=False)
    trainer.predict(data, to="predictions")
    return trainer, Loader(torch.zeros(6, 4), batch_size=2, shuffle=False)


@case("`predict` of other data into the folder of the first", names="another folder", state=None)
def _(user: User) -> Any:
    trainer, other = predictions(user)
    yield
    trainer.predict(other, to="predictions")


@case("`Csv` writes to an existing file of another kind", names="name another file", state=None)
def _(user: User) -> Any:
    Path("table.csv").write_text("name,age\nann,7\n")
    yield
    user.trainer(callbacks=[Csv("table.csv")]).fit("2step")


def away(**options: Any) -> holdfast.Tiered:
    remote = FaultyStore(
        MemoryStore("remote"), [Fault(kind="fail", op="put", key="step-*", times=None)]
    )
    return holdfast.Tiered("runs/two", remote, close_timeout_s=0, **options)


@case("a run ends while the remote tier is away", names="not uploaded", state=None)
def _(user: User) -> None:
    user.trainer(away()).fit("2step")


@case(
    'a run ends while the remote tier is away, with `on_upload_failure="raise"`',
    names="not uploaded",
    state=None,
)
def _(user: User) -> None:
    user.trainer(away(on_upload_failure="raise")).fit("2step")
