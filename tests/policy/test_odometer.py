"""Counts within epochs and cycles."""

from __future__ import annotations

from holdfast.format.manifest import Timestamp
from holdfast.policy.odometer import Odometer


def test_counts_within_an_epoch_begin_where_the_one_before_ended() -> None:
    odometer = Odometer()
    first = odometer.look(Timestamp(step=3, epoch=0, samples=30, tokens=300, wall_s=6.0))
    assert (first.step_in_epoch, first.samples_in_epoch, first.tokens_in_epoch) == (3, 30, 300)
    assert first.epoch_wall_s == 6.0
    assert first.step_wall_s == 2.0
    end = odometer.look(Timestamp(step=5, epoch=1, samples=50, tokens=500, wall_s=12.0))
    assert (end.step_in_epoch, end.samples_in_epoch, end.tokens_in_epoch) == (0, 0, 0)
    assert (end.epoch_wall_s, end.step_wall_s) == (0.0, 3.0)
    later = odometer.look(Timestamp(step=6, epoch=1, samples=60, tokens=600, wall_s=13.0))
    assert (later.step_in_epoch, later.samples_in_epoch, later.tokens_in_epoch) == (1, 10, 100)
    assert (later.epoch_wall_s, later.step_wall_s) == (1.0, 1.0)


def test_two_looks_at_one_step_say_the_same() -> None:
    odometer = Odometer()
    odometer.look(Timestamp(step=1, epoch=0, wall_s=1.0))
    looked = odometer.look(Timestamp(step=2, epoch=0, wall_s=3.0))
    again = odometer.look(Timestamp(step=2, epoch=0, wall_s=3.5))
    assert (again.step_in_epoch, again.step_wall_s) == (looked.step_in_epoch, looked.step_wall_s)


def test_what_the_loop_does_not_count_stays_unknown() -> None:
    now = Odometer().look(Timestamp(step=2, wall_s=1.0))
    assert now == Timestamp(step=2, wall_s=1.0, step_wall_s=0.5)


def test_cycles_count_their_steps() -> None:
    odometer = Odometer()
    assert odometer.look(Timestamp(step=4, cycle=0)).step_in_cycle == 4
    assert odometer.look(Timestamp(step=5, cycle=1)).step_in_cycle == 0
    assert odometer.look(Timestamp(step=9, cycle=1)).step_in_cycle == 4


def test_a_resume_goes_on_within_the_epoch() -> None:
    """Invariant 7: a resumed run records what the undisturbed one would."""
    moments = [
        Timestamp(step=step, epoch=step // 4, samples=step * 2, cycle=step // 6, wall_s=float(step))
        for step in range(1, 12)
    ]
    straight = Odometer()
    expected = [straight.look(moment) for moment in moments]
    for cut in range(1, len(moments)):
        resumed = Odometer()
        resumed.stand_on(expected[cut - 1])
        assert [resumed.look(moment) for moment in moments[cut:]] == expected[cut:]
