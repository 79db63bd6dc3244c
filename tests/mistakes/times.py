"""Mistakes in times and units."""

from __future__ import annotations

from tests.mistakes.table import Theme
from tests.mistakes.user import User

import holdfast

THEME = Theme("Times and units")
case = THEME.case


def refused(did: str, names: str, **options):
    @case(did, names=names)
    def _(user: User) -> None:
        user.manager(
            **{name: value() if callable(value) else value for name, value in options.items()}
        )


refused("`every=500`", "every=500", every=500)
refused('`every="500"`', "500", every="500")
refused('`every="500 stpes"`', "stpes", every="500 stpes")
refused('`every="0step"`', "0step", every="0step")
refused('`every="-5step"`', "-5step", every="-5step")
refused('`every="1.5step"`', "1.5step", every="1.5step")
refused('`every="0.5ep"` of a manager', "0.5ep", every="0.5ep")
refused('`every="5iter"`', "iter", every="5iter")
refused('`every="1e3"`', "1e3", every="1e3")
refused('`every="10k steps"`', "10k", every="10k steps")
refused('`every="epoch"`', "epoch", every="epoch")
refused('`every="0.1dur"` without `max_duration`', "0.1dur", every="0.1dur")
refused('`every="0.1dur", max_duration="100"`', "100", every="0.1dur", max_duration="100")
refused('`every="2dur"`', "2dur", every="2dur", max_duration="10step")
refused("`every=holdfast.At()`", "At", every=lambda: holdfast.At())
refused("`every=holdfast.At(100)`", "100", every=lambda: holdfast.At(100))
refused("`every=holdfast.WallClock(30)`", "30", every=lambda: holdfast.WallClock(30))
refused(
    '`every=holdfast.WallClock("30step")`', "30step", every=lambda: holdfast.WallClock("30step")
)
refused("`every=holdfast.EveryNth`", "EveryNth", every=lambda: holdfast.EveryNth("5step"))
refused("`keep=holdfast.Every`", "keep", keep=lambda: holdfast.Every("5step"))
refused("`keep=holdfast.EveryNth(1000)`", "1000", keep=lambda: holdfast.EveryNth(1000))
refused('`keep=holdfast.Within("36")`', "36", keep=lambda: holdfast.Within("36"))
refused("`keep=holdfast.Hourly(0)`", "0", keep=lambda: holdfast.Hourly(0))
refused('`keep=holdfast.Last("3")`', "'3'", keep=lambda: holdfast.Last("3"))
refused(
    "an ephemeral save less often than the permanent",
    "ephemeral",
    every=lambda: holdfast.SavePolicy(permanent="1000step", ephemeral="2000step"),
)
refused(
    "a cool-down that leaves out all",
    "cooldown",
    every=lambda: holdfast.SavePolicy(permanent="100step", ephemeral="50step", cooldown="60step"),
)
refused(
    "a cool-down and nothing ephemeral",
    "cooldown",
    every=lambda: holdfast.SavePolicy(permanent="100step", cooldown="60step"),
)
refused('`save_timeout_s="10min"`', "save_timeout_s", save_timeout_s="10min")
refused("`save_timeout_s=0`", "save_timeout_s=0", save_timeout_s=0)
refused("`Auto(overhead=5)`", "overhead=5", every=lambda: holdfast.Auto(overhead=5))
refused(
    '`Auto(at_least="1h", at_most="10min")`',
    "at_",
    every=lambda: holdfast.Auto(at_least="1h", at_most="10min"),
)


@case('`every="1ep"` in a loop that does not count epochs', names="epoch", state=3)
def _(user: User) -> None:
    user.resumed(every="1ep").maybe_save(4)


@case('`keep=holdfast.EveryNth("1ep")` in a loop that does not count epochs', names="ep")
def _(user: User) -> None:
    user.goes_on(keep=holdfast.EveryNth("1ep"))


@case("`maybe_save` without `every`", names="every", state=3)
def _(user: User) -> None:
    user.resumed().maybe_save(4)


@case("the step number decreases", names="step", state=3)
def _(user: User) -> None:
    user.resumed().save(1).wait()


@case("the number of samples decreases", names="samples", state=3)
def _(user: User) -> None:
    manager = user.resumed()
    manager.save(4, samples=100).wait()
    manager.save(5, samples=10).wait()
