"""Which boxes of the global tensors a rank holds, beside torch's own chunking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.format.objects import Refused
from holdfast.state.shards import (
    Box,
    LocalShards,
    boxes_of,
    in_order,
    packed,
    shards_of,
    spans_of,
    whole_box,
)
from state.layouts import Layout, chunked_in, layouts, orders, region


def check_spans(layout: Layout, local: Tensor, spans: list[Any]) -> None:
    """The spans are those elements of the global tensor that the local one has, in its order."""
    assert tuple(sum(stop - start for start, stop in of_dim) for of_dim in spans) == local.shape
    for box, place in zip(boxes_of(spans), boxes_of(packed(spans)), strict=True):
        assert torch.equal(region(local, place), region(layout.whole, box))


def check_geometry(layout: Layout) -> None:
    found: list[int] = []
    for coordinate in layout.coordinates():
        local = layout.scattered(coordinate)
        check_spans(layout, local, spans_of(layout.shape, layout.mesh, coordinate, layout.splits))
        found += local.flatten().tolist()
    copies = np.bincount(found, minlength=layout.whole.numel())
    assert not copies.size or 0 < copies.min() == copies.max()


def check_order(layout: Layout, order: list[int]) -> None:
    splits = in_order(layout.splits, layout.mesh)
    for coordinate in layout.coordinates():
        local = chunked_in(layout, order, coordinate)
        check_spans(layout, local, spans_of(layout.shape, layout.mesh, coordinate, splits))


@given(layouts())
def test_every_rank_holds_what_torch_gives_it_and_together_they_hold_every_element(
    layout: Layout,
) -> None:
    check_geometry(layout)


@given(orders())
def test_the_factors_of_strided_shards_tell_the_order_of_sharding(case: Any) -> None:
    check_order(*case)


@pytest.mark.full
@settings(max_examples=1_000)
@given(layouts())
def test_a_thousand_layouts_are_as_torch_makes_them(layout: Layout) -> None:
    check_geometry(layout)


@pytest.mark.full
@settings(max_examples=1_000)
@given(orders())
def test_a_thousand_orders_are_read_from_the_factors(case: Any) -> None:
    check_order(*case)


@given(layouts())
def test_a_dtensor_is_read_right_on_every_rank_or_refused_on_one(layout: Layout) -> None:
    """Only a strided placement whose chunks are uneven means different things to parts of torch."""
    read, refused = [], 0
    for coordinate in layout.coordinates():
        local = layout.scattered(coordinate)
        shards = shards_of(layout.dtensor(coordinate, local))
        refused += isinstance(shards, Refused)
        read.append((local, shards))
    if refused:
        assert any(isinstance(placement, _StridedShard) for placement in layout.placements)
        return
    for local, shards in read:
        assert isinstance(shards, LocalShards)
        assert shards.shape == layout.shape
        check_views(layout, local, shards)


@given(orders())
def test_a_dtensor_sharded_in_another_order_is_read_right(case: Any) -> None:
    layout, order = case
    for coordinate in layout.coordinates():
        local = chunked_in(layout, order, coordinate)
        shards = shards_of(layout.dtensor(coordinate, local))
        assert isinstance(shards, LocalShards)
        check_views(layout, local, shards)


def check_views(layout: Layout, local: Tensor, shards: LocalShards) -> None:
    for box, view in zip(shards.boxes, shards.views, strict=True):
        assert torch.equal(view, region(layout.whole, box))
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert sum(view.numel() for view in shards.views) == local.numel()
    assert layout.whole.numel() or shards.boxes == (whole_box(layout.shape),)


def test_a_lone_strided_shard_is_several_boxes() -> None:
    """torch's own helper gives the first of them only."""
    layout = Layout((16, 3), (4,), (_StridedShard(0, split_factor=2),))
    shards = shards_of(layout.dtensor((0,), layout.scattered((0,))))
    assert isinstance(shards, LocalShards)
    assert shards.boxes == (Box((0, 0), (2, 3)), Box((8, 0), (2, 3)))
    assert [view.tolist() for view in shards.views] == [
        layout.whole[:2].tolist(),
        layout.whole[8:10].tolist(),
    ]


def test_the_placements_of_fsdp2_over_tp_are_one_box() -> None:
    layout = Layout((8, 2), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    held = [shards_of(layout.dtensor(at, layout.scattered(at))) for at in layout.coordinates()]
    offsets = [[box.offsets[0] for box in it.boxes] for it in held if isinstance(it, LocalShards)]
    assert offsets == [[0], [4], [2], [6]]


def test_an_uneven_sharding_in_the_order_of_fsdp2_is_read_in_that_order() -> None:
    """Seven rows, TP over 2 and then FSDP2 over 3: from left to right the last row would be that of
    another rank."""
    layout = Layout((7,), (3, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    local = chunked_in(layout, [1, 0], (2, 1))
    shards = shards_of(layout.dtensor((2, 1), local))
    assert isinstance(shards, LocalShards)
    assert [box.offsets for box in shards.boxes] == [(6,)]
    assert layout.scattered((2, 1)).tolist() == []


def test_an_order_of_sharding_that_torch_records_is_followed() -> None:
    layout = Layout((7,), (3, 2), (Shard(0), Shard(0)))
    for coordinate in layout.coordinates():
        local = chunked_in(layout, [1, 0], coordinate)
        tensor = layout.dtensor(coordinate, local)
        tensor._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
        shards = shards_of(tensor)
        assert isinstance(shards, LocalShards)
        check_views(layout, local, shards)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_a_plain_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    tensor = nn.Parameter(torch.ones(shape))
    shards = shards_of(tensor)
    assert isinstance(shards, LocalShards)
    assert shards.shape == shape
    assert shards.boxes == (whole_box(shape),)
    assert shards.views[0].data_ptr() == tensor.data_ptr()


def test_a_whole_local_tensor_is_itself() -> None:
    """So that a later save recognises its memory."""
    layout = Layout((4, 2), (2,), (Shard(0),))
    local = layout.scattered((1,))
    tensor = layout.dtensor((1,), local)
    shards = shards_of(tensor)
    assert isinstance(shards, LocalShards)
    assert shards.views[0] is tensor._local_tensor


def test_a_view_of_a_parameter_records_nothing_for_autograd() -> None:
    layout = Layout((8,), (2,), (_StridedShard(0, split_factor=2),))
    local = layout.scattered((0,)).double().requires_grad_()
    shards = shards_of(layout.dtensor((0,), local))
    assert isinstance(shards, LocalShards)
    assert [view.grad_fn for view in shards.views] == [None, None]


def test_a_rank_without_a_row_has_no_box() -> None:
    layout = Layout((2, 3), (4,), (Shard(0),))
    shards = shards_of(layout.dtensor((3,), layout.scattered((3,))))
    assert shards == LocalShards(shape=(2, 3), boxes=(), places=(), views=(), local_shape=(0, 3))


def test_a_rank_outside_of_the_mesh_has_no_box() -> None:
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 2], _init_backend=False, _rank=0)
    shape = torch.Size((4, 3))
    tensor = DTensor.from_local(
        torch.ones(0), mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1)
    )
    assert shards_of(tensor) == LocalShards(
        shape=(4, 3), boxes=(), places=(), views=(), local_shape=(0,)
    )


def test_sums_that_are_not_reduced_are_refused() -> None:
    layout = Layout((4,), (2, 2), (Replicate(), Partial()))
    found = shards_of(layout.dtensor((0, 0), torch.ones(4)))
    assert isinstance(found, Refused)
    assert "Partial(sum) of mesh dimension 1 holds values that are not reduced" in found.reason


def test_a_local_tensor_of_another_shape_is_refused_with_mesh_and_placements() -> None:
    layout = Layout((4, 3), (2,), (Shard(0),))
    found = shards_of(layout.dtensor((1,), torch.ones(3, 3)))
    assert isinstance(found, Refused)
    message = found.reason
    assert "the local tensor has the shape (3, 3)" in message
    assert "(Shard(dim=0),)" in message
    assert "DeviceMesh((2,)" in message
    assert "(2, 3) at (1,) of a tensor of shape (4, 3)" in message


def test_a_local_tensor_that_cannot_be_saved_is_refused() -> None:
    layout = Layout((4,), (2,), (Shard(0),))
    found = shards_of(layout.dtensor((0,), torch.ones(2, device="meta")))
    assert isinstance(found, Refused)
    assert "meta" in found.reason


def test_a_sharded_tensor_is_refused_with_what_to_use() -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    found = shards_of(torch.Tensor._make_subclass(ShardedTensor, torch.ones(2)))
    assert isinstance(found, Refused)
    assert "fully_shard" in found.reason


@pytest.mark.full
def test_plain_tensors_import_nothing_of_torch_distributed() -> None:
    import warm

    code = (
        "import sys, torch\n"
        "from holdfast.state.shards import shards_of\n"
        "before = set(sys.modules)\n"
        "shards_of(torch.ones(2))\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    assert warm.run(["-c", code]).stdout.strip() == "[]"
