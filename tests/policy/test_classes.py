"""Claims about permanent and ephemeral saves: one a step, the highest class, no silent settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, parse
from holdfast.policy.savers import Due, Saved, SavePolicy
from holdfast.policy.triggers import At, AtEnd, AtStart, Event, Every, On

EPOCH_STEPS = 5
BATCH = 2


def moments(length: Time, cycle_epochs: int = 10**6) -> Iterator[tuple[Event, Timestamp]]:
    """A run of 5 steps of 2 samples an epoch: where it is, and what has just happened."""
    epoch, cycle, at = 0, 0, Timestamp(step=0, epoch=0, samples=0, cycle=0)
    yield "start", at
    for step in itertools.count(1):
        at = Timestamp(step=step, epoch=epoch, samples=BATCH * step, cycle=cycle, wall_s=step)
        yield "step", at
        if step % EPOCH_STEPS == 0:
            epoch += 1
            at = Timestamp(step=step, epoch=epoch, samples=BATCH * step, cycle=cycle, wall_s=step)
            yield "epoch", at
            if epoch % cycle_epochs == 0:
                cycle += 1
                at = Timestamp(
                    step=step, epoch=epoch, samples=BATCH * step, cycle=cycle, wall_s=step
                )
                yield "cycle", at
        if (length.unit.read_progress(at) or 0) >= length.value:
            yield "end", at
            return


def play(
    policy: SavePolicy, length: str, *, saved: Saved | None = None, **options: Any
) -> list[tuple[int, str, str]]:
    """(step, class, reason) of every save of a run."""
    whole = parse(length)
    policy = policy.resolve(whole)
    saved, previous, made = saved or Saved(), None, []
    for event, now in moments(whole, **options):
        due = policy.decide(previous, saved, now, {}, event)
        previous = now
        if due:
            saved = saved.plus(due.save_class, now)
            made.append((now.step, due.save_class, due.reason))
    return made


@pytest.mark.parametrize(
    ("interval", "length", "expected"),
    [
        ("1ep", "5ep", 5),
        ("2cycle", "8ep", 2),
        ("2ep", "8ep", 4),
        ("10ba", "8ep", 4),
        ("0.25dur", "4ep", 4),
        ("5ba", "4ep", 4),
        ("5ba", "10ba", 2),
        ("0.35dur", "4ep", 3),
        ("0.01dur", "100ba", 100),
        ("0.10dur", "70sp", 10),
        ("0.05dur", "80sp", 20),
    ],
)
def test_a_run_makes_as_many_saves_as_its_interval_says(
    interval: str, length: str, expected: int
) -> None:
    """C30, C31: with the one at the end, which is not made twice."""
    made = play(SavePolicy(permanent=Every(interval) | AtEnd()), length, cycle_epochs=2)
    assert len(made) == expected
    assert len({step for step, _, _ in made}) == expected


def test_a_run_whose_steps_an_epoch_are_known_can_count_fractions_in_steps() -> None:
    made = play(SavePolicy(permanent=Every("0.35dur") | AtEnd()), "20step")
    assert [step for step, _, _ in made] == [7, 14, 20]


def test_permanent_and_ephemeral_saves_of_one_run() -> None:
    """O2 to O8, A4: 250 steps, permanent each 100, ephemeral each 50."""
    policy = SavePolicy(permanent=Every("100step") | AtStart(), ephemeral="50step")
    made = play(policy, "250step")
    assert made == [
        (0, "permanent", "initial"),
        (50, "ephemeral", "every 50step"),
        (100, "permanent", "every 100step"),
        (150, "ephemeral", "every 50step"),
        (200, "permanent", "every 100step"),
        (250, "ephemeral", "every 50step"),
    ]
    ephemeral = [step for step, save_class, _ in made if save_class == "ephemeral"]
    due_for_deletion = ephemeral[:-1]
    assert [step for step, _, _ in made if step not in due_for_deletion] == [0, 100, 200, 250]


def test_the_final_save_is_permanent_also_where_an_ephemeral_one_was_made() -> None:
    """D11: what the next run would clear away is not the last word of this one."""
    policy = SavePolicy(permanent=Every("100step") | AtEnd(), ephemeral="50step")
    assert play(policy, "250step")[-2:] == [
        (250, "ephemeral", "every 50step"),
        (250, "permanent", "final"),
    ]
    assert play(policy, "200step")[-1] == (200, "permanent", "every 100step")


def test_a_cool_down_leaves_ephemeral_saves_out() -> None:
    """O6: those that are too near to any other save are not made later."""
    policy = SavePolicy(permanent=At("95step"), ephemeral="10step", cooldown="10step")
    steps = [step for step, _, _ in play(policy, "130step")]
    assert steps == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 110, 120, 130]


def test_a_cool_down_counts_from_the_checkpoint_that_was_resumed() -> None:
    """D34."""
    policy = SavePolicy(ephemeral="10step", cooldown="8step")
    resumed = Saved(permanent=Timestamp(step=25))
    now = Timestamp(step=30)
    assert policy.decide(Timestamp(step=25), resumed, now) is None
    assert policy.decide(Timestamp(step=25), Saved(), now) == Due("ephemeral", "every 10step")


def test_a_veto_holds_back_ephemeral_saves_only() -> None:
    """O7."""
    policy = SavePolicy(permanent="100step", ephemeral="50step")
    at = [Timestamp(step=step) for step in (49, 50, 99, 100)]
    assert policy.decide(at[0], Saved(), at[1], vetoes={"merger"}) is None
    assert policy.decide(at[0], Saved(), at[1], vetoes=()) == Due("ephemeral", "every 50step")
    assert policy.decide(at[2], Saved(), at[3], vetoes=["merger"]) == (
        Due("permanent", "every 100step")
    )


def test_hourly_permanent_saves_are_not_put_off_by_ephemeral_ones() -> None:
    """D47: each class measures from its own last save."""
    policy = SavePolicy(permanent="60s", ephemeral="10s")
    made = play(policy, "125step")
    assert [step for step, save_class, _ in made if save_class == "permanent"] == [60, 120]
    assert [step for step, save_class, _ in made if save_class == "ephemeral"] == [
        *(10, 20, 30, 40, 50),
        *(70, 80, 90, 100, 110),
    ]


intervals = st.integers(1, 30).map(lambda n: f"{n}step")


@given(permanent=intervals, ephemeral=intervals, length=st.integers(1, 120))
def test_permanent_saves_are_where_they_were_without_ephemeral_ones(
    permanent: str, ephemeral: str, length: int
) -> None:
    """A4: and no step has two of a class."""
    alone = play(SavePolicy(permanent=Every(permanent) | AtEnd()), f"{length}step")
    try:
        policy = SavePolicy(permanent=Every(permanent) | AtEnd(), ephemeral=ephemeral)
    except UsageError:
        assert parse(ephemeral) >= parse(permanent)
        return
    both = play(policy, f"{length}step")
    assert [save for save in both if save[1] == "permanent"] == alone
    assert len({save[:2] for save in both}) == len(both)


@given(p=st.integers(1, 24), e=st.integers(1, 24), cooldown=st.integers(1, 30))
def test_a_cool_down_is_refused_exactly_when_no_ephemeral_save_would_follow(
    p: int, e: int, cooldown: int
) -> None:
    """D47."""
    times = {"permanent": f"{p}step", "ephemeral": f"{e}step"}
    saved = Saved(permanent=Timestamp(step=0))
    try:
        policy = SavePolicy(**times, cooldown=f"{cooldown}step")
    except UsageError:
        policy = None
    if e >= p:
        assert policy is None
        return
    free = [step for step, save_class, _ in play(SavePolicy(**times), f"{p * e}step", saved=saved)]
    distances = [step % p for step in free if step % p]
    assert (policy is None) == (cooldown > max(distances))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing is saved"),
        ({"permanent": "5step", "cooldown": "2step"}, "needs ephemeral saves"),
        ({"permanent": "5step", "ephemeral": "5step"}, "must be more often"),
        ({"permanent": "5step", "ephemeral": "15step"}, "must be more often"),
        (
            {"permanent": Every("5step") | AtEnd(), "ephemeral": At("7step") | Every("5step")},
            "more",
        ),
        ({"permanent": "1h", "ephemeral": "90min"}, "must be more often"),
        ({"permanent": "0.1dur", "ephemeral": "0.2dur"}, "must be more often"),
        ({"permanent": "100step", "ephemeral": "50step", "cooldown": "60step"}, "at most '50step'"),
        ({"permanent": "1h", "ephemeral": "5min", "cooldown": "1h"}, "drops all ephemeral"),
        ({"permanent": "1h", "ephemeral": On("signal"), "cooldown": "2h"}, "drops all"),
        ({"permanent": 500}, "permanent=500"),
        ({"ephemeral": 500}, "ephemeral=500"),
        ({"ephemeral": "5step", "cooldown": 5}, "cooldown=5"),
        ({"ephemeral": "5step", "cooldown": "0s"}, "above zero"),
    ],
)
def test_settings_that_would_silently_do_nothing_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """O3, D47."""
    with pytest.raises(UsageError, match=message):
        SavePolicy(**settings)


def test_settings_that_do_nothing_in_this_run_are_refused_when_its_length_is_known() -> None:
    """D47: a tenth of 400 steps is less than 50."""
    policy = SavePolicy(permanent="0.1dur", ephemeral="50step")
    assert policy.resolve(parse("1000step")).ephemeral == Every("50step")
    with pytest.raises(UsageError, match="must be more often"):
        policy.resolve(parse("400step"))
    with pytest.raises(UsageError, match="fraction of the run"):
        policy.resolve(None)


def test_a_cool_down_may_be_a_fraction_of_the_run() -> None:
    policy = SavePolicy(ephemeral="10step", cooldown=parse("0.2dur", units=ALL_UNITS))
    made = play(policy, "100step")
    assert [step for step, _, _ in made] == [10, 30, 50, 70, 90]
    with pytest.raises(UsageError, match="length is not known"):
        policy.decide(None, Saved(ephemeral=Timestamp(step=3)), Timestamp(step=10))


def test_the_latest_save_is_the_newer_of_both_classes() -> None:
    early, late = Timestamp(step=5, wall_s=9.0), Timestamp(step=6, wall_s=1.0)
    assert Saved().latest is None
    assert Saved(permanent=early, ephemeral=late).latest is late
    assert Saved(permanent=late, ephemeral=early).latest is late
    assert Saved(permanent=early).plus("ephemeral", late) == Saved(permanent=early, ephemeral=late)
