"""Several savers, one save a step."""

from __future__ import annotations

from typing import Any

import pytest
from tests.format.samples import make_manifest

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.rule import BySaver
from holdfast.policy.rules import Last
from holdfast.policy.savers import Due, SavePolicy, SideSaver, combined_rule
from holdfast.policy.schedule import SaveSchedule, covers, together
from holdfast.policy.triggers import At, AtEnd, Every, On, When

WEIGHTS = SideSaver("weights", every="2step", components=["model"], keep=Last(9))


def at(step: int) -> Timestamp:
    return Timestamp(step=step, wall_s=float(step))


def played(schedule: SaveSchedule, last: int, first: int = 1) -> dict[int, Due]:
    """The saves of a training, by their steps."""
    found = {}
    for step in range(first, last + 1):
        due = schedule.merge_due_saves(at(step))
        if due is not None:
            schedule.began(due, at(step))
            found[step] = due
    return found


def test_each_saver_keeps_its_own_time_and_one_save_holds_all() -> None:
    """A4: one save a step, with all that is wanted."""
    saves = played(SaveSchedule("3step", [WEIGHTS]), 7)
    assert {step: due.savers for step, due in saves.items()} == {
        2: ("weights",),
        3: ("main",),
        4: ("weights",),
        6: ("main", "weights"),
    }
    assert saves[2] == Due(
        "permanent", "weights every 2step", savers=("weights",), components=("model",)
    )
    assert saves[6].components is None


def test_the_highest_class_wins_and_all_reasons_are_told() -> None:
    both = together(
        [
            Due("ephemeral", "every 2step", savers=("main",)),
            Due("permanent", "weights every 1h", savers=("weights",), components=("model",)),
        ]
    )
    assert both == Due(
        "permanent", "every 2step, weights every 1h", savers=("main", "weights"), components=None
    )


def test_two_side_savers_share_one_checkpoint_of_both_their_components() -> None:
    average = SideSaver("average", every="4step", components=["ema", "model"])
    due = played(SaveSchedule(None, [WEIGHTS, average]), 4)[4]
    assert due.components == ("model", "ema")
    assert due.savers == ("weights", "average")


def test_a_resume_rebuilds_where_each_saver_last_saved() -> None:
    """D34, D54: cadences go on from what the records say."""
    hours = SideSaver("weights", every="5s", components=["model"])
    straight = SaveSchedule("4step", [hours])
    expected = played(straight, 20)
    for cut in (4, 8, 12):
        resumed = SaveSchedule("4step", [hours])
        records = [
            make_manifest(savers=due.savers, save_class=due.save_class, timestamp=at(step))
            for step, due in sorted(expected.items(), reverse=True)
            if step <= cut
        ]
        resumed.resume_schedule(at(cut), records)
        later = {step: due for step, due in expected.items() if step > cut}
        assert played(resumed, 20, first=cut + 1) == later


@pytest.mark.parametrize("event", ["signal", "demand"])
def test_somebody_who_asks_gets_a_whole_save_whatever_the_policy(event: str) -> None:
    bare, weights = SaveSchedule(None), SaveSchedule("100step", [WEIGHTS])
    assert bare.merge_due_saves(at(1), events=["step", event]) == Due("permanent", event)  # type: ignore[list-item]
    due = weights.merge_due_saves(at(2), events=["step", event])  # type: ignore[list-item]
    assert due is not None
    assert due.components is None
    weights.began(due, at(2))
    assert weights.merge_due_saves(at(2), events=[event]) is None  # type: ignore[list-item]


def test_a_part_saved_by_hand_puts_nothing_off() -> None:
    schedule = SaveSchedule("2step")
    schedule.began(Due("permanent", "manual", components=("model",)), at(2))
    assert schedule.merge_due_saves(at(2)) == Due("permanent", "every 2step")


def test_what_is_asked_for_is_of_the_lowest_class_unless_a_trigger_says_more() -> None:
    two = SaveSchedule(SavePolicy(permanent="10step", ephemeral="2step"))
    assert two.merge_due_saves(at(1), events=["step", "signal"]) == Due("ephemeral", "signal")
    says = SaveSchedule(SavePolicy(permanent=On("signal"), ephemeral="2step"))
    assert says.merge_due_saves(at(1), events=["step", "signal"]) == Due("permanent", "signal")


def test_what_is_wanted_is_saved_once_with_its_own_reason() -> None:
    schedule = SaveSchedule("2step", [WEIGHTS])
    final = schedule.merge_due_saves(at(2), wanted=Due("permanent", "final", tags=("end",)))
    assert final == Due(
        "permanent",
        "final, weights every 2step",
        savers=("main", "weights"),
        components=None,
        tags=("end",),
    )


def test_a_save_covers_what_is_less() -> None:
    whole, part = Due("ephemeral", "a"), Due("ephemeral", "b", components=("model",))
    assert covers(whole, part)
    assert not covers(part, whole)
    assert not covers(whole, Due("permanent", "c"))
    assert covers(part, Due("ephemeral", "d", components=("model",)))
    assert not covers(part, Due("ephemeral", "e", components=("ema",)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SideSaver("main", every="1h", components=["model"]), "main"),
        (lambda: SideSaver("a/b", every="1h", components=["model"]), "a/b"),
        (lambda: SideSaver("w", every="1h", components=[]), "components"),
        (lambda: SideSaver("w", every="1h", components="model"), "components"),
        (lambda: SideSaver("w", every="1", components=["model"]), "unit"),
        (lambda: SideSaver("w", every="1h", components=["model"], keep=3), "keep"),  # type: ignore[arg-type]
        (lambda: SaveSchedule(None, [WEIGHTS, WEIGHTS]), "two are named"),
        (lambda: combined_rule(None, [WEIGHTS], ["optimizer"]), "does not have"),
        (lambda: combined_rule(None, ["weights"], ["model"]), "SideSaver"),  # type: ignore[list-item]
    ],
)
def test_what_would_do_nothing_is_refused(make: object, says: str) -> None:
    """D47."""
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]


def test_the_rules_of_all_savers_are_one_rule() -> None:
    assert combined_rule(Last(2), [WEIGHTS], ["model"]) == BySaver(
        {"main": Last(2), "weights": Last(9)}
    )


def test_who_asks_under_a_veto_gets_a_permanent_one() -> None:
    schedule = SaveSchedule(SavePolicy(permanent="100step", ephemeral="10step"))
    for event in ("signal", "demand"):
        assert schedule.merge_due_saves(at(1), events=[event]) == Due("ephemeral", event)
        assert schedule.merge_due_saves(at(1), events=[event], vetoes={"merging"}) == Due(
            "permanent", event
        )


def test_a_part_by_hand_is_nobodys_in_the_manifest_too() -> None:
    schedule = SaveSchedule("3step", [WEIGHTS])
    assert schedule.savers_of(Due("permanent", "manual", components=("model",))) == ()
    assert schedule.savers_of(Due("permanent", "manual")) == ("main",)
    assert SaveSchedule("3step").savers_of(Due("permanent", "manual")) == ()


@pytest.mark.parametrize("sides", [[], [WEIGHTS]])
def test_a_part_that_is_wanted_takes_the_place_of_no_whole_one(sides: list[SideSaver]) -> None:
    schedule = SaveSchedule("3step", sides)
    part = Due("permanent", "manual", components=("model",))
    alone = schedule.merge_due_saves(at(1), wanted=part)
    assert alone == part
    both = schedule.merge_due_saves(at(3), wanted=part)
    assert both is not None
    assert both.components is None
    assert both.savers == (("main", "weights") if sides else ())


def test_a_save_that_failed_or_was_not_begun_is_due_again() -> None:
    schedule = SaveSchedule("3step", [WEIGHTS])
    assert played(schedule, 5).keys() == {2, 3, 4}
    schedule.undo_failed_save()
    again = schedule.merge_due_saves(at(5))
    assert again is not None
    assert again.savers == ("weights",)
    schedule.began(again, at(5))
    schedule.undo_decision()  # a begun one stays begun
    assert schedule.merge_due_saves(at(5)) is None
    assert schedule.merge_due_saves(at(6)) is not None
    schedule.undo_decision()
    both = schedule.merge_due_saves(at(7))
    assert both is not None
    assert both.savers == ("main", "weights")
    schedule.began(both, at(7))
    schedule.resume_schedule(at(7), [])
    schedule.undo_failed_save()  # an earlier one is of no interest any more
    assert schedule.merge_due_saves(at(7)) is None


@pytest.mark.parametrize(
    ("every", "step", "first"),
    [
        ("5step", 0, 5),
        ("5step", 4, 5),
        ("5step", 5, 10),
        (Every("5step") | On("epoch") | AtEnd(), 7, 10),
        (SavePolicy(permanent="10step", ephemeral="4step"), 9, 10),
        (Every("0.3dur", max_duration="10step"), 3, 6),
        ("2ep", 3, 4),
        ("30min", 3, 4),
        (lambda now, metrics, event: False, 3, 4),
        (At(steps=[100]), 3, 4),
        (On("signal"), 3, 2**62),
        (None, 3, 2**62),
    ],
)
def test_it_is_known_until_when_nothing_can_be_due(every: Any, step: int, first: int) -> None:
    """And what is said to be quiet really is, step by step."""
    schedule = SaveSchedule(every)
    assert schedule.quiet_until(at(step)) == first
    schedule.resume_schedule(at(step), [])
    for later in range(step + 1, min(first, step + 20)):
        assert schedule.merge_due_saves(at(later)) is None


def test_ranks_decide_alike_by_counters_and_the_leader_by_its_clock() -> None:
    """What the clock decides is due by the leader alone, also an ephemeral save that cools down."""
    policy = SavePolicy(permanent="4step", ephemeral=Every("2step"), cooldown="3s")
    shared = SaveSchedule(
        policy, [SideSaver("fast", every="1s", components=["model"])], is_shared=True
    )
    assert shared.merge_due_saves(at(2)) is None
    due = shared.due_by_leader(at(2))
    assert due == Due("permanent", "every 2step, fast every 1s", savers=("main", "fast"))
    assert shared.due_by_leader(at(2), but=due) is None
    assert shared.merge_due_saves(at(4)) == Due("permanent", "every 4step", savers=("main",))


def test_triggers_that_are_not_known_to_be_alike_are_left_to_the_leader() -> None:
    schedule = SaveSchedule(
        When(lambda *_: True, "always") | On("epoch") | At("1step"), is_shared=True
    )
    assert schedule.merge_due_saves(at(1)) == Due("permanent", "at 1step")
    assert schedule.due_by_leader(at(1)) == Due("permanent", "always")
