"""Counts within epochs and cycles."""

from __future__ import annotations

from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Odometer


def test_counts_within_an_epoch_begin_where_the_one_before_ended() -> None:
    odometer = Odometer()
    first = odometer.count_within_rounds(
        Timestamp(step=3, epoch=0, samples=30, tokens=300, wall_s=6.0)
    )
    assert (first.step_in_epoch, first.samples_in_epoch, first.tokens_in_epoch) == (3, 30, 300)
    assert first.epoch_wall_s == 6.0
    assert first.step_wall_s == 2.0
    end = odometer.count_within_rounds(
        Timestamp(step=5, epoch=1, samples=50, tokens=500, wall_s=12.0)
    )
    assert (end.step_in_epoch, end.samples_in_epoch, end.tokens_in_epoch) == (0, 0, 0)
    assert (end.epoch_wall_s, end.step_wall_s) == (0.0, 3.0)
    later = odometer.count_within_rounds(
        Timestamp(step=6, epoch=1, samples=60, tokens=600, wall_s=13.0)
    )
    assert (later.step_in_epoch, later.samples_in_epoch, later.tokens_in_epoch) == (1, 10, 100)
    assert (later.epoch_wall_s, later.step_wall_s) == (1.0, 1.0)


def test_two_looks_at_one_step_say_the_same() -> None:
    odometer = Odometer()
    odometer.count_within_rounds(Timestamp(step=1, epoch=0, wall_s=1.0))
    looked = odometer.count_within_rounds(Timestamp(step=2, epoch=0, wall_s=3.0))
    again = odometer.count_within_rounds(Timestamp(step=2, epoch=0, wall_s=3.5))
    assert (again.step_in_epoch, again.step_wall_s) == (looked.step_in_epoch, looked.step_wall_s)


def test_what_the_loop_does_not_count_stays_unknown() -> None:
    now = Odometer().count_within_rounds(Timestamp(step=2, wall_s=1.0))
    assert now == Timestamp(step=2, wall_s=1.0, step_wall_s=0.5)


def test_cycles_count_their_steps() -> None:
    odometer = Odometer()
    assert odometer.count_within_rounds(Timestamp(step=4, cycle=0)).step_in_cycle == 4
    assert odometer.count_within_rounds(Timestamp(step=5, cycle=1)).step_in_cycle == 0
    assert odometer.count_within_rounds(Timestamp(step=9, cycle=1)).step_in_cycle == 4


def test_a_resume_goes_on_within_the_epoch() -> None:
    """Invariant 7: a resumed run records what the undisturbed one would."""
    moments = [
        Timestamp(step=step, epoch=step // 4, samples=step * 2, cycle=step // 6, wall_s=float(step))
        for step in range(1, 12)
    ]
    straight = Odometer()
    expected = [straight.count_within_rounds(moment) for moment in moments]
    for cut in range(1, len(moments)):
        resumed = Odometer()
        resumed.restore_counts(expected[cut - 1])
        assert [resumed.count_within_rounds(moment) for moment in moments[cut:]] == expected[cut:]


def test_counts_within_an_epoch_are_unknown_where_nobody_saw_it_begin() -> None:
    """The first look, in the second epoch: unknown, and not 0, until the third begins."""
    odometer = Odometer()
    first = odometer.count_within_rounds(
        Timestamp(step=7, epoch=1, samples=70, tokens=700, cycle=2, wall_s=7.0)
    )
    assert (first.step_in_epoch, first.samples_in_epoch, first.tokens_in_epoch) == (None,) * 3
    assert (first.epoch_wall_s, first.step_in_cycle) == (None, None)
    assert (first.step, first.epoch, first.cycle, first.step_wall_s) == (7, 1, 2, 1.0)
    later = odometer.count_within_rounds(
        Timestamp(step=9, epoch=1, samples=90, cycle=2, wall_s=9.0)
    )
    assert (later.step_in_epoch, later.samples_in_epoch, later.step_in_cycle) == (None,) * 3
    third = odometer.count_within_rounds(
        Timestamp(step=10, epoch=2, samples=100, cycle=3, wall_s=10.0)
    )
    assert (third.step_in_epoch, third.samples_in_epoch, third.step_in_cycle) == (0, 0, 0)
    after = odometer.count_within_rounds(
        Timestamp(step=12, epoch=2, samples=120, cycle=3, wall_s=12.0)
    )
    assert (after.step_in_epoch, after.samples_in_epoch, after.step_in_cycle) == (2, 20, 2)


def test_what_is_unknown_stays_so_over_a_resume() -> None:
    """Invariant 7: also where the checkpoint does not know where its epoch began."""
    moments = [
        Timestamp(step=step, epoch=step // 4, samples=step * 2, cycle=step // 6, wall_s=float(step))
        for step in range(7, 20)
    ]
    straight = Odometer()
    expected = [straight.count_within_rounds(moment) for moment in moments]
    assert (expected[0].step_in_epoch, expected[0].step_in_cycle) == (None, None)
    assert (expected[1].step_in_epoch, expected[5].step_in_cycle) == (0, 0)
    for cut in range(1, len(moments)):
        resumed = Odometer()
        resumed.restore_counts(expected[cut - 1])
        assert [resumed.count_within_rounds(moment) for moment in moments[cut:]] == expected[cut:]


def test_a_run_that_begins_to_count_epochs_knows_none_at_first() -> None:
    """After a checkpoint without epochs nothing is known of the present one."""
    odometer = Odometer()
    odometer.restore_counts(Timestamp(step=100, wall_s=50.0))
    assert (
        odometer.count_within_rounds(Timestamp(step=101, epoch=0, wall_s=51.0)).step_in_epoch
        is None
    )
    assert (
        odometer.count_within_rounds(Timestamp(step=105, epoch=1, wall_s=55.0)).step_in_epoch == 0
    )


def test_samples_that_are_told_in_mid_epoch_are_not_all_of_the_epoch() -> None:
    """A total that was not known where the epoch began says nothing of the epoch."""
    odometer = Odometer()
    odometer.count_within_rounds(Timestamp(step=4, epoch=0, wall_s=1.0))
    odometer.count_within_rounds(Timestamp(step=5, epoch=1, wall_s=2.0))
    now = odometer.count_within_rounds(Timestamp(step=6, epoch=1, samples=60, wall_s=3.0))
    assert (now.step_in_epoch, now.samples_in_epoch) == (1, None)
