"""R38: the contract of every coordinator, for one process, threads, and torch's stores."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from holdfast.encryption.messages import EncryptedRanks
from holdfast.errors import DeadlineExceeded, RanksError, RanksFailed, RanksSilent, UsageError
from holdfast.ranks.coordinator import LEADER, Collected, Coordinator, RankFailure
from ranks.together import BRIEF_S, PATIENCE_S, coordinators, in_thread, together

ALONE = [("alone", 1), ("threads", 1), ("tcp", 1)]
SEVERAL = [("threads", 3), ("encrypted", 3), ("tcp", 3), ("file", 2)]
FAILURE = RankFailure("write", "OSError: no space left")

Ranks = Sequence[Coordinator]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The coordinators of one kind; the same for all tests, whose rounds have tags of their own."""
    kind, world_size = request.param
    return coordinators(kind, world_size, tmp_path_factory.mktemp(kind))


@pytest.fixture
def tag() -> str:
    return f"save {secrets.token_hex(4)}"


any_ranks = pytest.mark.parametrize("ranks", [*ALONE, *SEVERAL], indirect=True, ids=str)
several_ranks = pytest.mark.parametrize("ranks", SEVERAL, indirect=True, ids=str)


def round_of(tag: str, data: bytes, rank: Coordinator) -> object:
    """A whole round: what the leader collected, or what the follower heard."""
    rank.post(tag, b"%d of " % rank.rank + data, timeout_s=PATIENCE_S)
    if not rank.is_leader:
        return rank.hear(tag, timeout_s=PATIENCE_S)
    collected = rank.collect(tag, timeout_s=PATIENCE_S)
    rank.announce(tag, b"heard " + data, timeout_s=PATIENCE_S)
    return collected


def expect_round(results: Sequence[object], data: bytes) -> None:
    collected, *heard = results
    came = {rank: b"%d of " % rank + data for rank in range(len(results))}
    assert collected == Collected(came=came, failed={}, silent=[])
    assert heard == [b"heard " + data] * (len(results) - 1)


@any_ranks
@pytest.mark.parametrize("length", [0, 1, 2**18 - 5, 2**18 + 1, 3 * 2**20])
def test_all_posts_reach_the_leader_and_its_announcement_all_followers(
    ranks: Ranks, length: int, tag: str
) -> None:
    data = bytes(range(256)) * (length // 256) + b"\xff" * (length % 256)
    expect_round(together(ranks, partial(round_of, tag, data)), data)


@any_ranks
def test_an_empty_message_is_a_message(ranks: Ranks, tag: str) -> None:
    for rank in ranks:
        rank.post(tag, b"", timeout_s=PATIENCE_S)
    collected = ranks[LEADER].collect(tag, timeout_s=PATIENCE_S)
    assert collected.expect_all(tag) == [b""] * len(ranks)


@any_ranks
def test_ranks_and_leader_are_known(ranks: Ranks, tag: str) -> None:
    assert [(r.rank, r.world_size, r.is_leader) for r in ranks] == [
        (n, len(ranks), n == 0) for n in range(len(ranks))
    ]


@any_ranks
def test_many_rounds_follow_each_other(ranks: Ranks, tag: str) -> None:
    for number in range(40):
        data = b"%d" % number
        expect_round(together(ranks, partial(round_of, f"{tag} {number}", data)), data)


@several_ranks
def test_rounds_at_the_same_time_do_not_mix(ranks: Ranks, tag: str) -> None:
    tags = [f"{tag}{end}" for end in ("", "/1", "/1/0", " side")]
    under_way = [in_thread(together, ranks, partial(round_of, tag, tag.encode())) for tag in tags]
    for tag, results in zip(tags, under_way, strict=True):
        expect_round(results.result(PATIENCE_S), tag.encode())


@any_ranks
def test_who_is_silent_at_the_deadline_is_named_and_what_came_is_there(
    ranks: Ranks, tag: str
) -> None:
    *others, silent = ranks
    for rank in others:
        rank.post(tag, b"here", timeout_s=PATIENCE_S)
    collected = ranks[LEADER].collect(tag, timeout_s=BRIEF_S)
    came = {rank.rank: b"here" for rank in others}
    assert collected == Collected(came=came, failed={}, silent=[silent.rank])
    with pytest.raises(RanksSilent, match=f"{tag}: .* from rank {silent.rank}\\.") as raised:
        collected.expect_all(tag)
    assert raised.value.ranks == [silent.rank]
    assert isinstance(raised.value, DeadlineExceeded)


@several_ranks
def test_a_rank_that_fails_is_named_at_once_with_its_phase(ranks: Ranks, tag: str) -> None:
    """`collect` does not wait for the others, which post nothing."""
    collecting = in_thread(partial(ranks[LEADER].collect, tag, timeout_s=10 * PATIENCE_S))
    ranks[1].fail(tag, FAILURE, timeout_s=PATIENCE_S)
    collected = collecting.result(PATIENCE_S)
    assert collected.failed == {1: FAILURE}
    with pytest.raises(RanksFailed, match="rank 1, in write: OSError: no space left") as raised:
        collected.expect_all(tag)
    assert raised.value.failed == {1: ("write", "OSError: no space left")}


@several_ranks
def test_a_leader_that_fails_is_named_to_its_followers_at_once(ranks: Ranks, tag: str) -> None:
    hearing = [in_thread(partial(r.hear, tag, timeout_s=10 * PATIENCE_S)) for r in ranks[1:]]
    ranks[LEADER].fail(tag, FAILURE, timeout_s=PATIENCE_S)
    for future in hearing:
        with pytest.raises(RanksFailed, match="rank 0, in write: OSError"):
            future.result(PATIENCE_S)


@several_ranks
def test_a_silent_leader_is_named_at_the_deadline(ranks: Ranks, tag: str) -> None:
    with pytest.raises(RanksSilent, match="rank 0") as raised:
        ranks[1].hear(tag, timeout_s=BRIEF_S)
    assert raised.value.ranks == [LEADER]


@several_ranks
def test_late_posts_of_an_old_round_are_not_read_by_a_new_one(ranks: Ranks, tag: str) -> None:
    assert ranks[LEADER].collect(tag, timeout_s=BRIEF_S).came == {}
    ranks[1].post(tag, b"late", timeout_s=PATIENCE_S)
    ranks[1].fail(f"{tag}b", FAILURE, timeout_s=PATIENCE_S)
    collected = ranks[LEADER].collect(f"{tag}c", timeout_s=BRIEF_S)
    assert collected == Collected(came={}, failed={}, silent=[r.rank for r in ranks])


@several_ranks
def test_a_follower_hears_late_what_was_announced_before(ranks: Ranks, tag: str) -> None:
    ranks[LEADER].announce(tag, b"committed", timeout_s=PATIENCE_S)
    assert ranks[1].hear(tag, timeout_s=PATIENCE_S) == b"committed"


@several_ranks
@pytest.mark.parametrize("length", [0, 100, 2**18 + 1])
def test_each_rank_hears_a_message_of_its_own(ranks: Ranks, length: int, tag: str) -> None:
    own = [b"%d " % rank + b"x" * length for rank in range(len(ranks))]

    def hear(rank: Coordinator) -> bytes:
        if rank.is_leader:
            rank.announce_each(tag, own, timeout_s=PATIENCE_S)
            return own[LEADER]
        return rank.hear(tag, timeout_s=PATIENCE_S)

    assert together(ranks, hear) == own


def test_a_message_for_one_rank_is_refused_by_another() -> None:
    """The store could give it to the wrong rank."""
    leader, *_, swapped = coordinators("encrypted", 3, Path())
    assert isinstance(swapped, EncryptedRanks)
    leader.announce_each("plan", [b"", b"first", b"second"], timeout_s=PATIENCE_S)
    swapped._inner.rank = 1
    with pytest.raises(RanksError, match="has not encrypted"):
        swapped.hear("plan", timeout_s=PATIENCE_S)


@several_ranks
def test_only_the_leader_collects_and_announces_and_only_followers_hear(
    ranks: Ranks, tag: str
) -> None:
    with pytest.raises(UsageError, match="rank 1 is a follower"):
        ranks[1].collect(tag, timeout_s=PATIENCE_S)
    with pytest.raises(UsageError, match="rank 1 is a follower"):
        ranks[1].announce(tag, b"", timeout_s=PATIENCE_S)
    with pytest.raises(UsageError, match="rank 1 is a follower"):
        ranks[1].announce_each(tag, [], timeout_s=PATIENCE_S)


@any_ranks
def test_the_leader_hears_nothing(ranks: Ranks, tag: str) -> None:
    with pytest.raises(UsageError, match="hear"):
        ranks[LEADER].hear(tag, timeout_s=PATIENCE_S)


@any_ranks
def test_a_rank_that_uses_a_tag_twice_is_refused(ranks: Ranks, tag: str) -> None:
    """Else two posts of a rank count as those of two, and a second collect misses what came."""
    leader, poster = ranks[LEADER], ranks[-1]
    poster.post(tag, b"first", timeout_s=PATIENCE_S)
    leader.announce(tag, b"", timeout_s=PATIENCE_S)
    came = leader.collect(tag, timeout_s=BRIEF_S).came
    assert came == {poster.rank: b"first"}
    for verb, again in {
        "post": partial(poster.post, tag, b"second"),
        "announce": partial(leader.announce, tag, b"second"),
        "collect": partial(leader.collect, tag),
    }.items():
        with pytest.raises(
            UsageError, match=f"has used the tag '{tag}' to {verb} before: .*number"
        ):
            again(timeout_s=PATIENCE_S)


@several_ranks
def test_a_rank_that_failed_after_its_post_is_named_if_nobody_has_read_it(
    ranks: Ranks, tag: str
) -> None:
    ranks[1].post(tag, b"", timeout_s=PATIENCE_S)
    ranks[1].fail(tag, FAILURE, timeout_s=PATIENCE_S)
    assert ranks[LEADER].collect(tag, timeout_s=PATIENCE_S).failed == {1: FAILURE}


@any_ranks
def test_numbers_are_the_same_in_all_ranks(ranks: Ranks) -> None:
    first = [rank.number() for rank in ranks]
    assert first == [first[0]] * len(ranks)
    assert [rank.number() for rank in ranks] == [first[0] + 1] * len(ranks)


def test_a_failure_names_the_error_and_is_cut() -> None:
    failure = RankFailure.from_error(ValueError("x" * 10_000), phase="stage")
    assert failure.phase == "stage"
    assert failure.reason.startswith("ValueError: xxx")
    assert len(failure.reason) == 2000


def test_a_failure_that_is_passed_on_names_its_rank_and_is_not_nested() -> None:
    failed = RanksFailed("save 1", dict.fromkeys((3, 1), FAILURE) | {2: RankFailure("plan", "why")})
    passed_on = RanksFailed("save 1", {0: RankFailure.from_error(failed, phase="commit")})
    assert str(passed_on) == (
        "save 1 failed in:\n  rank 0, in commit: ranks 1 and 3, in write: OSError: no space left; "
        "rank 2, in plan: why"
    )


@several_ranks
def test_a_failure_arrives_whose_text_no_message_can_carry(ranks: Ranks, tag: str) -> None:
    """Names of files that are not UTF-8 are text with surrogates."""
    error = OSError(f"no such file: {os.fsdecode(bytes([255]))}")
    ranks[1].fail(tag, RankFailure.from_error(error, phase="read"), timeout_s=PATIENCE_S)
    failed = ranks[LEADER].collect(tag, timeout_s=PATIENCE_S).failed
    assert failed == {1: ("read", r"OSError: no such file: \udcff")}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([7], "rank 7"),
        ([4, 2], "ranks 2 and 4"),
        ([2, 0, 1], "ranks 0 to 2"),
        (
            [3, *range(5, 10), *range(20, 100, 2)],
            "ranks 3, 5 to 9, 20, 22, 24, 26, 28, 30, 32, 34 and 32 more",
        ),
        (range(16_384), "ranks 0 to 16383"),
    ],
)
def test_many_ranks_are_named_in_few_words(ranks: Sequence[int], words: str) -> None:
    assert f"from {words}." in str(RanksSilent("save 1", ranks))
    failed = RanksFailed("save 1", dict.fromkeys(ranks, FAILURE))
    assert str(failed) == f"save 1 failed in:\n  {words}, in write: OSError: no space left"


def test_a_rank_outside_the_world_is_refused() -> None:
    from holdfast.testing import ThreadCoordinator

    assert ThreadCoordinator.for_ranks(2)[1].rank == 1
    with pytest.raises(UsageError, match="rank=2 must be from 0 to 1"):
        ThreadCoordinator(2, 2, ThreadCoordinator.for_ranks(2)[0]._board)
