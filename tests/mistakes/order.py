"""Mistakes in the order of calls, and scripts that get in each other's way."""

from __future__ import annotations

import os
import threading

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast

THEME = Theme("Order of calls")
case = THEME.case


@case("the script never calls `resume`", names="resume()")
def _(user: User) -> None:
    manager = user.manager(keep="last:1")
    user.train()
    manager.save(1).wait()


@case("`load` of parts in place of `resume`, and then a save", names="resume()")
def _(user: User) -> None:
    manager = user.manager()
    manager.load(components=["model"])
    user.watch(user.state)
    manager.save(4).wait()


@case("training before `resume`", names="resume", state=3)
def _(user: User) -> None:
    manager = user.manager(every="1000step")
    for step in (1, 2):
        user.train()
        manager.maybe_save(step)
    manager.resume()


@case("`resume` again after training, without a save", names="resume", state=3)
def _(user: User) -> None:
    manager = user.resumed(every="1000step")
    user.train()
    manager.maybe_save(4)
    manager.resume()


@case("the loop counts from 0 after a resume", names="step")
def _(user: User) -> None:
    manager = user.resumed()
    user.train()
    manager.save(1).wait()


@case("the loop counts steps of the epoch, not of the run", names="step")
def _(user: User) -> None:
    manager = user.resumed(every="1step")
    for step in (4, 5, 1):
        user.train()
        manager.maybe_save(step)


@case("`save` after `close`", names="closed")
def _(user: User) -> None:
    manager = user.manager()
    manager.close()
    manager.save(4)


@case("`resume` after the `with` block", names="closed")
def _(user: User) -> None:
    with user.manager() as manager:
        pass
    manager.resume()


@case("`save` from another thread", names="thread", state=3)
def _(user: User) -> None:
    manager = user.resumed()
    errors = []

    def save():
        try:
            manager.save(4).wait()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    for error in errors:
        raise error


@case("a `Stop` that was never entered", names="with", state=3)
def _(user: User) -> None:
    user.resumed(every="1step", stop=holdfast.Stop()).maybe_save(4)


@case(
    "`load` of an older checkpoint and then a save: a rollback nobody said", names="step", state=2
)
def _(user: User) -> None:
    manager = user.resumed()
    manager.load("step=2")
    manager.save(3).wait()


@case("`validate` changes and a save that failed is not looked at", names="x")
def _(user: User) -> None:
    manager = user.resumed(user.new)
    user.state["progress"]["bad"] = lambda: None
    user.watch(user.state)
    manager.save(1)


@case("a child of `os.fork` saves", names="fork", state=3)
def _(user: User) -> None:
    manager = user.resumed()
    with holdfast_pid():
        manager.save(4)


def holdfast_pid():
    from unittest import mock

    return mock.patch("holdfast.manager.os.getpid", lambda: -1)


@case("the model is replaced after the manager was made", names="", state=3)
def _(user: User) -> None:
    from tests.mistakes.user import new_state

    manager = user.resumed()
    other = new_state()
    user.state["model"] = other["model"]
    user.watch(user.state)
    manager.save(4).wait()


@case('`on_existing="error"` and a run that went back', names="step 3", state=2)
def _(user: User) -> None:
    manager = user.manager(on_existing="error")
    manager.resume("step=2")
    user.watch(user.state)
    user.train()
    manager.save(3)
