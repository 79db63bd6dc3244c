"""Records that are made once more are told from new ones by their place in the sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import FormatError
from holdfast.train.loggers.services import Replays


@given(
    counts=st.lists(st.integers(0, 3), max_size=8),
    ends=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 8)), max_size=4),
)
def test_each_record_is_made_once_whatever_happened(
    counts: list[int], ends: list[tuple[int, int]]
) -> None:
    """Several processes, each ended after some records and going on from some step before."""
    records = [(step, place) for step, count in enumerate(counts, 1) for place in range(count)]
    made: list[tuple[int, int]] = []
    position, at_most = "0/0", 0
    for end, resumed_from in [*ends, (len(records), len(counts))]:
        replays = Replays(position)
        first = min(resumed_from, at_most)
        for step, place in [item for item in records if item[0] > first][:end]:
            if replays.is_new(step):
                made.append((step, place))
            position, at_most = replays.position, max(at_most, step - 1)
    assert made == records[: len(made)]


def test_what_is_logged_once_more_of_the_step_that_was_resumed_is_new() -> None:
    """Such as a validation that the process before did not come to, after a record of the step."""
    before = Replays()
    assert before.is_new(3)
    after = Replays(before.position, resumed_step=3)
    assert after.is_new(3)
    assert after.is_new(4)


@pytest.mark.parametrize("position", ["", "5", "5/", "-1/2", "1/2/3", "a/b", "1/2\n"])
def test_what_is_no_position_is_refused(position: str) -> None:
    with pytest.raises(FormatError, match="no position"):
        Replays(position)
