"""Claims about rules and intervals as texts: what is read back decides the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.policy.rule import BySaver, Candidate, Rule, flat
from holdfast.policy.rules import (
    All,
    Best,
    Budget,
    ByClass,
    Daily,
    EveryNth,
    Hourly,
    Last,
    Nothing,
    Within,
)
from holdfast.policy.savers import SavePolicy, SideSaver
from holdfast.policy.schedule import (
    SaveSchedule,
    policies_from_texts,
    policy_of,
    rule_of,
    rule_text,
)
from holdfast.policy.triggers import AtEnd, AtStart, Every, On, When


class Own(Rule):
    """A rule that a user wrote."""

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        return {}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (All(), "all"),
        (Nothing(), "0"),
        (Last(3), "last:3"),
        (Last(3, save_class="permanent"), "last:3:permanent"),
        (Best("loss", 2), "best:loss:min:2"),
        (Best("loss", wait=5), "best:loss:min:1:wait=5"),
        (Best("a:b=c", mode="max"), "best:a:b=c:max:1"),
        (EveryNth("1000step"), "every:1000step"),
        (EveryNth("6h"), "every:21600s"),
        (Hourly(), "hourly"),
        (Daily(7), "daily:7"),
        (Within("0.5s"), "within:0.5s"),
        (Budget(10**11), "budget:100000000000"),
        (ByClass("all_non_permanent"), "remove:all_non_permanent"),
        (
            (Last(3) | Daily()).then_drop("rng", "ema"),
            "last:3 without ema+rng,daily without ema+rng",
        ),
        (
            BySaver({"main": Last(3) | Best("loss"), "weights": All()}),
            "main=last:3,main=best:loss:min:1,weights=all",
        ),
        (BySaver({"weights": Last(2)}).then_drop("rng"), "weights=last:2 without rng"),
    ],
)
def test_a_text_makes_a_rule_that_decides_the_same(rule: Rule, text: str) -> None:
    assert rule_text(rule) == text
    assert [*flat(rule_of(text))] == [*flat(rule)]


@pytest.mark.parametrize(
    "rule", [Own(), Last(3) | Own(), Best("acc,top5"), Best("loss without b"), Last(1) | Nothing()]
)
def test_what_no_text_can_say_has_none(rule: Rule) -> None:
    assert rule_text(rule) == ""


def recorded(every: Any, *sides: SideSaver, length: str | None = None) -> Any:
    from holdfast.policy.clock import parse

    whole = None if length is None else parse(length, what="length")
    schedule = SaveSchedule(every, sides, max_duration=whole)
    return policy_of(Last(1), None, schedule, replaces=False), schedule


@pytest.mark.parametrize(
    ("every", "texts"),
    [
        ("500step", {"permanent": "500step"}),
        ("30min", {"permanent": "1800.0s"}),
        (Every("2ep") | Every("10min") | AtEnd(), {"permanent": "2ep | 600.0s"}),
        (
            SavePolicy(permanent="100step", ephemeral="10step", cooldown="5step"),
            {"permanent": "100step", "ephemeral": "10step", "cooldown": "5step"},
        ),
    ],
)
def test_intervals_are_read_back(every: Any, texts: dict[str, str]) -> None:
    policy, _ = recorded(every)
    assert policy.every == {"main": texts}
    again = SaveSchedule(policies_from_texts(policy.every)["main"])
    assert policy_of(Last(1), None, again, replaces=False).every == policy.every


def test_a_fraction_of_the_run_is_recorded_as_what_it_is() -> None:
    assert recorded("0.1dur", length="1000step")[0].every == {"main": {"permanent": "100step"}}
    assert recorded("0.1dur", length="1005step")[0].every == {}


@pytest.mark.parametrize(
    "every", ["auto", lambda now, metrics, event: True, AtStart() | When(bool), On("epoch"), None]
)
def test_what_no_counter_tells_is_left_out(every: Any) -> None:
    assert recorded(every)[0].every == {}


def test_the_parts_of_side_savers_are_recorded() -> None:
    side = SideSaver("weights", every="1ep", components=["model"])
    policy, _ = recorded("10step", side)
    assert policy.parts == {"weights": ("model",)}
    assert policy.every == {"main": {"permanent": "10step"}, "weights": {"permanent": "1ep"}}


def test_a_text_of_others_that_is_too_long_is_refused_at_once() -> None:
    """A checkpoint may come from a stranger; a rule of 100,000 parts took three minutes."""
    for read in (rule_of, lambda text: policies_from_texts({"main": {"permanent": text}})):
        with pytest.raises(UsageError, match="700,006 characters; at most 10,000"):
            read("last:1," * 100_000 + "last:1")
