"""R38: turns of ranks that read for each other: each block is read once, and all ranks agree."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from holdfast.loading.plan import BlockId, BlockTurn, Runs, runs_of, turns_of, windows

BLOCKS = [(file, number) for file in ("a", "b") for number in range(6)]
_ranks = st.lists(st.frozensets(st.sampled_from(BLOCKS)), min_size=2, max_size=6)


def planned(of_ranks: list[frozenset[BlockId]]) -> list[list[BlockTurn]]:
    """The turns of each rank, whose needs are given; one without needs has read all."""
    runs = [runs_of(sorted(blocks)) for blocks in of_ranks]
    needs: list[Runs] = [*dict.fromkeys(of for of in runs if of)]
    numbers = [needs.index(of) if of else -1 for of in runs]
    return [turns_of(rank, needs, numbers) for rank in range(len(of_ranks))]


@given(_ranks)
def test_of_the_ranks_that_need_a_block_one_reads_it_and_the_others_get_it(
    of_ranks: list[frozenset[BlockId]],
) -> None:
    found = planned(of_ranks)
    for block in BLOCKS:
        need = {rank for rank, blocks in enumerate(of_ranks) if block in blocks}
        turns = {rank: t for rank, all_ in enumerate(found) for t in all_ if t.block == block}
        assert turns.keys() == (need if len(need) > 1 else set())
        for turn in turns.values():
            assert turn == next(iter(turns.values()))
            assert {turn.reader, *turn.receivers} == need
            assert turn.reader not in turn.receivers
    orders = [[turn.block for turn in turns] for turns in found]
    assert all(order == sorted(order) for order in orders)


@given(st.integers(2, 7), st.integers(1, 40))
def test_replicas_read_equally_many_blocks(num_ranks: int, num_blocks: int) -> None:
    turns = turns_of(1, [(("a", 0, num_blocks),)], [0] * num_ranks)
    counts = Counter(turn.reader for turn in turns)
    assert max(counts.values()) == math.ceil(num_blocks / num_ranks)
    assert sum(counts.values()) == num_blocks


def test_pairs_of_replicas_do_not_all_begin_with_the_same_rank() -> None:
    """Blocks that all need, and others that some do: none is always read by the first of them."""
    needs = [(("a", 0, 1), ("b", 0, 1)), (("a", 0, 1), ("b", 1, 2))]
    turns = turns_of(0, needs, [0, 0, 1, 1]) + turns_of(3, needs, [0, 0, 1, 1])
    readers = {turn.block: turn.reader for turn in turns}
    assert readers == {("a", 0): 0, ("b", 0): 1, ("b", 1): 2}


@given(st.frozensets(st.sampled_from(BLOCKS)))
def test_runs_hold_the_blocks_and_no_others(blocks: frozenset[BlockId]) -> None:
    runs = runs_of(sorted(blocks))
    assert {(file, at) for file, start, stop in runs for at in range(start, stop)} == blocks
    assert all((file, stop) not in blocks for file, _, stop in runs)


def test_windows_hold_all_turns_in_order() -> None:
    turns = turns_of(0, [(("a", 0, 10),)], [0, 0])
    cut = [*windows(turns, 4)]
    assert [len(window) for window in cut] == [4, 4, 2]
    assert [turn for window in cut for turn in window] == turns
