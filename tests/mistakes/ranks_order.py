"""Mistakes of scripts with several ranks, which are threads here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.mistakes.table import Theme
from tests.mistakes.user import User, new_state

import holdfast
from holdfast.testing import ThreadCoordinator

THEME = Theme("Several ranks")
case = THEME.case
Act = Callable[[holdfast.CheckpointManager], Any]
LIMIT_S = 0.6


@contextmanager
def impatient() -> Iterator[None]:
    """Ranks wait for moments only."""
    with (
        mock.patch("holdfast.ranks.coordinator.FIRST_S", 0.1),
        mock.patch("holdfast.saving.distributed.GRACE_S", 0.2),
        mock.patch("holdfast.loading.distributed.GRACE_S", 0.2),
    ):
        yield


def several(user: User, *acts: Act, **options: Any) -> None:
    """Each act on a rank of its own; raises the error of the first rank that has one."""
    errors: dict[int, BaseException] = {}

    def run(coordinator: ThreadCoordinator, act: Act) -> None:
        state = user.state if coordinator.is_leader else new_state()
        given = {"save_timeout_s": LIMIT_S, "preflight": False, "takeover": True, **options}
        try:
            with holdfast.CheckpointManager(user.root, state, ranks=coordinator, **given) as one:
                act(one)
        except BaseException as error:
            errors[coordinator.rank] = error

    ranks = ThreadCoordinator.for_ranks(len(acts))
    with impatient():
        threads = [
            threading.Thread(target=run, args=pair) for pair in zip(ranks, acts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for _, error in sorted(errors.items()):
        raise error


def saves(step: int = 9, **options: Any) -> Act:
    return lambda manager: manager.save(step, **options).wait()


def nothing(manager: holdfast.CheckpointManager) -> None:
    """This rank calls nothing."""


@case("`if rank == 0: manager.save(step)`", names="Every rank must call")
def _(user: User) -> None:
    several(user, saves(), nothing)


@case("`save` on all ranks but rank 0", names="rank 0")
def _(user: User) -> None:
    several(user, nothing, saves())


@case("`if rank == 0: manager.resume()`", names="Every rank must call")
def _(user: User) -> None:
    several(user, lambda manager: manager.resume(), nothing)


@case("`load` on rank 1 only", names="rank 0")
def _(user: User) -> None:
    several(user, nothing, lambda manager: manager.load())


@case("`maybe_save` on rank 0 only", names="Every rank must call")
def _(user: User) -> None:
    def act(manager: holdfast.CheckpointManager) -> None:
        pending = manager.maybe_save(9)
        assert pending is not None
        pending.wait()

    several(user, act, nothing, every="1step")


@case("ranks save with other steps", names="step=10")
def _(user: User) -> None:
    several(user, saves(9), saves(10))


@case("ranks save with other epochs", names="epoch=2")
def _(user: User) -> None:
    several(user, saves(9, epoch=1), saves(9, epoch=2))


@case("one rank saves permanently, another one does not", names="save_class='ephemeral'")
def _(user: User) -> None:
    several(user, saves(9), saves(9, save_class="ephemeral"))


@case("ranks save with other tags", names="tags=['good']")
def _(user: User) -> None:
    several(user, saves(9), saves(9, tags=["good"]))


@case("each rank passes its own loss", names="metrics['loss'] is 0.5 on rank 0, 0.75 on rank 1")
def _(user: User) -> None:
    def measured(loss: float) -> Act:
        def act(manager: holdfast.CheckpointManager) -> None:
            manager.start_new()
            manager.save(9, metrics={"loss": loss}).wait()

        return act

    several(user, measured(0.5), measured(0.75), save_timeout_s=60.0)


@case("ranks resume from other checkpoints", names="which='step=2'")
def _(user: User) -> None:
    several(user, lambda manager: manager.resume(), lambda manager: manager.resume("step=2"))


@case("ranks load other components", names="components=['model']")
def _(user: User) -> None:
    several(
        user,
        lambda manager: manager.load(),
        lambda manager: manager.load(components=["model"]),
    )


@case("ranks load with other names", names="rename={'model.0': 'model.1'}")
def _(user: User) -> None:
    several(
        user,
        lambda manager: manager.load(),
        lambda manager: manager.load(rename={"model.0": "model.1"}),
    )


@case("one rank resumes while the other one loads", names="it calls load")
def _(user: User) -> None:
    several(user, lambda manager: manager.resume(), lambda manager: manager.load())


@case("one rank saves while the other one resumes", names="Every rank must call")
def _(user: User) -> None:
    several(user, saves(), lambda manager: manager.resume())


@case("`ranks=None` on every rank of torchrun, with one root", names="ranks=None")
def _(user: User):
    with user.elsewhere():
        yield
        with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
            user.manager(ranks=None).resume()
