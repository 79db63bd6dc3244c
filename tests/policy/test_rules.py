"""Claims about the single rules of retention, one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.retention import decide, unmet
from holdfast.policy.rule import Candidate, Rule
from holdfast.policy.rules import Budget, ByClass, Daily, Hourly, Last, Within


def saved_at(*times: str) -> list[Candidate]:
    """Checkpoints in the order of their sequence, by when they were saved; newest first."""
    found = [
        Candidate(order=(1, n), timestamp=Timestamp(step=n), created=created)
        for n, created in enumerate(times, start=1)
    ]
    return found[::-1]


def picked(rule: Rule, newest_first: list[Candidate]) -> list[int]:
    """Sequences of what a rule picks, oldest first."""
    return sorted(newest_first[position].order[1] for position in rule.picks(newest_first))


HISTORY = saved_at(
    "2026-03-01T09:10:00+00:00",
    "2026-03-01T09:50:00+00:00",
    "2026-03-01T10:00:00+00:00",
    "2026-03-02T23:59:59+00:00",
    "2026-03-03T02:30:00+02:00",
    "2026-03-03T08:00:00+00:00",
)


def test_hourly_keeps_the_first_of_each_hour() -> None:
    """D2, D3: by the recorded time."""
    assert picked(Hourly(), HISTORY) == [1, 3, 4, 5, 6]
    assert picked(Hourly(2), HISTORY) == [5, 6]


def test_daily_keeps_the_first_of_each_day_in_utc() -> None:
    """D2, D3."""
    assert picked(Daily(), HISTORY) == [1, 4, 5]
    assert picked(Daily(2), HISTORY) == [4, 5]


@pytest.mark.parametrize(
    "created", ["", "yesterday", "2026-03-01T09:10:00", "0001-01-01T00:00+23:00"]
)
def test_a_time_that_says_nothing_is_in_no_bucket(created: str) -> None:
    assert picked(Hourly() | Daily(), saved_at(created)) == []


def test_a_clock_that_was_wrong_deletes_nothing_but_moves_a_bucket() -> None:
    """D3: order is the recorded sequence, whatever the clocks said."""
    odd = saved_at(
        "2026-03-02T00:00:00+00:00", "2031-01-01T00:00:00+00:00", "2026-03-02T01:00:00+00:00"
    )
    assert picked(Daily(), odd) == [1, 2]


def test_within_counts_back_from_the_newest() -> None:
    entries = [
        Candidate(order=(1, n), timestamp=Timestamp(step=100 * n, wall_s=1800.0 * n))
        for n in range(1, 7)
    ][::-1]
    assert picked(Within("200step"), entries) == [5, 6]
    assert picked(Within("201step"), entries) == [4, 5, 6]
    assert picked(Within("1h"), entries) == [5, 6]
    assert picked(Within("2ep"), entries) == []


def test_within_keeps_what_a_rollback_left_ahead() -> None:
    """D30: a higher count on an abandoned branch is not older."""
    entries = [
        Candidate(order=(2, 1), timestamp=Timestamp(step=150)),
        Candidate(order=(1, 3), timestamp=Timestamp(step=300)),
        Candidate(order=(1, 1), timestamp=Timestamp(step=100)),
    ]
    assert sorted(Within("50step").picks(entries)) == [0, 1]


def sized(*nbytes: int, pinned: int | None = None) -> list[Candidate]:
    """Checkpoints of these sizes, newest first."""
    return [
        Candidate(
            order=(1, len(nbytes) - n), timestamp=Timestamp(step=0), nbytes=size, pinned=n == pinned
        )
        for n, size in enumerate(nbytes)
    ]


def test_a_budget_is_filled_from_the_newest_on() -> None:
    assert sorted(Budget(10).picks(sized(4, 4, 2, 1))) == [0, 1, 2]
    assert sorted(Budget(9).picks(sized(4, 4, 2, 1))) == [0, 1]
    assert sorted(Budget(3).picks(sized(4, 4, 2, 1))) == []


def test_what_is_pinned_takes_its_room_of_the_budget_first() -> None:
    assert sorted(Budget(10).picks(sized(4, 4, 2, 4, pinned=3))) == [0, 3]


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 100))
def test_a_budget_is_kept(nbytes: list[int], limit: int) -> None:
    assert sum(nbytes[p] for p in Budget(limit).picks(sized(*nbytes))) <= limit


def by_class(*classes: str) -> list[Candidate]:
    """Checkpoints of these classes, oldest first in the call, newest first in the answer."""
    found = [
        Candidate(order=(1, n), timestamp=Timestamp(step=n), save_class=save_class)
        for n, save_class in enumerate(classes, start=1)
    ]
    return found[::-1]


def test_the_recorded_class_decides_what_goes() -> None:
    """D10, D11: not a step's divisibility by today's intervals."""
    entries = by_class("permanent", "ephemeral", "ephemeral", "permanent")
    assert picked(ByClass(), entries) == [1, 3, 4]
    assert picked(ByClass("all_non_permanent"), entries) == [1, 4]
    assert picked(ByClass("never"), entries) == [1, 2, 3, 4]


def test_milestones_are_not_counted_against_a_quota() -> None:
    """D12: permanent ones stay beside the last ephemeral ones, over any number of restarts."""
    entries = by_class("permanent", "ephemeral", "permanent", "ephemeral", "ephemeral")
    assert picked(ByClass("all_non_permanent") | Last(2), entries) == [1, 3, 4, 5]


def test_rules_that_were_rejected_or_are_going_fill_no_bucket() -> None:
    first, second = saved_at("2026-03-01T09:10:00+00:00", "2026-03-01T09:20:00+00:00")[::-1]
    rejected = Candidate(
        order=first.order, timestamp=first.timestamp, created=first.created, rejected=True
    )
    assert picked(Hourly() | Daily(), [second, rejected]) == [2]


def test_the_room_that_a_rule_needs_is_known_where_it_has_a_limit() -> None:
    assert (Hourly(24) | Daily(7)).quota() == 31
    assert (Last(3) | Last(2).then_drop("optimizer")).quota() == 5
    for rule in (Hourly(), Within("1h"), Budget(5), ByClass()):
        assert rule.quota() is None


def test_bad_settings_are_refused_at_construction() -> None:
    """D47, D48."""
    for make, match in (
        (lambda: Hourly(0), "Hourly: n=0"),
        (lambda: Daily(-1), "Daily: n=-1"),
        (lambda: Within("never"), "Within: span="),
        (lambda: Budget(0), "Budget: nbytes=0"),
        (lambda: Budget(1.5), "Budget: nbytes=1.5"),  # type: ignore[arg-type]
        (lambda: ByClass("some"), "ByClass: remove='some'"),  # type: ignore[arg-type]
        (lambda: Last(1).then_drop(), "at least one component"),
        (lambda: Last(1).then_drop("Optimizer"), "component name 'Optimizer'"),
    ):
        with pytest.raises(UsageError, match=match):
            make()


def test_rules_show_themselves() -> None:
    rule = Hourly(3) | Daily() | Within("2h") | Budget(7) | ByClass()
    assert str(rule.then_drop("rng")) == (
        "(hourly 3 | daily | within 7200s | budget 7 bytes | remove ephemeral_only) without rng"
    )


def test_the_last_of_a_class_are_counted_in_that_class() -> None:
    """Issue 20, line 10: so many permanent ones, however many ephemeral ones are between them."""
    entries = by_class("permanent", "ephemeral", "permanent", "ephemeral", "permanent")
    assert picked(Last(2, save_class="permanent"), entries) == [3, 5]
    assert picked(Last(1, save_class="ephemeral"), entries) == [4]
    both = Last(2, save_class="permanent") | Last(1, save_class="ephemeral")
    assert picked(both, entries) == [3, 4, 5]
    assert Last(2, save_class="permanent").quota() == 3  # the newest stays, of whatever class
    assert str(Last(2, save_class="permanent")) == "last 2 permanent"
    with pytest.raises(UsageError, match="save_class"):
        Last(2, save_class="precious")  # type: ignore[arg-type]


def test_the_last_ephemeral_ones_are_no_rule_where_there_are_none() -> None:
    """Issue 20, lines 10 and 13: else it would keep no permanent one but the newest."""
    rule = Last(1, save_class="ephemeral")
    entries = by_class("permanent", "permanent", "permanent")
    assert all(decision.keep for decision in decide(entries, rule))
    assert "ephemeral" in unmet(entries, rule)[str(rule)]
    assert unmet(by_class("ephemeral"), Last(1, save_class="permanent")) == {}
