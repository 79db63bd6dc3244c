"""Claims about rules that are written as text."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.policy.rule import BySaver, Rule
from holdfast.policy.rules import (
    All,
    Best,
    Budget,
    ByClass,
    Daily,
    EveryNth,
    Hourly,
    Last,
    Within,
    parse_rule,
)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("all", All()),
        ("last:3", Last(3)),
        ("last:3:permanent", Last(3, save_class="permanent")),
        ("last:1:ephemeral", Last(1, save_class="ephemeral")),
        ("best:loss", Best("loss")),
        ("best:loss:max", Best("loss", mode="max")),
        ("best:loss:3", Best("loss", 3)),
        ("best:eval/loss:min:2", Best("eval/loss", 2)),
        ("best:eval/acc:wait=5", Best("eval/acc", wait=5)),
        ("best:eval/acc:max:3:wait=5", Best("eval/acc", 3, "max", wait=5)),
        ("best:group:loss:max:2", Best("group:loss", 2, "max")),
        ("every:1000step", EveryNth("1000step")),
        ("hourly", Hourly()),
        ("hourly:24", Hourly(24)),
        ("daily:7", Daily(7)),
        ("within:36h", Within("36h")),
        ("budget:500", Budget(500)),
        ("budget:1.5TiB", Budget(3 * 2**39)),
        ("budget:500GB", Budget(5 * 10**11)),
        ("remove:all_non_permanent", ByClass("all_non_permanent")),
        ("last:3, best:loss", Last(3) | Best("loss")),
        ("main=last:3", Last(3)),
        ("last:3,weights=last:24", BySaver({"main": Last(3), "weights": Last(24)})),
        (
            "weights = last:1, last:3, weights=best:loss=b without rng",
            BySaver({"weights": Last(1) | Best("loss=b").then_drop("rng"), "main": Last(3)}),
        ),
        ("best:loss=b", Best("loss=b")),
        ("last:1,daily without optimizer+rng", Last(1) | Daily().then_drop("optimizer", "rng")),
    ],
)
def test_a_text_spells_its_rule(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "last",
        "last:",
        "last:0",
        "last:-1",
        "last:three",
        "last:3:",
        "last:3:precious",
        "last:permanent",
        "last:3,",
        "newest:3",
        "all:3",
        "best:",
        "best:loss:min:0",
        "every:1000",
        "daily:x",
        "within:7",
        "budget:much",
        "budget:5 parsecs",
        "remove:some",
        "last:3 without ",
        "=last:3",
        "Weights=last:3",
        "weights=",
        "last:3 without Optimizer",
        "last:9999999999999999999999",
    ],
)
def test_a_text_that_spells_no_rule_is_refused(text: str) -> None:
    """D47, D48."""
    with pytest.raises(UsageError):
        parse_rule(text)


def test_a_metric_with_a_comma_is_refused_in_words() -> None:
    """Issue 20, line 10: what stands behind the comma is another rule."""
    with pytest.raises(UsageError, match=r"unknown rule.*comma"):
        parse_rule("best:val/acc,top5:max")
    assert parse_rule("best:loss,all") == Best("loss") | All()


def test_a_class_below_a_rule_is_known_and_takes_no_name_of_its_parent() -> None:
    class Newest(Last):
        """The newest, and a spelling of its own."""

        spelled = "newest"

        @classmethod
        def parse(cls, value: str) -> Last:
            return cls(int(value))

    class Same(Last):
        """The spelling of its parent, which stays the parent's."""

        spelled = "last"

    assert type(parse_rule("newest:2")) is Newest
    assert type(parse_rule("last:2")) is Last
    Newest.spelled = ""  # classes of other tests are not to be listed in messages
    del Same
