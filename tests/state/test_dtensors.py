"""DTensors in capture and load, without a process group: what is refused, and what is cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.errors import MismatchError, UnsupportedState, UsageError
from holdfast.format.tensors import TensorSpec
from holdfast.state.apply import Prepared, prepare
from holdfast.state.capture.capture import Capturer
from holdfast.state.collecting import Leaves
from holdfast.state.components import StoredComponent
from holdfast.state.leaves import local_of
from holdfast.state.planning.livevalues import placed_as
from holdfast.state.selection import StateLoadOptions
from holdfast.state.shards import LocalShards, shards_of
from state.layouts import Layout

ROWS = Layout((5, 3), (2,), (Shard(0),))
COLUMNS = Layout((5, 3), (2,), (Shard(1),))


def part(layout: Layout, rank: int = 0) -> DTensor:
    """What a rank holds."""
    return layout.dtensor((rank,), layout.scattered((rank,)).clone())


def shared(state: Mapping[str, Any]) -> Capturer:
    return Capturer(state, is_shared=True)


def stored_of(state: Mapping[str, Any]) -> dict[str, StoredComponent]:
    """The components as a checkpoint has them: with global shapes."""
    components = shared(state).capture([*state]).components
    return {
        name: replace(
            one.stored,
            tensors={
                spec.key: TensorSpec(spec.key, spec.dtype, one.shards[spec.key].shape)
                if spec.key in one.shards
                else spec
                for spec in one.specs
            },
        )
        for name, one in components.items()
    }


def prepared_for(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Prepared:
    return prepare(
        live, stored_of(saved), where="the checkpoint", options=StateLoadOptions(rng=False)
    )


def test_values_that_are_not_reduced_are_refused_by_name() -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedState, match=r"data\.loss: placement Partial"):
        shared({"data": {"loss": partial}}).capture()


def test_a_part_is_not_saved_by_one_process_alone() -> None:
    with pytest.raises(UnsupportedState, match=r"data\.w: this process holds only a part"):
        Capturer({"data": {"w": part(ROWS)}}).capture()


def test_a_dtensor_that_is_whole_is_saved_by_one_process() -> None:
    layout = Layout((5, 3), (1,), (Shard(0),))
    captured = Capturer({"data": {"w": part(layout)}}).capture().components["data"]
    assert torch.equal(captured.tensors["w"], layout.whole)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_tied_dtensors_are_one_tensor(placement: Placement) -> None:
    tensor = part(Layout((5, 3), (2,), (placement,)))
    same = tensor.detach()
    other = part(Layout((5, 3), (2,), (placement,)))
    captured = shared({"data": [tensor, same, other]}).capture().components["data"]
    assert [*captured.tensors] == [*captured.shards] == ["0", "2"]


def test_the_tree_is_the_same_on_all_ranks() -> None:
    captured = [
        shared({"data": {"a": part(ROWS, rank), "b": part(COLUMNS, rank)}}).capture()
        for rank in range(2)
    ]
    assert len({one.components["data"].tree for one in captured}) == 1


def test_the_index_of_a_device_is_left_out_only_where_ranks_share_the_state() -> None:
    device = torch.device("cuda", 3)
    assert Leaves(component="data").device_name(device) == "cuda:3"
    assert Leaves(component="data", is_shared=True).device_name(device) == "cuda"
    tree = shared({"data": {"where": device}}).capture().components["data"].tree
    assert b'"cuda"' in tree


def test_boxes_are_recognised_and_read_anew_where_the_memory_has_moved() -> None:
    state = {"data": {"moves": part(ROWS), "stays": part(COLUMNS)}}
    capturer = shared(state)
    before = capturer.capture().components["data"]
    again = capturer.capture().components["data"]
    assert again.shards is before.shards
    state["data"]["moves"] = part(ROWS)
    local = local_of(state["data"]["moves"]).add_(1)
    after = capturer.capture().components["data"]
    assert after.specs is before.specs
    assert after.shards["stays"] is before.shards["stays"]
    (view,) = after.shards["moves"].views
    assert torch.equal(view, local)
    assert view.data_ptr() == local.data_ptr() != before.shards["moves"].views[0].data_ptr()


def test_a_dtensor_that_is_placed_otherwise_is_not_recognised() -> None:
    """Although its local tensor has the same shape."""
    state = {"data": {"w": part(Layout((4, 2), (2,), (Shard(0),)))}}
    capturer = shared(state)
    assert capturer.capture().components["data"].shards["w"].shape == (4, 2)
    state["data"]["w"] = part(Layout((2, 4), (2,), (Shard(1),)))
    assert capturer.capture().components["data"].shards["w"].shape == (2, 4)


def test_requiring_grad_is_noticed_in_a_tree() -> None:
    tensor = DTensor.from_local(
        torch.ones(2), DeviceMesh("cpu", [0], _init_backend=False, _rank=0), [Shard(0)]
    )
    capturer = shared({"data": {"w": tensor}})
    assert b"grad" not in capturer.capture().components["data"].tree
    tensor.requires_grad_()
    captured = capturer.capture().components["data"]
    assert b'"grad":true' in captured.tree
    assert not captured.tensors["w"].requires_grad


def test_a_stored_tensor_for_two_ways_of_placing_it_is_refused() -> None:
    tensor = part(ROWS)
    saved = {"data": {"a": tensor, "b": tensor}}
    for other in (part(COLUMNS), ROWS.whole.clone()):
        live = {"data": {"a": part(ROWS), "b": other}}
        with pytest.raises(MismatchError, match=r"data\.a and data\.b are placed"):
            prepared_for(live, saved)


def test_a_dtensor_of_a_tree_is_filled_in_place() -> None:
    live = {"data": {"w": part(ROWS, 1)}}
    local = local_of(live["data"]["w"])
    prepared = prepared_for(live, {"data": {"w": ROWS.whole}})
    assert prepared.shards["data"]["w"].local_shape == (2, 3)
    prepared.apply_values({"data": {"w": torch.full((2, 3), 7)}})
    assert local_of(live["data"]["w"]) is local
    assert local.eq(7).all()


def test_a_whole_tensor_for_a_dtensor_is_refused_before_anything_changes() -> None:
    """Copying would stretch a single row over many, or over none."""
    layout = Layout((1, 3), (2,), (Shard(0),))
    prepared = prepared_for({"data": {"w": part(layout, 1)}}, {"data": {"w": layout.whole}})
    with pytest.raises(UsageError, match=r"data\.w: the local tensor is \[0, 3\]"):
        prepared.ready({"data": {"w": layout.whole}})


def test_another_global_shape_is_refused_with_both_shapes() -> None:
    class Model(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.register_buffer("weight", weight)

    saved = {"model": Model(torch.zeros(3, 3, dtype=torch.long))}  # as the local tensor
    with pytest.raises(MismatchError, match=r"weight: stored \[3, 3\], live \[5, 3\]"):
        prepared_for({"model": Model(part(ROWS))}, saved)


class Average:
    """An object with a state of its own, as of averaged weights."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of two, of which this process pretends to be the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_an_object_gets_dtensors_for_its_own() -> None:
    live = Average(part(ROWS, 1))
    prepared = prepared_for({"ema": live}, {"ema": Average(ROWS.whole)})
    prepared.apply_values({"ema": {"weight": torch.full((2, 3), 7)}})
    assert isinstance(live.weight, DTensor)
    assert live.weight.shape == (5, 3)
    assert live.weight.placements == (Shard(0),)
    assert local_of(live.weight).eq(7).all()


def test_a_tree_that_holds_a_modules_dtensor_gets_one_of_its_own() -> None:
    model = nn.Module()
    model.register_buffer("w", part(ROWS))
    live = {"model": model, "best": model.state_dict()}
    before = local_of(model.w).clone()
    stored = stored_of({"model": model, "best": {"w": ROWS.whole}})
    prepared = prepare(
        live, {"best": stored["best"]}, where="x", options=StateLoadOptions(components=["best"])
    )
    prepared.apply_values({"best": {"w": torch.full((3, 3), 7)}})
    assert torch.equal(local_of(model.w), before)
    assert isinstance(live["best"]["w"], DTensor)
    assert local_of(live["best"]["w"]).eq(7).all()


def test_slots_beside_a_dtensor_without_dimensions_are_dtensors_and_its_step_is_not() -> None:
    def made(has_slots: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        scale = Layout((), (2,), (Replicate(),)).dtensor((0,), torch.tensor(3.0))
        model.scale = nn.Parameter(scale)
        optimizer = torch.optim.SGD(model.parameters())
        if has_slots:
            slots = {"step": torch.tensor(4.0), "exp_avg": torch.tensor(5.0)}
            optimizer.state[model.scale] = slots
        return model, optimizer

    (model, optimizer), saved = made(has_slots=False), made(has_slots=True)
    live = {"model": model, "optimizer": optimizer}
    prepared = prepared_for(live, {"model": saved[0], "optimizer": saved[1]})
    assert [*prepared.shards["optimizer"]] == ["scale.exp_avg"]
    slots = {"scale.step": torch.tensor(4.0), "scale.exp_avg": torch.tensor(5.0)}
    prepared.apply_values({"model": {"scale": torch.tensor(3.0)}, "optimizer": slots})
    held = optimizer.state[model.scale]
    assert type(held["step"]) is Tensor
    assert isinstance(held["exp_avg"], DTensor)


def test_a_new_dtensor_is_sharded_in_the_order_of_the_other() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=1)
    layout = DTensor.from_local(
        torch.zeros(2), mesh, [Shard(0), Shard(0)], run_check=False, shape=(8,), stride=(1,)
    )
    layout._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    made = shards_of(placed_as(layout, torch.ones(2, dtype=torch.float64)))
    assert isinstance(made, LocalShards)
    assert [box.offsets for box in made.boxes] == [(4,)]
    assert made.views[0].dtype == torch.float64


def with_rows(model: nn.Module, has_slots: bool) -> torch.optim.Optimizer:
    """An optimizer that keeps a number for each row of a matrix."""
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters() if has_slots else ():
        optimizer.state[parameter] = {"row": torch.zeros(parameter.shape[0])}
    return optimizer


def test_a_slot_of_another_shape_is_refused_unless_a_live_one_tells_its_placement() -> None:
    model = nn.Module()
    model.w = nn.Parameter(part(Layout((5, 3), (2,), (Shard(0),))).double())
    saved = stored_of({"model": model, "optimizer": with_rows(model, has_slots=True)})
    for has_slots in (False, True):
        live = {"model": model, "optimizer": with_rows(model, has_slots)}
        if has_slots:
            assert not prepare(
                live, saved, where="x", options=StateLoadOptions(rng=False)
            ).shards.get("optimizer")
            continue
        with pytest.raises(MismatchError, match=r"w\.row: stored \[5\].*make one optimizer step"):
            prepare(live, saved, where="x", options=StateLoadOptions(rng=False))


def fully_sharded(num_rows: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, num_rows))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model


@pytest.mark.usefixtures("group")
def test_a_shape_that_does_not_fit_fsdp2_is_refused_before_anything_changes() -> None:
    """The hook that fully_shard adds to a module makes its loading no foreign code."""
    with pytest.raises(MismatchError, match=r"1\.weight: stored \[6, 4\], live \[5, 4\]"):
        prepared_for({"model": fully_sharded(5)}, {"model": fully_sharded(6)})


@pytest.mark.usefixtures("group")
def test_the_parameters_of_fsdp2_are_filled_in_place() -> None:
    model = fully_sharded(5)
    locals_ = {name: local_of(one) for name, one in model.named_parameters()}
    prepared = prepared_for({"model": model}, {"model": fully_sharded(5)})
    prepared.apply_values(
        {"model": {name: torch.full_like(one, 7) for name, one in locals_.items()}}
    )
    for name, one in model.named_parameters():
        assert local_of(one) is locals_[name]
        assert one._local_tensor.eq(7).all()
