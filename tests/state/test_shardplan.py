"""Who writes which box: each once, balanced, the same for every order of the rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UnsupportedState
from holdfast.format import layout as format_layout
from holdfast.state import shardplan
from holdfast.state.shardplan import (
    BoxTable,
    LeafTable,
    WritePlan,
    plan_writes,
    text_nbytes,
)
from holdfast.state.shards import Box, box_at, boxes_of, corners, in_order, spans_of, whole_box
from state.layouts import Layout, layouts, region

Rank = Sequence[Sequence[Box]]
"""The boxes of each leaf that one rank holds."""


def leaf_table(
    shapes: Sequence[tuple[int, ...]], *, item_nbytes: int = 4, components: Any = None
) -> LeafTable:
    return LeafTable(
        paths=[f"leaf{number}" for number in range(len(shapes))],
        shapes=shapes,
        item_nbytes=np.full(len(shapes), item_nbytes),
        component=np.zeros(len(shapes), int) if components is None else np.array(components),
        has_choice=np.ones(len(shapes), bool),
    )


def box_table(shapes: Sequence[tuple[int, ...]], ranks: Sequence[Rank]) -> BoxTable:
    return BoxTable.concatenate(
        [BoxTable.from_boxes(rank, shapes, held) for rank, held in enumerate(ranks)]
    )


@pytest.fixture(autouse=True)
def _every_box_has_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small boxes stand for those that are too large for the first holder alone."""
    monkeypatch.setattr(shardplan, "SMALL_NBYTES", 0)


def one_host(num_ranks: int) -> Any:
    return np.zeros(num_ranks, np.int32)


def shuffled(boxes: BoxTable, seed: int) -> BoxTable:
    some = np.random.default_rng(seed).permutation(len(boxes.leaf))
    columns = (boxes.leaf, boxes.rank, boxes.first, boxes.last)
    leaf, rank, first, last = (column[some] for column in columns)
    return BoxTable(leaf=leaf, rank=rank, first=first, last=last)


def chosen(boxes: BoxTable, plan: WritePlan) -> list[tuple[int, ...]]:
    """(leaf, first, last, writer, file) of each box that is written."""
    columns = (boxes.leaf, boxes.first, boxes.last, boxes.rank)
    return [
        *zip(*(column[plan.row].tolist() for column in columns), plan.file.tolist(), strict=True)
    ]


def loads(boxes: BoxTable, plan: WritePlan, num_ranks: int) -> Any:
    return np.bincount(boxes.rank[plan.row], plan.nbytes, num_ranks)


def imbalance(values: Any) -> float:
    return float(values.max() / values.mean())


def rows(num_rows: int, num_parts: int, width: int) -> list[Box]:
    """Boxes of a matrix whose rows are divided evenly."""
    size = num_rows // num_parts
    return [Box((part * size, 0), (size, width)) for part in range(num_parts)]


def hsdp(shapes: Sequence[tuple[int, int]], replicas: int, parts: int) -> list[Rank]:
    """The boxes of ranks in a mesh (replicas, parts) that shards rows."""
    by_leaf = [rows(height, parts, width) for height, width in shapes]
    return [[[boxes[part]] for boxes in by_leaf] for part in range(parts)] * replicas


def boxes_by_rank(case: Layout) -> list[list[Box]]:
    held = []
    for coordinate in case.coordinates():
        spans = spans_of(case.shape, case.mesh, coordinate, in_order(case.splits, case.mesh))
        held.append([whole_box(case.shape)] if 0 in case.shape else boxes_of(spans))
    return held


def check_covered(cases: Sequence[Layout]) -> None:
    """Several leaves, each over a mesh of its own: every element is written once."""
    shapes = [case.shape for case in cases]
    by_leaf = [boxes_by_rank(case) for case in cases]
    num_ranks = max(map(len, by_leaf))
    ranks = [[held[r] if r < len(held) else [] for held in by_leaf] for r in range(num_ranks)]
    boxes = box_table(shapes, ranks)
    plan = plan_writes(leaf_table(shapes), boxes, np.arange(num_ranks) // 2)
    times = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    for leaf, first, last, writer, _ in chosen(boxes, plan):
        box = box_at(shapes[leaf], first, last)
        assert box in ranks[writer][leaf]
        region(times[leaf], box).add_(1)
    assert all(bool((count == 1).all()) for count in times)
    assert set(boxes.leaf[plan.row].tolist()) == set(range(len(shapes)))
    assert plan.nbytes.sum() == 4 * sum(count.numel() for count in times)


@given(st.lists(layouts(), min_size=1, max_size=4))
def test_every_element_of_every_leaf_is_written_once(cases: list[Layout]) -> None:
    check_covered(cases)


@pytest.mark.full
@settings(max_examples=1_000)
@given(layouts())
def test_a_thousand_layouts_are_written_once(case: Layout) -> None:
    check_covered([case])


@given(layouts(), st.integers(0, 100))
def test_the_order_of_the_rows_changes_nothing(case: Layout, seed: int) -> None:
    boxes = box_table([case.shape], [[held] for held in boxes_by_rank(case)])
    hosts = np.arange(np.prod(case.mesh)) // 2
    other = shuffled(boxes, seed)
    leaves = leaf_table([case.shape])
    found = plan_writes(leaves, boxes, hosts), plan_writes(leaves, other, hosts)
    assert chosen(boxes, found[0]) == chosen(other, found[1])


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.data())
def test_corners_tell_a_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    spans = [sorted(data.draw(st.tuples(*[st.integers(0, n - 1)] * 2))) for n in shape]
    box = Box(tuple(low for low, _ in spans), tuple(high - low + 1 for low, high in spans))
    assert box_at(shape, *corners(shape, box)) == box


@pytest.mark.parametrize(
    ("replicas", "parts"), [(8, 1), (1, 8), (2, 4), (4, 2)], ids=["ddp", "fsdp", "hsdp2", "hsdp4"]
)
def test_bytes_are_balanced_over_ranks_and_hosts(replicas: int, parts: int) -> None:
    sizes = np.random.default_rng(0).integers(1, 200, (100, 2))
    shapes = [(8 * int(height), int(width)) for height, width in sizes]
    boxes = box_table(shapes, hsdp(shapes, replicas, parts))
    hosts = np.arange(8) // 2
    found = loads(boxes, plan_writes(leaf_table(shapes), boxes, hosts), 8)
    assert imbalance(found) <= 1.1
    assert imbalance(np.bincount(hosts, found)) <= 1.1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_no_rank_is_more_than_two_boxes_above_the_mean(
    widths: list[int], num_hosts: int, ranks_per_host: int
) -> None:
    shapes = [(1, width) for width in widths]
    num_ranks = num_hosts * ranks_per_host
    boxes = box_table(shapes, hsdp(shapes, replicas=num_ranks, parts=1))
    hosts = np.arange(num_ranks) // ranks_per_host
    found = loads(boxes, plan_writes(leaf_table(shapes), boxes, hosts), num_ranks)
    largest = 4 * max(widths, default=0)
    of_hosts = np.bincount(hosts, found)
    assert of_hosts.max() - of_hosts.min() <= largest
    assert found.max() <= found.mean() + 2 * largest


def test_what_all_hold_fills_what_the_shards_of_some_leave() -> None:
    """Rank 0 has an expert of its own; the rest is replicated over all four."""
    whole: Box = Box((0, 0), (100, 10))
    shapes = [(100, 10)] * 41
    ranks: list[Rank] = [
        [[whole] if rank == 0 or leaf else [] for leaf in range(41)] for rank in range(4)
    ]
    ranks[0] = [[whole]] * 41
    heavy = leaf_table(shapes)
    heavy.item_nbytes[0] *= 8
    boxes = box_table(shapes, ranks)
    found = loads(boxes, plan_writes(heavy, boxes, one_host(4)), 4)
    assert imbalance(found) <= 1.1


def holding(num_ranks: int, holders: Sequence[Sequence[int]]) -> list[Rank]:
    """Ranks of which some hold all of each leaf."""
    whole = Box((0, 0), (10, 10))
    return [[[whole] if rank in of else [] for of in holders] for rank in range(num_ranks)]


@pytest.mark.parametrize(
    "holders",
    [
        [*[[0]] * 20, *[[0, 1]] * 20, *[[2, 3]] * 20, *[[3]] * 20],
        [*[[0, 1]] * 20, *[[0, 1, 2, 3]] * 20],
    ],
    ids=["each set of holders has its own", "few holders first"],
)
def test_replicas_go_to_the_holders_with_the_least(holders: Sequence[Sequence[int]]) -> None:
    shapes = [(10, 10)] * len(holders)
    boxes = box_table(shapes, holding(4, holders))
    found = loads(boxes, plan_writes(leaf_table(shapes), boxes, one_host(4)), 4)
    assert imbalance(found) <= 1.1


def test_few_large_replicas_are_spread_over_hosts_first() -> None:
    shapes = [(64, 64)] * 4
    boxes = box_table(shapes, hsdp(shapes, replicas=8, parts=1))
    hosts = np.arange(8) // 2
    found = loads(boxes, plan_writes(leaf_table(shapes), boxes, hosts), 8)
    assert np.bincount(hosts, found).tolist() == [64 * 64 * 4] * 4


def test_hosts_are_balanced_by_the_number_of_their_ranks() -> None:
    shapes = [(10, 10)] * 90
    boxes = box_table(shapes, hsdp(shapes, replicas=3, parts=1))
    found = loads(boxes, plan_writes(leaf_table(shapes), boxes, np.array([0, 1, 1])), 3)
    assert imbalance(found) <= 1.1


def test_files_are_numbered_by_component_and_writer() -> None:
    shapes = [(8, 2)] * 4
    boxes = box_table(shapes, hsdp(shapes, replicas=1, parts=2))
    leaves = leaf_table(shapes, components=[0, 1, 0, 1])
    plan = plan_writes(leaves, boxes, one_host(2))
    assert boxes.leaf[plan.row].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert boxes.rank[plan.row].tolist() == [0, 1] * 4
    assert plan.file.tolist() == [0, 1] * 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_small_boxes_of_more_ranks_than_others_have_a_file_of_their_own(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardplan, "SMALL_NBYTES", 50)
    sharded, steps = [(8, 4), (8, 4), (8, 1)], [(1, 1), (1, 1)]
    shapes = [*sharded, *steps, (20, 4)]
    whole = [[whole_box(shape)] for shape in shapes[3:]]
    ranks = [[*of_rank, *whole] for of_rank in hsdp(sharded, replicas, parts=2)]
    boxes = box_table(shapes, ranks)
    plan = plan_writes(leaf_table(shapes), boxes, one_host(len(ranks)))
    written = chosen(boxes, plan)
    assert [one[0] for one, apart in zip(written, plan.apart, strict=True) if apart] == [3, 4]
    ((writer, file),) = {(writer, file) for leaf, _, _, writer, file in written if leaf in (3, 4)}
    files = {file: {one[0] for one in written if one[-1] == file} for *_, file in written}
    assert files[file] == {3, 4}
    assert len(files) == len(ranks) + 1
    assert {at for *_, rank, at in written if rank == writer} == {file - 1, file}


def test_copies_of_all_boxes_on_the_same_ranks_share_a_file(monkeypatch: Any) -> None:
    monkeypatch.setattr(shardplan, "SMALL_NBYTES", 50)
    shapes = [(8, 4), (1, 1), (8, 4), (1, 1)]
    boxes = box_table(shapes, [[[whole_box(shape)] for shape in shapes]] * 2)
    plan = plan_writes(leaf_table(shapes), boxes, one_host(2))
    assert not plan.apart.any()
    assert sorted({(file, writer) for *_, writer, file in chosen(boxes, plan)}) == [(0, 0), (1, 1)]


def test_a_rank_without_anything_to_write_has_no_number() -> None:
    shapes = [(4,), (4,)]
    ranks: list[Rank] = [[[], []], [[Box((0,), (4,))], []], [[], [Box((0,), (4,))]]]
    boxes = box_table(shapes, ranks)
    plan = plan_writes(leaf_table(shapes), boxes, one_host(3))
    assert [(writer, file) for *_, writer, file in chosen(boxes, plan)] == [(1, 0), (2, 1)]


def test_a_writer_with_many_bytes_has_a_range_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardplan, "MAX_TENSOR_FILE_NBYTES", 100)
    shapes = [(2, 10)] * 5
    boxes = box_table(shapes, hsdp(shapes, replicas=1, parts=2))
    plan = plan_writes(leaf_table(shapes), boxes, one_host(2))
    files = [(writer, file) for *_, writer, file in chosen(boxes, plan)]
    assert sorted(set(files)) == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert [file for writer, file in files if writer == 0] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 60), max_size=30))
def test_no_file_has_too_many_bytes_unless_a_box_has_them_alone(widths: list[int]) -> None:
    shapes = [(width,) for width in widths]
    boxes = box_table(shapes, [[[whole_box(shape)] for shape in shapes]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardplan, "MAX_TENSOR_FILE_NBYTES", 100)
        plan = plan_writes(leaf_table(shapes), boxes, one_host(1))
    files = [plan.nbytes[plan.file == number] for number in range(plan.file.max(initial=-1) + 1)]
    assert all(held.sum() <= 100 or len(held[held > 0]) == 1 for held in files)


def test_a_file_has_no_more_tensors_than_the_format_allows() -> None:
    num_leaves = format_layout.MAX_TENSORS_PER_FILE + 1
    shapes = [(1,)] * num_leaves
    boxes = box_table(shapes, [[[Box((0,), (1,))]] * num_leaves])
    plan = plan_writes(leaf_table(shapes), boxes, one_host(1))
    assert np.bincount(plan.file).tolist() == [num_leaves - 1, 1]


def refusals(shape: tuple[int, ...], *boxes: Box) -> str:
    """The error for a leaf that several ranks hold so, beside one that is whole."""
    shapes = [(2,), shape]
    ranks: list[Rank] = [[[Box((0,), (2,))], [box]] for box in boxes] or [[[Box((0,), (2,))], []]]
    with pytest.raises(UnsupportedState) as caught:
        plan_writes(leaf_table(shapes), box_table(shapes, ranks), one_host(len(ranks)))
    assert caught.value.paths == ["leaf1"]
    return caught.value.offenders[0][1]


@pytest.mark.parametrize(
    ("shape", "boxes", "reason"),
    [
        ((4,), [], "no rank holds the box with offsets (0,) and sizes (4,)"),
        ((), [], "no rank holds the box with offsets () and sizes ()"),
        ((0, 3), [], "no rank holds the box with offsets (0, 0) and sizes (0, 3)"),
        ((4,), [Box((0,), (3,))], "no rank holds the box with offsets (3,) and sizes (1,)"),
        ((4,), [Box((1,), (3,))], "no rank holds the box with offsets (0,) and sizes (1,)"),
        ((4,), [Box((4,), (4,))], "no rank holds the box with offsets (0,) and sizes (4,)"),
        (
            (4,),
            [Box((0,), (4,)), Box((4,), (0,))],
            "it has an empty, overlapping or too large box with offsets (4,) and sizes (0,)",
        ),
        (
            (6, 2),
            [Box((0, 0), (2, 2)), Box((4, 0), (2, 2))],
            "no rank holds the box with offsets (2, 0) and sizes (2, 2)",
        ),
        (
            (2, 2),
            [Box((0, 0), (1, 1)), Box((1, 0), (1, 1)), Box((0, 1), (1, 1))],
            "no rank holds the box with offsets (1, 1) and sizes (1, 1)",
        ),
        (
            (4, 2),
            [Box((0, 0), (3, 2)), Box((2, 0), (2, 2))],
            "it has an empty, overlapping or too large box with offsets (2, 0) and sizes (2, 2)",
        ),
        (
            (4, 2),
            [Box((0, 0), (4, 2)), Box((0, 0), (2, 2))],
            "it has an empty, overlapping or too large box with offsets (0, 0) and sizes (4, 2)",
        ),
        (
            (4,),
            [Box((0,), (2,)), Box((2,), (3,))],
            "it has an empty, overlapping or too large box with offsets (2,) and sizes (3,)",
        ),
    ],
)
def test_boxes_that_do_not_tile_a_leaf_are_named(
    shape: tuple[int, ...], boxes: list[Box], reason: str
) -> None:
    assert refusals(shape, *boxes) == reason


@given(layouts(), st.data())
def test_a_hole_and_an_overlap_are_always_found(case: Layout, data: st.DataObject) -> None:
    ranks = boxes_by_rank(case)
    distinct = sorted({box for held in ranks for box in held})
    victim = data.draw(st.sampled_from(distinct))
    others = [[box for box in held if box != victim] for held in ranks]
    hosts = one_host(len(ranks))
    for damaged in (others, [*others[:-1], [*others[-1], *shrunk(victim)]]):
        boxes = box_table([case.shape], [[held] for held in damaged])
        with pytest.raises(UnsupportedState, match="leaf0"):
            plan_writes(leaf_table([case.shape]), boxes, hosts)


def shrunk(box: Box) -> list[Box]:
    """The box without its last index in one dimension that has several."""
    offsets, sizes = box
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or 0 in sizes:
        return []
    return [Box(offsets, (*sizes[:dim], sizes[dim] - 1, *sizes[dim + 1 :]))]


def test_all_leaves_that_are_not_tiled_are_listed_and_the_first_are_explained() -> None:
    shapes = [(2,)] * 12
    with pytest.raises(UnsupportedState) as caught:
        plan_writes(leaf_table(shapes), box_table(shapes, [[[]] * 12]), one_host(1))
    assert caught.value.paths == [f"leaf{number}" for number in range(12)]
    assert "sizes (2,)" in caught.value.offenders[9][1]
    assert caught.value.offenders[10][1] == "its boxes do not tile it"


@pytest.mark.parametrize("block", [1, 7, 1_000])
def test_leaves_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    shapes = [(8, 3), (0,), (), (8,), (16, 2)]
    ranks: list[Rank] = [
        [rows(8, 4, 3), [Box((0,), (0,))], [Box((), ())], [Box((0,), (8,))], rows(16, 8, 2)]
    ]
    boxes = box_table(shapes, ranks)
    wanted = plan_writes(leaf_table(shapes), boxes, one_host(1))
    monkeypatch.setattr(shardplan, "_BLOCK_ROWS", block)
    found = plan_writes(leaf_table(shapes), boxes, one_host(1))
    assert found.nbytes.tolist() == wanted.nbytes.tolist()
    assert found.nbytes.tolist() == [24] * 4 + [0, 4, 32] + [16] * 8


def test_a_state_without_leaves_has_an_empty_plan() -> None:
    plan = plan_writes(leaf_table([]), box_table([], [[], []]), one_host(2))
    assert [len(column) for column in (plan.row, plan.nbytes, plan.file)] == [0, 0, 0]


def test_a_box_takes_less_than_fifty_bytes_of_memory_to_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that 16 million rows fit a gigabyte together with what they are made from."""
    monkeypatch.setattr(shardplan, "_BLOCK_ROWS", 5_000)
    shapes = [(512, 4)] * 300
    boxes = box_table(shapes, hsdp(shapes, replicas=1, parts=256))
    plan_writes(leaf_table(shapes), boxes, one_host(256))
    tracemalloc.start()
    plan_writes(leaf_table(shapes), boxes, one_host(256))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / len(boxes.leaf) < 50


def test_small_boxes_come_from_their_first_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardplan, "SMALL_NBYTES", 1000)
    shapes = [(10, 1), (1000, 1), (10, 1), (1000, 1)]
    boxes = box_table(shapes, hsdp(shapes, replicas=4, parts=1))
    plan = plan_writes(leaf_table(shapes), boxes, one_host(4))
    writers = boxes.rank[plan.row]
    assert writers[[0, 2]].tolist() == [0, 0]
    assert len({*writers[[1, 3]].tolist()}) == 2


def test_the_text_of_all_boxes_is_measured_before_it_is_made() -> None:
    shapes = [(1200, 7), (30, 1000)]
    boxes = box_table(shapes, hsdp(shapes, replicas=2, parts=10))
    table = leaf_table(shapes)
    plan = plan_writes(table, boxes, one_host(20))
    expected = 0
    for leaf, first, last, _, file in chosen(boxes, plan):
        box = box_at(shapes[leaf], first, last)
        lists = [f"[{','.join(map(str, numbers))}]," for numbers in (box.offsets, box.sizes)]
        expected += len(f"{leaf},{file},1234567890,{''.join(lists)}")
    assert text_nbytes(table, boxes, plan) == expected


def test_copies_of_a_box_have_one_number() -> None:
    shapes = [(8, 4), (3, 3)]
    ranks = [
        [[box], [whole_box((3, 3))] if rank < 3 else []]
        for rank, box in enumerate([*rows(8, 2, 4), *rows(8, 2, 4)])
    ]
    boxes = box_table(shapes, ranks)
    plan = plan_writes(leaf_table(shapes), boxes, one_host(4))
    assert plan.box.tolist() == [0, 2, 1, 2, 0, 2, 1]
    assert plan.copied.all()
