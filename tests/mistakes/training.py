"""Mistakes with the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User, loss_of
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import Loader
from holdfast.train import Callback, Counts, EarlyStopping, Validation

THEME = Theme("Trainer")
case = THEME.case


def refused(did: str, names: str, **options: Any) -> None:
    """A Trainer that is not made."""

    @case(did, names=names)
    def _(user: User) -> None:
        user.trainer(**{n: v() if callable(v) else v for n, v in options.items()})


def fails(did: str, names: str, until: Any = "2step", **options: Any) -> None:
    """A Trainer whose `fit` fails, or warns."""

    @case(did, names=names, state=None)
    def _(user: User) -> None:
        given = {
            n: v() if getattr(v, "__name__", "") == "<lambda>" else v for n, v in options.items()
        }
        user.trainer(**given).fit(until)


refused("`every=500`", "every=500", every=500)
refused('`every="1ktok"` without tokens in `counts`', "1ktok", every="1ktok")
refused('`every="1000tok"` without tokens in `counts`', "tokens", every="1000tok")
refused('`every="1cycle"` without a cycle in `counts`', "cycle", every="1cycle")
refused(
    '`every=holdfast.On("signal"), stop=None`',
    "signal",
    every=lambda: holdfast.On("signal"),
    stop=None,
)
refused('`precision="float8"`', "float8", precision="float8")
refused("`accumulate=0`", "accumulate=0", accumulate=0)
refused("`clip=-1`", "-1", clip=-1)
refused("`ema=1.5`", "1.5", ema=1.5)
refused("`ema=1`", "ema", ema=1)
refused('`unhealthy="ignore"`', "ignore", unhealthy="ignore")
refused('`device="gpu"`', "gpu", device="gpu")
refused("`seed=-1`", "seed=-1", seed=-1)
refused("`log_every=0`", "log_every=0", log_every=0)
refused('`counts=Counts(cycle="2")`', "'2'", counts=lambda: Counts(cycle="2"))
refused("`skip_steps=[5]`", "5", skip_steps=lambda: [5])
refused('`keep="last3"`', "last3", keep="last3")
refused(
    "`data` is a torch `DataLoader`",
    "holdfast.data.Loader",
    data=lambda: DataLoader(torch.zeros(4, 4)),
)
refused("`data` is a list", "list", data=lambda: [torch.zeros(2, 4)])
refused(
    "`optimizer` of another model",
    "no component holds",
    optimizer=lambda: torch.optim.AdamW(nn.Linear(2, 2).parameters()),
)
refused(
    "two schedulers of one group",
    "scheduler",
    scheduler=lambda: [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    ],
)
refused(
    "`scheduler=ReduceLROnPlateau`",
    "ReduceLROnPlateau",
    scheduler=lambda: lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
)
refused('`state={"model": …}`', "model", state=lambda: {"model": nn.Linear(1, 1)})
refused(
    '`EarlyStopping("val/loss", patience=0)`',
    "patience",
    callbacks=lambda: [EarlyStopping("val/loss", patience=0)],
)
refused(
    '`Validation(every="500")`',
    "500",
    validate=lambda: Validation(data=Loader(torch.zeros(4, 4), batch_size=2), every="500"),
)
refused(
    "`Validation(every=0.5)`, meant as half of an epoch",
    "'0.5ep'",
    validate=lambda: Validation(data=Loader(torch.zeros(4, 4), batch_size=2), every=0.5),
)
refused(
    "two validations of one name",
    "name",
    validate=lambda: [
        Validation(data=Loader(torch.zeros(4, 4), batch_size=2)),
        Validation(data=Loader(torch.zeros(4, 4), batch_size=2)),
    ],
)
SAME = Loader(torch.zeros(4, 4), batch_size=2)
refused("`validate` is the loader that is trained on", "trained on", data=SAME, validate=SAME)


class Mistyped(Callback):
    def on_step_end(self, training: Any, metrics: Any) -> None:
        """Never called."""


refused(
    "a callback whose hook is called `on_step_end`", "on_step_end", callbacks=lambda: [Mistyped()]
)

fails('`fit("1000")`', "1000", until="1000")
fails('`fit("5iter")`', "iter", until="5iter")
fails('`fit("1e6tok")` without tokens in `counts`', "tokens", until="1e6tok")
fails("`fit(0)`", "0", until=0)
fails("`fit(1.5)`", "1.5", until=1.5)
fails("a loss that is a vector", "loss", loss=lambda: lambda m, b: m(b))
fails("a loss that is a number of Python", "loss", loss=lambda: lambda m, b: 0.5)
fails("a loss that becomes NaN", "nan", loss=lambda: lambda m, b: loss_of(m, b) * float("nan"))
fails(
    '`keep=holdfast.Best("val/los", mode="min")`',
    "val/los",
    keep=lambda: holdfast.Best("val/los", mode="min"),
    every="1step",
)
fails(
    '`EarlyStopping("val/los", mode="min", patience=3)`',
    "val/los",
    callbacks=lambda: [EarlyStopping("val/los", mode="min", patience=3)],
    validate=lambda: Validation(data=Loader(torch.zeros(4, 4), batch_size=2), every="1step"),
)


class Broken(Callback):
    def step_end(self, training: Any, metrics: Any) -> None:
        raise ValueError("broken")


fails("a callback that raises", "Broken", callbacks=lambda: [Broken()])


class SavesInside(Callback):
    def before_optimizer_step(self, training: Any) -> None:
        training.manager.save(1)


fails(
    "a callback that saves in the middle of a step",
    "between steps only",
    callbacks=lambda: [SavesInside()],
)


@case("`fit` asks for fewer steps than are done", names="already", state=None)
def _(user: User) -> None:
    user.trainer().fit("3step")
    user.trainer().fit("2step")


@case("`trainer.validate()` without `validate=`", names="validate")
def _(user: User) -> None:
    user.trainer().validate()


@case('`trainer.validate_all(["step=99"])`', names="99", state=None)
def _(user: User) -> None:
    trainer = user.trainer(validate=Loader(torch.zeros(4, 4), batch_size=2))
    trainer.fit("2step")
    list(trainer.validate_all(["step=99"]))


@case("another batch size in the second run", names="batch_size", state=None)
def _(user: User) -> None:
    user.trainer(every="1step").fit("2step")
    user.trainer(data=Loader(torch.arange(40.0).reshape(10, 4), batch_size=5)).fit("4step")


@case("another learning rate in the second run", names="lr", state=None)
def _(user: User) -> None:
    user.trainer().fit("2step")
    user.trainer(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.5)).fit("4step")


@case("a callback is gone in the second run", names="callback-earlystopping", state=None)
def _(user: User) -> None:
    held_out = Loader(torch.zeros(4, 4), batch_size=2)
    stopping = EarlyStopping("val/loss", patience=9)
    user.trainer(callbacks=[stopping], validate=held_out).fit("2step")
    user.trainer().fit("4step")


@case("the model is another one in the second run", names="model.0.weight", state=None)
def _(user: User) -> None:
    user.trainer().fit("2step")
    user.trainer(
        model=lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1)),
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
    ).fit("4step")
