"""Claims about measurements: which ones count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.costs import NUM_RECENT, SaveCost, recent

FULL = {"capture_s": 0.5, "stage_s": 1.5, "write_s": 9.0}

some_saves = st.lists(
    st.builds(SaveCost, stall_s=st.floats(0, 100), is_first=st.booleans()), max_size=80
)


def test_the_timings_of_a_manifest_are_one_cost() -> None:
    assert SaveCost.read(FULL, is_first=True) == SaveCost(stall_s=2.0, write_s=9.0, is_first=True)


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
