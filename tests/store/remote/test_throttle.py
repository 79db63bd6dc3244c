"""Pace: turns one after the other, by a clock of the test's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from holdfast.store.remote.api import RateLimit


class Clock:
    """Seconds that go on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_pieces_get_turns_as_long_as_they_take():
    clock = Clock()
    pace = RateLimit(1000, clock=clock)
    assert pace.reserve(500) == 0
    assert pace.reserve(250) == 0.5
    assert pace.reserve(1) == 0.75


def test_a_pause_is_not_saved_up():
    clock = Clock()
    pace = RateLimit(1000, clock=clock)
    pace.reserve(1000)
    clock.now_s += 3600
    assert pace.reserve(1000) == 0
    assert pace.reserve(1000) == 1


def test_without_a_rate_nobody_waits():
    pace = RateLimit(None)
    assert [pace.reserve(10**12) for _ in range(3)] == [0, 0, 0]
    assert pace.compute_seconds(10**12) == 0


def test_ranks_of_a_host_share_its_rate_and_begin_one_after_the_other():
    """Each has a quarter of the rate, and none begins with another."""
    clock = Clock()
    ranks = [RateLimit(250, offset_s=rank * 0.25, clock=clock) for rank in range(4)]
    begins = sorted(rank.reserve(250) for rank in ranks for _ in range(5))
    assert begins == [number * 0.25 for number in range(20)]


def test_a_rank_that_goes_on_is_not_put_off_again():
    clock = Clock()
    pace = RateLimit(1000, offset_s=0.5, clock=clock)
    assert pace.reserve(1000) == 0.5
    clock.now_s += 1
    assert pace.reserve(1000) == 0.5
    clock.now_s += 60
    assert pace.reserve(1000) == 0.5


def test_threads_get_turns_of_their_own():
    pace = RateLimit(1000, clock=Clock())
    with ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(lambda _: pace.reserve(100), range(50)))
    assert [round(turn, 6) for turn in sorted(turns)] == [number / 10 for number in range(50)]
