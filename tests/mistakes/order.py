"""Mistakes in the order of calls, and scripts that get in each other's way."""

from __future__ import annotations

import shutil
from unittest import mock

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast
import warm

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


@case("a `Stop` outside of a `with` statement", names="with", state=3)
def _(user: User) -> None:
    user.resumed(every="1step", stop=holdfast.Stop()).maybe_save(4)


@case("a child of `os.fork` saves", names="fork", state=3)
def _(user: User) -> None:
    manager = user.resumed()
    with mock.patch("holdfast.session.os.getpid", return_value=-1):
        manager.save(4)


@case('`on_existing="error"`, and the run went back to step 2', names="of the steps 3")
def _(user: User) -> None:
    user.manager(on_existing="error").resume("step=2")


@case("the run directory is moved during training", names="moved, deleted or unmounted")
def _(user: User) -> None:
    manager = user.resumed()
    shutil.move(user.root, user.new)
    user.train()
    manager.save(4, wait=True)


@case("the script is started twice", names="owns this run")
def _(user: User):
    with user.elsewhere():
        yield
        user.manager().resume()


@case("the script is started twice, and the second does not resume", names="owns this run")
def _(user: User):
    with user.elsewhere():
        yield
        user.train()
        user.manager().save(1)


@case("`takeover=True` while the other script runs", names="taking over")
def _(user: User):
    with user.elsewhere():
        yield
        user.goes_on(takeover=True)


@case("`save` in a script whose run another script took over", names="took the run over")
def _(user: User) -> None:
    manager = user.resumed()
    user.train()
    code = f"from tests.mistakes.user import take; take({str(user.root)!r})"
    assert warm.run(["-c", code]).returncode == 0
    manager.save(4, wait=True)


@case("a second `Stop` inside of the first", names="another Stop")
def _(user: User) -> None:
    with holdfast.Stop(), holdfast.Stop():
        pass


@case('`Stop(signals=["SIGKILL"])`', names="SIGKILL")
def _(user: User) -> None:
    holdfast.Stop(signals=["SIGKILL"])


@case('`Stop(grace="5step")`', names="5step")
def _(user: User) -> None:
    holdfast.Stop(grace="5step")
