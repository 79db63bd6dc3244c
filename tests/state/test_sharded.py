"""What real ranks say that they hold is, put together, what torch gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import marks
import warm
from holdfast.state.shardplan import BoxTable, LeafTable, plan_writes
from holdfast.state.shards import box_at
from state.layouts import region

SCRIPT = Path(__file__).with_name("sharded.py")


def put_together(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each leaf from the boxes that the plan has written."""
    paths = [*ranks[0]]
    shapes = [ranks[0][path][0] for path in paths]
    leaves = LeafTable(
        paths=paths,
        shapes=shapes,
        item_nbytes=np.full(len(paths), 4),
        component=np.zeros(len(paths), int),
        has_choice=np.ones(len(paths), bool),
    )
    tables = [
        BoxTable.from_boxes(number, shapes, [rank[path][1] for path in paths])
        for number, rank in enumerate(ranks)
    ]
    boxes = BoxTable.concatenate(tables)
    wholes = [torch.full(shape, torch.nan) for shape in shapes]
    for row in plan_writes(leaves, boxes, np.zeros(len(ranks), int)).row:
        leaf = boxes.leaf[row]
        box = box_at(shapes[leaf], int(boxes.first[row]), int(boxes.last[row]))
        _, held, views, _ = ranks[boxes.rank[row]][paths[leaf]]
        region(wholes[leaf], box).copy_(views[held.index(box)])
    return dict(zip(paths, wholes, strict=True))


@pytest.mark.parametrize("size", [2, *marks.full(4, 6)])
def test_the_boxes_of_all_ranks_put_together_are_the_full_tensors(
    size: int, tmp_path: Path
) -> None:
    done = warm.run([SCRIPT, size, tmp_path])
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for way in ranks[0]:
        of_way = [rank[way] for rank in ranks]
        for path, whole in put_together(of_way).items():
            for _, _, _, full in (rank[path] for rank in of_way):
                assert torch.equal(whole, full), (way, path)
