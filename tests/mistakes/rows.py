"""Mistakes with starts of runs, and with what other trainers do at the start and the end."""

from __future__ import annotations

from tests.mistakes.table import Theme
from tests.mistakes.user import User

THEME = Theme("Starts and ends")
case = THEME.case


@case("`resume(required=True)` with a misspelled root", names="required")
def _(user: User) -> None:
    user.manager(user.new).resume(required=True)


@case("`start_new` after `resume`", names="start_new()", state=3)
def _(user: User) -> None:
    user.resumed().start_new()


@case('`start_new` with `on_existing="error"`', names="on_existing")
def _(user: User) -> None:
    user.manager(on_existing="error").start_new()


@case("`step=3` of the run before, after `start_new`", names="left behind")
def _(user: User) -> None:
    manager = user.manager(keep="last:1")
    manager.start_new()
    user.train()
    manager.save(1).wait()
    manager.load("step=3")


@case('`fit(…, resume="alwyas")`', names="alwyas", state=None)
def _(user: User) -> None:
    user.trainer().fit(4, resume="alwyas")  # type: ignore[arg-type]


@case('`fit(…, resume="always")` with a misspelled root', names="required", state=None)
def _(user: User) -> None:
    user.trainer().fit(4, resume="always")
