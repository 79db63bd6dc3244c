"""R38: ranks get the leader's wishes at the same call, each once; they wait only at a promise."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control import agreement as agreement
from holdfast.control.agreement import SaveStepAgreement
from holdfast.errors import RanksError, RanksFailed, RanksSilent
from holdfast.ranks.coordinator import Coordinator
from holdfast.testing.ranks import ThreadCoordinator

PATIENCE_S = 60.0
BRIEF_S = 0.5

Got = list[tuple[int, bytes]]


@pytest.fixture(autouse=True, scope="module")
def _short_margin() -> Iterator[None]:
    """The longer it is, the more calls a test makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "MARGIN_S", 0.005)
        yield


def on_all(ranks: Sequence[Coordinator], rank: Callable[[Coordinator], Got]) -> list[Got]:
    """Run a function in a thread for each rank; return its results in the order of ranks."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(rank, ranks))


def look_on(agreed: SaveStepAgreement) -> None:
    """Call `count_call` until it returns a wish."""
    while agreed.count_call() is None:
        pass


@settings(max_examples=100, deadline=None)
@given(
    world_size=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    wishes=st.lists(st.binary(max_size=3), max_size=4),
)
def test_all_ranks_get_each_wish_once_and_at_the_same_call(
    world_size: int, seed: int, wishes: list[bytes]
) -> None:
    """Whatever the speeds of the ranks, which a collective holds together now and then."""
    collective = threading.Barrier(world_size)

    def run(coordinator: Coordinator) -> Got:
        try:
            return looped(coordinator)
        except BaseException:
            collective.abort()  # no rank waits for one that failed
            raise

    def looped(coordinator: Coordinator) -> Got:
        speed = random.Random(f"{seed} {coordinator.rank}")
        pauses = [0.0, 0.0, 0.0005, 0.003][: speed.randint(1, 4)]
        agreed = SaveStepAgreement(coordinator, timeout_s=PATIENCE_S, warn=print)
        waiting, got, count = list(wishes), [], 0
        while len(got) < len(wishes):
            count += 1
            wish = agreed.count_call()
            if wish is not None:
                got.append((count, wish))
            if coordinator.is_leader and waiting and not agreed.is_asking:
                agreed.propose_wish(waiting.pop(0))
            time.sleep(speed.choice(pauses))
            if count % 20 == 0:
                collective.wait(PATIENCE_S)
        agreed.leave_agreement()
        return got

    first, *others = on_all(ThreadCoordinator.for_ranks(world_size), run)
    assert [wish for _, wish in first] == wishes
    assert others == [first] * (world_size - 1)


def test_a_rank_waits_for_a_slow_one_only_at_the_position_it_promised() -> None:
    """The slow one makes no call: its thread answers for it, and the leader goes on."""
    leader, follower = (
        SaveStepAgreement(r, timeout_s=PATIENCE_S, warn=print)
        for r in ThreadCoordinator.for_ranks(2)
    )
    follower.count_call()
    leader.count_call()
    leader.propose_wish(b"wish")
    count, wish = 1, None
    while wish is None:
        count, wish = count + 1, leader.count_call()
    assert wish == b"wish"
    assert [follower.count_call() for _ in range(2, count + 1)] == [None] * (count - 2) + [b"wish"]
    leader.leave_agreement()
    follower.leave_agreement()


def silent(ranks: list[ThreadCoordinator]) -> None:
    """The follower has ended, or is stopped."""


def closed(ranks: list[ThreadCoordinator]) -> None:
    """The follower was closed before it was asked."""
    agreed = SaveStepAgreement(ranks[1], timeout_s=PATIENCE_S, warn=print)
    agreed.count_call()
    agreed.leave_agreement()


@pytest.mark.parametrize(("lost", "error"), [(silent, RanksSilent), (closed, RanksFailed)])
def test_a_lost_rank_is_named_in_all_others_at_the_deadline(
    lost: Callable[[list[ThreadCoordinator]], None], error: type[RanksError]
) -> None:
    ranks = ThreadCoordinator.for_ranks(3)
    lost(ranks)

    def run(coordinator: Coordinator) -> Got:
        if coordinator.rank == 1:
            return []
        agreed = SaveStepAgreement(coordinator, timeout_s=PATIENCE_S, warn=print)
        agreed.count_call()
        if coordinator.is_leader:
            agreed.propose_wish(b"wish", timeout_s=BRIEF_S)
        for _ in range(2):  # it stays so
            with pytest.raises(error if coordinator.is_leader else RanksFailed, match="rank 1"):
                look_on(agreed)
        agreed.leave_agreement()
        return [(coordinator.rank, b"named")]

    assert on_all(ranks, run) == [[(0, b"named")], [], [(2, b"named")]]


def test_a_follower_whose_leader_is_lost_raises_at_its_promise() -> None:
    leader, follower = ThreadCoordinator.for_ranks(2)
    agreed = SaveStepAgreement(follower, timeout_s=BRIEF_S, warn=print)
    agreed.count_call()
    leader.announce(f"question 0 of agreement {leader.number()}", b"where", timeout_s=1)
    with pytest.raises(RanksSilent, match="rank 0"):
        look_on(agreed)
    agreed.leave_agreement()


def test_threads_end_when_the_leader_is_closed() -> None:
    agreed = [
        SaveStepAgreement(rank, timeout_s=PATIENCE_S, warn=print)
        for rank in ThreadCoordinator.for_ranks(3)
    ]
    for each in agreed:
        each.count_call()
    for each in agreed:
        each.leave_agreement()
    for thread in threading.enumerate():
        if thread.name == "holdfast-agreed":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_one_rank_starts_no_thread() -> None:
    (alone,) = ThreadCoordinator.for_ranks(1)
    before = threading.active_count()
    assert SaveStepAgreement(alone, timeout_s=PATIENCE_S, warn=print).count_call() is None
    assert threading.active_count() == before
