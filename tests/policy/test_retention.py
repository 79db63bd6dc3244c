"""Claims about what is kept and why, over random histories where they are general."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.retention import Decision, decide, stands_in, unmet
from holdfast.policy.rule import MAIN, AnyRule, BySaver, Candidate, Rule, picks_of
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

thorough = settings(max_examples=100)
"""In every tier, for what such a test has to find is rare."""


def candidate(
    sequence: int, step: int | None = None, *, epoch: int = 1, **more: object
) -> Candidate:
    at = Timestamp(step=sequence * 100 if step is None else step)
    return Candidate(order=(epoch, sequence), timestamp=at, **more)  # type: ignore[arg-type]


def kept(entries: Sequence[Candidate], rule: Rule, **more: tuple[int, int]) -> list[int]:
    """Sequences of what stays, oldest first."""
    decisions = decide(entries, rule, **more)
    return sorted(decision.entry.order[1] for decision in decisions if decision.keep)


def survivors(decisions: Sequence[Decision]) -> list[Candidate]:
    return [decision.entry for decision in decisions if decision.keep]


def is_whole(decision: Decision) -> bool:
    """Whether a run can resume from it afterwards."""
    return decision.entry.is_resumable and decision.entry.healthy and not decision.drop


metrics = st.dictionaries(
    st.sampled_from(["val_loss", "accuracy"]),
    st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 2).map(float),
)
candidates = st.builds(
    Candidate,
    order=st.tuples(st.integers(1, 3), st.integers(1, 20)),
    timestamp=st.builds(Timestamp, step=st.integers(0, 40), epoch=st.none() | st.integers(0, 5)),
    metrics=metrics,
    tags=st.sampled_from([(), (), (), ("final",)]),
    pinned=st.integers(0, 9).map(lambda n: n == 0),
    rejected=st.integers(0, 4).map(lambda n: n == 0),
    retired=st.integers(0, 9).map(lambda n: n == 0),
    save_class=st.sampled_from(["permanent", "ephemeral"]),
    created=st.integers(0, 60).map(
        lambda hour: f"2026-02-0{1 + hour // 24}T{hour % 24:02d}:30:00+00:00"
    ),
    nbytes=st.integers(0, 30),
    components=st.just(("model", "optimizer")),
    dropped=st.sampled_from([(), (), (), ("optimizer",)]),
    healthy=st.integers(0, 4).map(lambda n: n > 0),
    savers=st.sampled_from([(), (), ("weights",), ("main", "weights"), ("ema",)]),
)


def in_part(entry: Candidate) -> Candidate:
    """The same, saved without its optimizer."""
    return replace(entry, components=("model",), dropped=(), left_out=("optimizer",))


def with_a_steady_clock(entries: list[Candidate]) -> list[Candidate]:
    """The same, saved in the order of their dates.

    Where a clock was set back, a rule of the calendar may need two passes to come to its end.
    """
    dates = sorted(entry.created for entry in entries)
    orders = sorted(entry.order for entry in entries)
    date_of = dict(zip(orders, dates, strict=True))
    return [replace(entry, created=date_of[entry.order]) for entry in entries]


def unique(parts: st.SearchStrategy[Candidate]) -> st.SearchStrategy[list[Candidate]]:
    found = st.lists(parts, max_size=20, unique_by=lambda entry: entry.order)
    return found.map(with_a_steady_clock)


whole_histories = unique(candidates)
histories = unique(candidates | candidates | candidates.map(in_part))
simple = st.one_of(
    st.builds(Last, st.integers(1, 5)),
    st.builds(
        Best,
        st.sampled_from(["val_loss", "accuracy"]),
        st.integers(1, 3),
        st.sampled_from(["min", "max"]),
        wait=st.integers(0, 2),
    ),
    st.builds(EveryNth, st.sampled_from(["7step", "10step", "2ep"])),
    st.builds(Hourly, st.none() | st.integers(1, 3)),
    st.builds(Daily, st.none() | st.integers(1, 3)),
    st.builds(Within, st.sampled_from(["5step", "20step", "1ep"])),
    st.builds(ByClass, st.sampled_from(["ephemeral_only", "all_non_permanent", "never"])),
)


def any_of(parts: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    """One of them, or several together, some of which drop the optimizer."""
    thinning = parts | parts.map(lambda rule: rule.then_drop("optimizer"))
    return st.lists(thinning, min_size=1, max_size=3).map(
        lambda found: found[0] if len(found) == 1 else AnyRule(tuple(found))
    )


def by_saver(parts: st.SearchStrategy[Rule]) -> st.SearchStrategy[Rule]:
    """One rule for all, or one for some of the savers."""
    savers = st.sampled_from(["main", "weights"])
    return parts | st.dictionaries(savers, parts, min_size=1).map(BySaver)


rules = by_saver(any_of(simple))
budgets = by_saver(any_of(simple | st.builds(Budget, st.integers(1, 200))))


@thorough
@given(histories, budgets)
def test_something_newer_stays_for_everything_that_goes(
    entries: list[Candidate], rule: Rule
) -> None:
    """R20, D1, D2: nothing is dropped unless a usable, newer one is kept that gives the same."""
    decisions = decide(entries, rule)
    for decision in decisions:
        newer = (d for d in decisions if d.keep and d.entry.order > decision.entry.order)
        assert decision.keep or any(
            stands_in(d.entry, decision.entry, drop=d.drop)
            and (is_whole(d) or decision.entry.left_out)
            for d in newer
        )


@thorough
@given(histories, budgets)
def test_the_newest_that_resume_has_not_rejected_stays(
    entries: list[Candidate], rule: Rule
) -> None:
    """R20, D6: and it stays whole; the newest that is still whole does, and the newest healthy."""
    decisions = decide(entries, rule)
    unrejected = [entry for entry in entries if not entry.rejected]
    if unrejected:
        assert max(unrejected, key=lambda entry: entry.order) in survivors(decisions)
    resumable = [d for d in decisions if d.entry.is_resumable]
    for kind in (resumable, [d for d in resumable if d.entry.healthy]):
        if kind:
            newest = max(kind, key=lambda decision: decision.entry.order)
            assert newest.keep
            assert not newest.drop


@thorough
@given(histories, budgets)
def test_pinned_and_tagged_ones_stay(entries: list[Candidate], rule: Rule) -> None:
    """R20, D11, D12."""
    marked = {entry.order for entry in entries if entry.pinned or entry.tags}
    assert marked <= {entry.order for entry in survivors(decide(entries, rule))}


@pytest.mark.parametrize("mark", [{"pinned": True}, {"tags": ("paper",)}], ids=str)
def test_an_old_one_that_is_pinned_or_tagged_stays(mark: Mapping[str, object]) -> None:
    """R20: the plainest case, which chance need not find."""
    entries = [candidate(1, **mark), *map(candidate, (2, 3))]
    assert kept(entries, Last(1)) == [1, 3]


@thorough
@given(st.data(), histories.filter(bool), rules)
def test_the_point_the_lineage_stands_on_stays(
    data: st.DataObject, entries: list[Candidate], rule: Rule
) -> None:
    point = data.draw(st.sampled_from(entries)).order
    decisions = decide(entries, rule, resumed_from=point)
    assert point in {entry.order for entry in survivors(decisions)}


@given(histories, rules)
def test_deciding_again_over_what_stayed_drops_nothing(
    entries: list[Candidate], rule: Rule
) -> None:
    """R23: a deletion that was cut short and is decided again ends at the same place."""
    stayed = survivors(decide(entries, rule))
    assert survivors(decide(stayed, rule)) == stayed


@given(st.data(), histories, rules)
def test_a_deletion_that_was_cut_short_ends_at_the_same_place(
    data: st.DataObject, entries: list[Candidate], rule: Rule
) -> None:
    """R23: whichever part of the doomed ones is gone by then."""
    decisions = decide(entries, rule)
    doomed = [decision.entry for decision in decisions if not decision.keep]
    gone = [entry for entry in doomed if data.draw(st.booleans())]
    left = [entry for entry in entries if entry not in gone]
    # Where the last that knew a counter went, the rule has nothing to judge by, and keeps the rest.
    assume(unmet(left, rule).keys() <= unmet(entries, rule).keys())
    assert survivors(decide(left, rule)) == survivors(decisions)


@given(st.data(), histories, rules)
def test_the_order_of_the_list_means_nothing(
    data: st.DataObject, entries: list[Candidate], rule: Rule
) -> None:
    """D3, D4: only the recorded order counts."""
    shuffled = data.draw(st.permutations(entries))
    assert decide(shuffled, rule) == decide(entries, rule)


@given(histories, rules)
def test_rejected_ones_take_no_place(entries: list[Candidate], rule: Rule) -> None:
    """Invariant 4: without them the same usable ones are kept."""
    usable = [entry for entry in entries if not entry.rejected]
    with_them = [entry for entry in survivors(decide(entries, rule)) if not entry.rejected]
    assert with_them == survivors(decide(usable, rule))


@given(histories, budgets)
def test_every_decision_has_its_reason(entries: list[Candidate], rule: Rule) -> None:
    decisions = decide(entries, rule)
    assert len(decisions) == len(entries)
    assert all(decision.reason for decision in decisions)


@given(whole_histories, any_of(simple), any_of(simple))
def test_either_of_two_rules_is_enough(entries: list[Candidate], a: Rule, b: Rule) -> None:
    both = {entry.order for entry in survivors(decide(entries, a | b)) if not entry.rejected}
    alone = {
        entry.order
        for rule in (a, b)
        for entry in survivors(decide(entries, rule))
        if not entry.rejected
    }
    assert both == alone


@given(histories)
def test_all_keeps_every_one_whose_deletion_was_not_begun(entries: list[Candidate]) -> None:
    stayed = survivors(decide(entries, All()))
    assert {e.order for e in entries if not e.retired} <= {e.order for e in stayed}


@thorough
@given(histories, st.integers(1, 6))
def test_last_keeps_the_newest_by_recorded_order(entries: list[Candidate], n: int) -> None:
    """D4, D30: a higher step of an abandoned branch is not newer."""
    plain = [Candidate(order=e.order, timestamp=e.timestamp) for e in entries]
    expected = sorted((e.order for e in plain), reverse=True)[:n]
    assert [e.order for e in survivors(decide(plain, Last(n)))] == expected


def test_a_smaller_limit_takes_effect_at_once() -> None:
    """D49."""
    entries = [candidate(n) for n in range(1, 11)]
    assert kept(entries, Last(6)) == [5, 6, 7, 8, 9, 10]
    assert kept(entries, Last(2)) == [9, 10]


def test_rotation_keeps_as_many_as_asked() -> None:
    entries = [candidate(n) for n in range(1, 7)]
    assert [len(kept(entries, Last(n))) for n in (1, 2, 3, 4, 9)] == [1, 2, 3, 4, 6]


def test_best_is_lowest_or_highest() -> None:
    values = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.4}
    entries = [candidate(n, metrics={"val": value}) for n, value in values.items()]
    assert kept(entries, Best("val", mode="min")) == [2, 4]
    assert kept(entries, Best("val", n=2, mode="min")) == [2, 4]
    assert kept(entries, Best("val", n=3, mode="min")) == [1, 2, 4]
    assert kept(entries, Best("val", mode="max")) == [3, 4]


def test_a_rule_that_waits_keeps_as_many_without_a_value_as_it_says() -> None:
    values = {1: 0.9, 2: None, 3: 0.5, 4: None, 5: math.nan, 6: None, 7: None}
    entries = [
        candidate(n, metrics={} if value is None else {"acc": value}) for n, value in values.items()
    ]
    assert kept(entries, Best("acc")) == [1, 7]
    assert kept(entries, Best("acc", wait=2)) == [1, 6, 7]
    assert kept(entries, Best("acc", wait=9)) == [1, 2, 4, 6, 7]
    (reason,) = (d.reason for d in decide(entries, Best("acc", wait=3)) if d.entry is entries[3])
    assert reason == "waits for acc, 3 of at most 3"


def test_a_rule_that_waits_keeps_no_more_before_the_first_value_and_after_a_resume() -> None:
    """A rule that does not wait keeps all then: its metric may be mistyped."""
    before = [candidate(n) for n in range(1, 7)]
    assert kept(before, Best("acc", wait=2)) == [5, 6]
    assert kept(before, Best("acc")) == [1, 2, 3, 4, 5, 6]
    resumed = [candidate(1, metrics={"acc": 0.5}), *(candidate(n, epoch=2) for n in range(2, 7))]
    assert kept(resumed, Best("acc", wait=2)) == [1, 5, 6]


def test_what_no_run_should_resume_from_does_not_wait() -> None:
    entries = [candidate(1, healthy=False), candidate(2, rejected=True), candidate(3)]
    assert kept(entries, Last(1) | Best("acc", wait=9)) == kept(entries, Last(1))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_a_number_is_never_best(mode: str, value: float | None) -> None:
    odd = {} if value is None else {"val": value}
    entries = [candidate(1, metrics=odd), candidate(2, metrics={"val": 3.0}), candidate(3)]
    assert kept(entries, Best("val", n=3, mode=mode)) == [2, 3]  # type: ignore[arg-type]


def test_of_equally_good_ones_the_older_stays() -> None:
    entries = [candidate(n, metrics={"val": 0.5}) for n in (1, 2, 3)] + [candidate(4)]
    assert kept(entries, Best("val", mode="min")) == [1, 4]


def test_rejected_ones_are_neither_best_nor_last() -> None:
    entries = [
        candidate(1, metrics={"val": 0.3}),
        candidate(2, metrics={"val": 0.1}, rejected=True),
        candidate(3, metrics={"val": 0.2}),
        candidate(4, metrics={"val": 0.9}),
        candidate(5, metrics={"val": 0.0}, rejected=True),
    ]
    decisions = decide(entries, Last(1) | Best("val", mode="min"))
    assert [(d.entry.order[1], d.keep) for d in decisions] == [
        (5, True),
        (4, True),
        (3, True),
        (2, False),
        (1, False),
    ]


def test_a_rejected_one_goes_when_all_that_stays_is_newer() -> None:
    """Invariant 4: it stays to be looked at while it is among the newest."""
    entries = [candidate(1), candidate(2, rejected=True), candidate(3), candidate(4)]
    assert kept(entries, Last(3)) == [1, 2, 3, 4]
    assert kept(entries, Last(2)) == [3, 4]


def test_nothing_goes_while_everything_is_rejected() -> None:
    """R19, R20, D13."""
    entries = [candidate(n, rejected=True) for n in (1, 2, 3)]
    assert kept(entries, Last(1)) == [1, 2, 3]


def test_a_begun_deletion_is_ended_and_takes_no_place() -> None:
    entries = [candidate(1), candidate(2), candidate(3, retired=True), candidate(4)]
    assert kept(entries, Last(2)) == [2, 4]
    assert kept(entries, All()) == [1, 2, 4]


def test_a_begun_deletion_waits_while_nothing_newer_is_there() -> None:
    """Invariant 4."""
    entries = [candidate(1), candidate(2, retired=True)]
    assert kept(entries, Last(1)) == [1, 2]
    assert kept([*entries, candidate(3)], Last(1)) == [3]


def test_every_nth_keeps_the_first_at_each_multiple() -> None:
    """D10, D12: milestones stay, whatever the cadence was when they were saved."""
    steps = [0, 250, 500, 1000, 1250, 2100, 2900, 4000, 4500]
    entries = [candidate(n, step) for n, step in enumerate(steps, start=1)]
    rule = EveryNth("1000step")
    stayed = [steps[n - 1] for n in kept(entries, rule)]
    assert stayed == [0, 1000, 2100, 4000, 4500]


def test_every_nth_prefers_the_newer_of_two_branches() -> None:
    """D30: after a rollback the same multiple is passed again."""
    entries = [
        candidate(1, 500),
        candidate(2, 1000),
        candidate(3, 1000, epoch=2),
        candidate(4, 1500, epoch=2),
    ]
    assert kept(entries, EveryNth("1000step")) == [3, 4]


def test_every_nth_counts_in_its_own_unit() -> None:
    entries = [
        Candidate(order=(1, n), timestamp=Timestamp(step=n, epoch=epoch, wall_s=n * 1800.0))
        for n, epoch in enumerate([0, 1, 1, 2, None, 3], start=1)
    ]
    assert kept(entries, EveryNth("2ep")) == [1, 4, 6]
    assert kept(entries, EveryNth("1h")) == [2, 4, 6]


def test_copies_with_the_same_order_are_decided_one_by_one() -> None:
    """D6: each entry is its own, also when records repeat."""
    twin = candidate(3)
    assert [d.keep for d in decide([candidate(1), twin, twin], Last(1))] == [True, False, False]


def test_reasons_name_every_rule_that_keeps() -> None:
    entries = [
        candidate(1, pinned=True),
        candidate(2, tags=("final", "paper")),
        candidate(3),
        candidate(4),
        candidate(5, metrics={"val": 0.5}),
    ]
    decisions = decide(entries, Last(1) | Best("val", mode="min"), resumed_from=(1, 4))
    assert [decision.reason for decision in decisions] == [
        "newest, last 1, best val (min)",
        "the run resumed from it",
        "not kept by: last 1 | best val (min)",
        "tagged final, paper",
        "pinned",
    ]


def test_rules_join_flat_and_show_themselves() -> None:
    rule = Last(3) | Best("loss", n=2, mode="max") | EveryNth("90min") | All()
    assert isinstance(rule, AnyRule)
    assert str(rule) == "last 3 | best 2 loss (max) | every 5400s | all"
    assert Last(1) | (Last(2) | Last(3)) == AnyRule((Last(1), Last(2), Last(3)))
    with pytest.raises(TypeError):
        Last(1) | 3  # type: ignore[operator]


def test_the_room_that_a_rule_needs_is_known_where_it_has_a_limit() -> None:
    assert Last(3).quota() == 3
    assert (Last(3) | Best("loss", n=2) | Best("accuracy", mode="max")).quota() == 6
    assert All().quota() is None
    assert (Last(3) | EveryNth("1000step")).quota() is None


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3", None])
def test_a_quota_below_one_is_refused_at_construction(n: object) -> None:
    """D47, D48."""
    with pytest.raises(UsageError, match=r"Last: n="):
        Last(n)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"Best: n="):
        Best("val", n)  # type: ignore[arg-type]


def test_other_bad_settings_are_refused_at_construction() -> None:
    """D47."""
    with pytest.raises(UsageError, match="mode='low'"):
        Best("val", mode="low")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="metric=''"):
        Best("")
    with pytest.raises(UsageError, match="EveryNth: interval=1000"):
        EveryNth(1000)  # type: ignore[arg-type]


@given(st.data(), histories, budgets)
def test_deleting_oldest_first_can_be_cut_short_at_any_point(
    data: st.DataObject, entries: list[Candidate], rule: Rule
) -> None:
    """R23: also where rules count bytes."""
    decisions = decide(entries, rule)
    doomed = sorted((d.entry for d in decisions if not d.keep), key=lambda entry: entry.order)
    gone = doomed[: data.draw(st.integers(0, len(doomed)))]
    left = [entry for entry in entries if entry not in gone]
    # Where the last that knew a counter went, the rule has nothing to judge by, and keeps the rest.
    assume(unmet(left, rule).keys() <= unmet(entries, rule).keys())
    assert survivors(decide(left, rule)) == survivors(decisions)


@given(st.data(), histories.filter(bool), budgets)
def test_what_is_protected_stays_whole(
    data: st.DataObject, entries: list[Candidate], rule: Rule
) -> None:
    """R20: pinned, tagged, and the point the lineage stands on."""
    point = data.draw(st.sampled_from(entries)).order
    for decision in decide(entries, rule, resumed_from=point):
        if decision.entry.is_held or decision.entry.order == point:
            assert decision.keep
            assert not decision.drop


@given(histories, simple, rules)
def test_what_one_rule_keeps_whole_stays_whole(
    entries: list[Candidate], whole: Rule, other: Rule
) -> None:
    decisions = decide(entries, other.then_drop("optimizer") | whole)
    newest_first = [decision.entry for decision in decisions]
    for position in picks_of(whole, MAIN, newest_first):
        assert not decisions[position].drop


def test_components_go_where_no_rule_keeps_all() -> None:
    """The newest two stay whole; older milestones keep their weights."""
    entries = [candidate(n, components=("model", "optimizer", "rng")) for n in range(1, 7)]
    rule = Last(2) | EveryNth("200step").then_drop("rng", "optimizer")
    decisions = decide(entries, rule)
    assert [(d.entry.order[1], d.keep, d.drop) for d in decisions] == [
        (6, True, ()),
        (5, True, ()),
        (4, True, ("optimizer", "rng")),
        (3, False, ()),
        (2, True, ("optimizer", "rng")),
        (1, False, ()),
    ]
    assert decisions[2].reason == "every 200step without optimizer, rng"
    assert str(rule) == "last 2 | every 200step without optimizer, rng"


def test_what_was_dropped_does_not_go_twice_and_what_was_begun_is_ended() -> None:
    done = candidate(1, components=("model",), dropped=("optimizer",))
    half = candidate(2, components=("model",), begun=("optimizer",), dropped=("optimizer",))
    decisions = decide([done, half, candidate(3)], All().then_drop("optimizer"))
    assert [d.drop for d in decisions] == [(), ("optimizer",), ()]


def test_the_last_component_of_a_checkpoint_does_not_go() -> None:
    entries = [candidate(n, components=("model",)) for n in (1, 2)]
    assert [d.drop for d in decide(entries, All().then_drop("model", "optimizer"))] == [(), ()]


def test_a_pinned_one_is_not_thinned() -> None:
    """R20."""
    entries = [candidate(1, pinned=True, components=("model", "optimizer")), candidate(2)]
    assert [d.drop for d in decide(entries, All().then_drop("optimizer"))] == [(), ()]


def test_a_thinned_one_is_not_what_others_may_go_for() -> None:
    """Invariant 4: nobody could resume from it."""
    entries = [candidate(1), candidate(2), candidate(3, dropped=("optimizer",))]
    assert kept(entries, Last(1)) == [2, 3]
    only_thin = [candidate(n, dropped=("optimizer",)) for n in (1, 2)]
    assert kept(only_thin, Last(1)) == [1, 2]


def test_a_clock_that_was_wrong_takes_no_place_for_ever() -> None:
    """D3, invariant 4: two days of the future do not push out the days after them."""
    days = ["2030-01-01", "2030-01-02", "2026-05-01", "2026-05-02", "2026-05-03"]
    entries = [
        Candidate(order=(1, n), timestamp=Timestamp(step=n), created=f"{day}T12:00:00+00:00")
        for n, day in enumerate(days, start=1)
    ]
    kept = {d.entry.order[1] for d in decide(entries, Daily(2)) if d.keep}
    assert kept == {4, 5}


def test_a_rule_that_picks_what_is_not_there_is_an_error() -> None:
    class Odd(Last):
        def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
            return {-1: "odd"}

    entry = Candidate(order=(1, 1), timestamp=Timestamp(step=1))
    with pytest.raises(UsageError, match="-1"):
        decide([entry], Odd(1))


# What is not healthy, and what was saved in part


def test_unhealthy_ones_fill_no_place_and_go_when_a_newer_one_is_well() -> None:
    """Three good ones stay of the last three; what is wrong, until something newer is right."""
    entries = [candidate(n, healthy=n not in (3, 5)) for n in range(1, 7)]
    assert kept(entries, Last(3)) == [2, 4, 6]
    assert kept(entries[:5], Last(2)) == [2, 4, 5]
    assert kept(entries, All()) == [1, 2, 3, 4, 5, 6]
    entries[2] = candidate(3, healthy=False, pinned=True)
    assert kept(entries, Last(1)) == [3, 6]


def test_an_unhealthy_one_is_never_best() -> None:
    metrics = {"val": 0.1}
    entries = [candidate(1, metrics=metrics, healthy=False), candidate(2, metrics={"val": 0.5})]
    assert kept([*entries, candidate(3)], Best("val", mode="min")) == [2, 3]


def test_while_nothing_is_well_nothing_goes() -> None:
    entries = [candidate(n, healthy=False) for n in (1, 2, 3)]
    assert kept(entries, Last(1)) == [1, 2, 3]
    reasons = [d.reason for d in decide([candidate(1), *entries[1:]], Last(1))]
    assert reasons == [
        "newest",
        "no newer one is left to resume from",
        "newest healthy to resume from, last 1",
    ]


def test_the_newest_that_is_well_stays_beside_newer_ones_that_are_not() -> None:
    entries = [candidate(1), candidate(2), candidate(3, healthy=False), candidate(4)]
    assert kept(entries[:3], Last(1)) == [2, 3]
    assert kept(entries, Last(1)) == [4]
    reasons = {d.entry.order[1]: d.reason for d in decide(entries, Last(1))}
    assert reasons[3] == "not healthy, and a newer one is"


def test_of_the_line_after_a_rollback_the_newest_stay() -> None:
    """D30: a quota that is full of what a rollback left behind takes nothing from the run's line.

    Its newest stays, and with it the one before, as resume goes back to nothing that was left
    behind.
    """
    before = [candidate(1), candidate(2), candidate(3)]
    decisions = decide(before, Last(1), lineage={(1, 1)})
    assert [d.entry.order for d in decisions if d.keep] == [(1, 3), (1, 1)]
    after = [*before, candidate(1, epoch=2)]
    decisions = decide(after, Last(2), lineage={(1, 1), (2, 1)})
    assert [d.entry.order for d in decisions if d.keep] == [(2, 1), (1, 3), (1, 1)]


def partial(sequence: int, *savers: str, **more: object) -> Candidate:
    return candidate(
        sequence, savers=savers, components=("model",), left_out=("optimizer",), **more
    )


def full(sequence: int, *savers: str, **more: object) -> Candidate:
    return candidate(sequence, savers=savers, components=("model", "optimizer"), **more)


def test_each_saver_has_its_own_places() -> None:
    entries = [
        full(1, "main"),
        partial(2, "weights"),
        full(3, "main", "weights"),
        partial(4, "weights"),
        full(5, "main"),
        partial(6, "weights"),
    ]
    rule = BySaver({"main": Last(1), "weights": Last(2)})
    assert kept(entries, rule) == [4, 5, 6]
    assert kept(entries, BySaver({"main": Last(1), "weights": Last(3)})) == [3, 4, 5, 6]
    assert kept(entries, BySaver({"main": Last(2), "weights": Last(1)})) == [3, 5, 6]
    reasons = {d.entry.order[1]: d.reason for d in decide(entries, rule)}
    assert reasons[6] == "newest, weights: last 2"
    assert reasons[5] == "newest to resume from, last 1"


def test_the_rule_that_keeps_nothing_is_about_every_saver() -> None:
    """What another tier has need not stay here, whoever asked for it."""
    entries = [full(1), partial(2, "weights"), full(3), partial(4, "weights"), partial(5, "ema")]
    assert kept(entries, Nothing()) == [3, 5]


def test_a_saver_without_a_rule_keeps_everything() -> None:
    """A rule that names no saver is one for `main`."""
    entries = [partial(1, "weights"), full(2), full(3), partial(4, "weights"), full(5)]
    assert kept(entries, Last(1)) == [1, 4, 5]
    assert kept(entries, BySaver({"weights": Last(1)})) == [2, 3, 4, 5]
    assert kept(entries, BySaver({"weights": Last(1)}) | Last(2)) == [3, 4, 5]
    reasons = [d.reason for d in decide(entries, Last(1))]
    assert reasons[1] == "weights: all are kept"


def test_partial_ones_of_the_main_saver_are_judged_apart() -> None:
    """An edit left something out: so many whole ones stay all the same."""
    entries = [full(1), full(2), partial(3), partial(4), partial(5)]
    assert kept(entries, Last(2)) == [1, 2, 4, 5]


def test_weights_go_without_any_whole_checkpoint_for_weights_that_stay() -> None:
    entries = [partial(n, "weights") for n in range(1, 6)]
    assert kept(entries, BySaver({"weights": Last(2)})) == [4, 5]
    entries[4] = partial(5, "weights", healthy=False)
    assert kept(entries, BySaver({"weights": Last(2)})) == [3, 4, 5]
    other = candidate(6, savers=("ema",), components=("ema",), left_out=("model", "optimizer"))
    only_other = BySaver({"weights": EveryNth("1000step"), "ema": Last(1)})
    assert kept([*entries[:4], other], only_other) == [1, 2, 3, 4, 6]


def test_a_side_saver_may_thin_what_the_main_one_lets_go() -> None:
    entries = [full(n, "main", "weights") for n in (1, 2, 3)]
    rule = BySaver({"main": Last(1), "weights": Last(2).then_drop("optimizer")})
    assert [(d.keep, d.drop) for d in decide(entries, rule)] == [
        (True, ()),
        (True, ("optimizer",)),
        (False, ()),
    ]


def test_rules_by_saver_show_themselves_and_know_their_room() -> None:
    rule = BySaver({"main": Last(3) | Best("loss"), "weights": Last(24).then_drop("ema")})
    assert str(rule) == "main: (last 3 | best loss (min)), weights: last 24 without ema"
    assert rule.quota() == 4
    assert BySaver({"weights": Last(3)}).quota() is None
    assert rule.picks([full(1, "main", "weights")]) == {0: "last 3, weights: last 24 without ema"}


def test_rules_by_saver_are_checked_at_construction() -> None:
    """D47."""
    for rules, match in (
        ({}, "at least one saver"),
        ([("main", Last(1))], "at least one saver"),
        ({"Weights": Last(1)}, "'Weights'"),
        ({"weights": 3}, "weights=3 must be a rule"),
        ({"weights": BySaver({"main": Last(1)})}, "names savers itself"),
        ({"weights": Last(1) | BySaver({"main": Last(1)})}, "names savers itself"),
    ):
        with pytest.raises(UsageError, match=match):
            BySaver(rules)  # type: ignore[arg-type]


@given(histories, rules)
def test_as_many_healthy_whole_ones_stay_as_asked(entries: list[Candidate], other: Rule) -> None:
    """Neither unhealthy nor partial ones take a place of the last three."""
    good = sorted(
        (e.order for e in entries if e.counts and not e.left_out and MAIN in (e.savers or (MAIN,))),
        reverse=True,
    )
    stayed = {entry.order for entry in survivors(decide(entries, Last(3) | other))}
    assert set(good[:3]) <= stayed


def test_replacing_takes_nothing_from_another_saver_and_nothing_permanent() -> None:
    """A12: a newer one of the step takes the place of what is no more than it."""

    def stay(older: Mapping[str, object], newer: Mapping[str, object]) -> list[int]:
        entries = [candidate(1, 100, **older), candidate(2, 100, **newer), candidate(3, 200)]
        rule = BySaver({MAIN: Last(2), "weights": All()})
        return [d.entry.order[1] for d in decide(entries, rule, replaces=True) if d.keep][::-1]

    weights = {"savers": ("weights",), "components": ("model",), "left_out": ("optimizer",)}
    whole = {"components": ("model", "optimizer")}
    assert stay(weights, {**whole, "savers": (MAIN,)}) == [1, 2, 3]
    assert stay(weights, {**whole, "savers": (MAIN, "weights")}) == [2, 3]
    entries = [
        candidate(1, 100),
        candidate(2, 100, save_class="ephemeral"),
        candidate(3, 200, save_class="ephemeral"),
    ]
    assert kept(entries, ByClass(), replaces=True) == [1, 3]  # type: ignore[arg-type]


def test_nothing_of_the_main_saver_goes_for_a_part_of_a_run_that_never_resumed() -> None:
    """What lay there before the run's own beginning stays, whole or partial, until the run has
    something whole; parts of its side savers do not, and nor do parts on its own line."""
    old = [
        candidate(1, components=("model", "optimizer")),
        candidate(2, components=("model",), left_out=("optimizer",)),
        candidate(3, components=("model",), left_out=("optimizer",), savers=("weights",)),
    ]
    new = [
        candidate(
            n,
            epoch=2,
            components=("model", "data"),
            left_out=("optimizer",),
            savers=("main", "weights"),
        )
        for n in (1, 2)
    ]
    part, newer = new
    rule, own = BySaver({MAIN: Last(1), "weights": Last(1)}), {part.order, newer.order}
    stay = [d.entry for d in decide([*old, *new], rule, lineage=own) if d.keep]
    assert sorted(stay, key=lambda entry: entry.order) == [*old[:2], newer]
    whole = candidate(3, epoch=2, components=("model", "optimizer", "data"))
    decisions = decide([*old, *new, whole], rule, lineage={*own, whole.order})
    assert {entry.order for entry in survivors(decisions)} == {newer.order, whole.order}


def test_without_generators_alone_it_is_resumed_and_replaces_nothing_that_has_them() -> None:
    """Invariant 4: nothing goes because of one that holds less."""
    bare = candidate(2, components=("model", "optimizer"), left_out=("rng",))
    newer = candidate(3, components=("model", "optimizer"), left_out=("rng",))
    full = candidate(1, components=("model", "optimizer", "rng"))
    part = candidate(4, components=("model", "optimizer"), left_out=("data",))
    assert bare.is_resumable
    assert not stands_in(newer, full)
    assert kept([full, bare, newer], Last(1)) == [1, 3]
    assert kept([bare, newer, replace(full, order=(1, 4))], Last(1)) == [4]
    assert kept([newer, part], Last(1)) == [3, 4]


def measured(sequence: int, **more: object) -> Candidate:
    """A whole checkpoint with the metric `loss`."""
    return candidate(sequence, metrics={"loss": 1 / sequence}, components=("model", "opt"), **more)


LACKING = [
    (Best("los", n=3, mode="min"), "the metric 'los' (recorded: 'loss')"),
    (EveryNth("1ep"), "the counter 'epoch'"),
    (EveryNth("1000tok").then_drop("opt"), "the counter 'tokens'"),
    (Within("9sp"), "the counter 'samples'"),
]


@pytest.mark.parametrize(("rule", "what"), LACKING, ids=lambda value: str(value))
def test_a_rule_that_needs_what_no_checkpoint_has_keeps_all_of_them_whole(
    rule: Rule, what: str
) -> None:
    """A mistyped metric, or a counter that the loop does not give, deletes nothing."""
    entries = [measured(sequence) for sequence in range(1, 6)]
    for tried in (rule, Last(1) | rule, BySaver({MAIN: rule})):
        decisions = decide(entries, tried)
        assert all(decision.keep and not decision.drop for decision in decisions)
        assert what in decisions[-1].reason
        assert [*unmet(entries, tried).values()] == [what]


def test_the_rule_is_obeyed_as_soon_as_one_checkpoint_has_what_it_needs() -> None:
    entries = [candidate(sequence) for sequence in range(1, 6)]
    assert kept(entries, Best("loss")) == [1, 2, 3, 4, 5]
    entries.append(measured(6))
    assert kept([*entries, candidate(7)], Best("loss")) == [6, 7]
    assert unmet(entries, Best("loss")) == {}


def test_what_each_saver_recorded_is_looked_at_apart() -> None:
    """The metrics of whole checkpoints say nothing of those of a side saver."""
    whole = [measured(sequence, savers=(MAIN,)) for sequence in (1, 2, 3)]
    weights = [partial(sequence, "weights") for sequence in (4, 5, 6)]
    rule = BySaver({MAIN: Best("loss"), "weights": Best("loss")})
    assert kept([*whole, *weights], rule) == [3, 4, 5, 6]
    assert [*unmet([*whole, *weights], rule)] == ["weights: best loss (min)"]
    # Where a saver has saved nothing yet, nothing is missing.
    assert unmet(whole, rule) == {}


def test_what_is_not_well_gives_a_rule_nothing_to_judge_by() -> None:
    """The one with a loss is known to be bad: no reason to delete those without any."""
    entries = [measured(1, rejected=True), candidate(2), candidate(3), candidate(4)]
    assert kept(entries, Best("loss")) == [1, 2, 3, 4]
    assert unmet([candidate(1, healthy=False)], Best("loss")) == {}


def test_a_metric_of_a_part_says_nothing_of_whole_ones() -> None:
    """Nothing whole goes because a partial save has what the rule asks for."""
    whole = [candidate(sequence) for sequence in range(1, 5)]
    part = candidate(5, left_out=("optimizer",), metrics={"loss": 0.5})
    assert kept([*whole, part], Best("loss", n=3)) == [1, 2, 3, 4, 5]
    assert [*unmet([*whole, part], Best("loss", n=3)).values()] == ["the metric 'loss'"]


def test_every_epoch_keeps_the_ends_of_epochs() -> None:
    """All steps of an epoch have one count of ended epochs: the first of them ended it."""
    entries = [
        replace(
            candidate(step),
            timestamp=Timestamp(step=step, epoch=step // 5, samples=8 * (step // 2)),
        )
        for step in range(16)
    ]
    assert kept(entries, EveryNth("1ep")) == [0, 5, 10, 15]
    assert kept(entries, EveryNth("16sp")) == [0, 4, 8, 12, 15]
