"""Clocks that jump."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from unittest import mock

from tests.mistakes.table import Theme
from tests.mistakes.user import User

from holdfast.ownership import process

THEME = Theme("Clocks")
case = THEME.case


@contextmanager
def shifted(by: timedelta) -> Iterator[None]:
    """The host's clock is wrong by so much."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(timezone.utc) + by

    with mock.patch.object(process, "datetime", Clock):
        yield


@case("the clock was set back by a day before the restart", names="the clock of this host")
def _(user: User) -> None:
    with shifted(timedelta(days=-1)):
        user.goes_on(keep="within:1h")


@case("the clock was set back by an hour between two saves", names="the clock of this host")
def _(user: User) -> None:
    manager = user.resumed(keep="within:1h")
    user.train()
    manager.save(4).wait()
    with shifted(timedelta(hours=-1)):
        user.train()
        manager.save(5).wait()


@case("a clock without a battery starts in 1970", names="1970")
def _(user: User) -> None:
    with shifted(datetime(1970, 1, 1, 0, 5, tzinfo=timezone.utc) - datetime.now(timezone.utc)):
        user.goes_on(keep="last:5")


@case("the clock was a year ahead during one run", names="the clock of this host")
def _(user: User):
    with shifted(timedelta(days=365)), user.doing:
        user.goes_on()
    user.begin_again()
    yield
    user.goes_on(keep="within:1h")


@case("the clock jumps ahead by a month and back, with `keep=holdfast.Daily()`", names="Daily()")
def _(user: User):
    with shifted(timedelta(days=1)), user.doing:
        user.goes_on()
    user.begin_again()
    with shifted(timedelta(days=30)), user.doing:
        user.goes_on()
    user.begin_again()
    yield
    manager = user.resumed(keep="daily,last:9")
    user.train()
    manager.save(6).wait()
