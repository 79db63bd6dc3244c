"""Claims about measurements: which ones count, and how the delay by a write is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.costs import (
    ASSUMED_RESTART_S,
    NUM_RECENT,
    Costs,
    DelayMeter,
    SaveCost,
    recent,
    typical_costs,
)

FULL = {"capture_s": 0.5, "stage_s": 1.5, "write_s": 9.0, "delay_s": 3.0, "resume_s": 40.0}

some_saves = st.lists(
    st.builds(SaveCost, stall_s=st.floats(0, 100), is_first=st.booleans()), max_size=80
)


def test_the_timings_of_a_manifest_are_one_cost() -> None:
    assert SaveCost.read(FULL, is_first=True) == SaveCost(
        stall_s=2.0, write_s=9.0, delay_s=3.0, resume_s=40.0, is_first=True
    )


@pytest.mark.parametrize("missing", ["capture_s", "stage_s"])
def test_without_the_whole_stall_there_is_no_cost(missing: str) -> None:
    rest = {name: value for name, value in FULL.items() if name != missing}
    assert SaveCost.read(rest, is_first=False) is None


@pytest.mark.parametrize("value", [-1.0, 1e10, float("nan"), float("inf")])
def test_what_no_clock_gives_is_not_measured(value: float) -> None:
    found = SaveCost.read({**FULL, "write_s": value}, is_first=False)
    assert found is not None
    assert found.write_s is None


@given(before=some_saves, after=some_saves)
def test_what_was_left_out_once_never_counts_again(
    before: list[SaveCost], after: list[SaveCost]
) -> None:
    assert recent((*recent(before), *after)) == recent((*before, *after))


@given(saves=some_saves)
def test_the_newest_count_and_first_ones_only_where_there_are_no_others(
    saves: list[SaveCost],
) -> None:
    counted = recent(saves)
    assert len(counted) <= NUM_RECENT
    assert (not counted) == (not saves)
    if any(not save.is_first for save in saves):
        assert not any(save.is_first for save in counted)


def test_medians_are_what_a_save_costs() -> None:
    saves = [SaveCost(stall_s=s, write_s=w) for s, w in ((1, 10), (2, None), (90, 30))]
    assert typical_costs(saves) == Costs(
        stall_s=2, background_s=0, commit_s=20, restart_s=ASSUMED_RESTART_S
    )
    delayed = [SaveCost(stall_s=1, write_s=10, delay_s=d) for d in (4, None, 5, 6)]
    assert typical_costs(delayed, [30, 50, 300]) == Costs(
        stall_s=1, background_s=5, commit_s=10, restart_s=50
    )
    assert typical_costs([]) is None


def test_one_or_two_delays_may_be_chance() -> None:
    delayed = [SaveCost(stall_s=1, write_s=10, delay_s=d) for d in (9, 9)]
    found = typical_costs(delayed)
    assert found is not None
    assert found.background_s == 0


class Steps:
    """Steps that take as long as a test says, looked at by a DelayMeter."""

    def __init__(self) -> None:
        self.pace, self.step, self.wall_s = DelayMeter(), 0, 0.0

    def go(self, *lengths_s: float, is_writing: bool = False) -> list[float]:
        """Gives the delays that were found."""
        found = []
        for length_s in lengths_s:
            self.step, self.wall_s = self.step + 1, self.wall_s + length_s
            found.append(self.pace.look(self.step, self.wall_s, is_writing=is_writing))
        return [delay_s for delay_s in found if delay_s is not None]

    def save(self, stall_s: float) -> None:
        self.pace.save(stall_s)
        self.wall_s += stall_s


def test_the_delay_is_what_steps_take_longer_while_a_save_is_written() -> None:
    steps = Steps()
    steps.go(*[1.0] * 20)
    steps.save(5.0)
    assert steps.go(1.5, 1.5, 1.2, is_writing=True) == []
    assert steps.go(1.1) == [pytest.approx(1.3)]
    assert steps.go(*[1.0] * 20) == []


def test_a_write_that_ends_within_a_step_is_found_too() -> None:
    steps = Steps()
    steps.go(*[1.0] * 20)
    steps.save(5.0)
    assert steps.go(1.25) == [pytest.approx(0.25)]


def test_a_faster_step_is_no_negative_delay() -> None:
    steps = Steps()
    steps.go(*[1.0] * 20)
    steps.save(5.0)
    assert steps.go(0.8) == [0.0]


def test_evaluations_now_and_then_do_not_make_steps_look_slow() -> None:
    steps = Steps()
    steps.go(*([1.0] * 19 + [300.0]) * 3)
    steps.save(0.0)
    assert steps.go(2.0) == [pytest.approx(1.0)]


def test_a_jump_to_another_place_is_no_step() -> None:
    steps = Steps()
    steps.go(*[1.0] * 20)
    steps.pace.reset()
    steps.wall_s += 5000
    steps.go(*[1.0] * 20)
    steps.save(0.0)
    assert steps.go(1.5) == [pytest.approx(0.5)]


def test_too_few_steps_are_no_measure() -> None:
    steps = Steps()
    steps.go(1.0, 1.0, 1.0)
    steps.save(1.0)
    assert steps.go(9.0) == []
