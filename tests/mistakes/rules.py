"""Metrics without a direction or of other weights, lost rollbacks, changed settings, threads."""

from __future__ import annotations

import shutil
import threading

import torch
from tests.mistakes.table import Theme
from tests.mistakes.user import User
from torch.optim.lr_scheduler import ReduceLROnPlateau

import holdfast
from holdfast.checkpoints import StateHooks
from holdfast.train import EarlyStopping, Schedule

RULES = Theme("Metrics, rollbacks and settings")
case = RULES.case


def trains(user: User, metrics, **options) -> None:
    """A new run of the user's loop, with metrics by step, that saves every fourth step."""
    manager = user.manager(user.new, every="4step", **options)
    manager.expect_metrics()
    for step in range(1, 13):
        user.train()
        manager.maybe_save(step, metrics=metrics(step))
        manager.wait()


@case('`keep="last:1,best:score"`', names="'score'")
def _(user: User) -> None:
    user.manager(keep="last:1,best:score")


@case('`holdfast.Best("neg_mse")`', names="'neg_mse'")
def _(user: User) -> None:
    holdfast.Best("neg_mse")


@case('`load("best:elo")` without a direction', names="best:elo:max")
def _(user: User) -> None:
    user.manager().load("best:elo")


@case('`EarlyStopping("val/score")` without a mode', names="mode='max'")
def _(user: User) -> None:
    EarlyStopping("val/score")


@case(
    '`Schedule(ReduceLROnPlateau, every="evaluation", metric="val/accuracy")`',
    names="mode='max'",
    state=None,
)
def _(user: User) -> None:
    plateau = Schedule(ReduceLROnPlateau, every="evaluation", metric="val/accuracy")
    user.trainer(scheduler=plateau, validate=[torch.zeros(1, 4)])


@case(
    "`maybe_save` is given an accuracy at each step, and the best lies between two saves",
    names="accuracy",
)
def _(user: User) -> None:
    trains(user, lambda step: {"accuracy": 1 - abs(step - 6) / 10}, keep="last:9,best:accuracy")


@case("the last known `val_loss` is passed at each step", names="val_loss")
def _(user: User) -> None:
    trains(user, lambda step: {"val_loss": step // 7}, keep="last:9,best:val_loss")


@case("the run went back to step 2, and its folder was moved away", names="step=3")
def _(user: User) -> None:
    with user.manager() as manager:
        manager.resume("step=2")
    user.watch(user.state)
    yield
    shutil.move(user.folder_of(2), user.folder)
    user.manager().resume()


@case("a second trial in the root of the first, with another `config`", names="dropout")
def _(user: User) -> None:
    with user.manager(config={"model": {"dropout": 0.1}}) as manager:
        manager.resume()
        user.train()
        manager.save(4, wait=True)
    yield
    with user.manager(config={"model": {"dropout": 0.5}}) as manager:
        manager.resume()


@case('`every=On("exception")` in your own loop, which raises', names='On("exception")')
def _(user: User) -> None:
    try:
        with user.manager(user.new, every=holdfast.On("exception")) as manager:
            manager.maybe_save(1)
            raise RuntimeError("the loop")
    except RuntimeError:
        pass


@case("two threads save at once", names="thread")
def _(user: User) -> None:
    failed = []

    def other() -> None:
        try:
            manager.save(2)
        except holdfast.errors.HoldfastError as error:
            failed.append(error)

    def before_save(now, metrics):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return []

    manager = user.manager(user.new, hooks=StateHooks(before_save=before_save))
    manager.save(1, wait=True)
    raise failed[0]
