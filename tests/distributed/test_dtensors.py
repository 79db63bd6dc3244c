"""Capture and load of DTensors of real ranks: FSDP2, HSDP, tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import marks
from distributed.run import run_ranks
from holdfast.format.tensors import TensorSpec
from holdfast.state.apply import Prepared, prepare
from holdfast.state.capture.capture import Captured, Capturer
from holdfast.state.components import StoredComponent
from holdfast.state.leaves import local_of
from holdfast.state.selection import StateLoadOptions
from state.layouts import region

Wrap: TypeAlias = Callable[[nn.Module], None]
Stored: TypeAlias = Mapping[str, StoredComponent]
Wholes: TypeAlias = Mapping[str, Mapping[str, Tensor]]


class Tied(nn.Module):
    """Three layers, two of one weight; 5 rows are uneven on 2 ranks, and leave one of 4 empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 4, bias=False)
        self.last = nn.Linear(4, 5)
        self.last.weight = self.first.weight

    def forward(self, batch: Tensor) -> Tensor:
        """Like a model of words whose last layer has the weights of the first."""
        return self.last(self.second(self.norm(self.first(batch)).relu()))  # type: ignore[no-any-return]


def shard(model: nn.Module) -> None:
    """FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_copies(model: nn.Module) -> None:
    """HSDP: two copies of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


def split(model: nn.Module) -> None:
    """Tensor parallelism; the batch norm stays plain, and the weights are tied no longer."""
    untie(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(
        model,
        mesh,
        {"second": RowwiseParallel(input_layouts=Replicate()), "last": ColwiseParallel()},
    )


def keep(model: nn.Module) -> None:
    """Plain tensors."""


def untie(model: nn.Module) -> None:
    """Plain tensors, and no tied weights."""
    model.last = nn.Linear(4, 5)


WAYS: Mapping[str, tuple[int, Wrap]] = {
    "fsdp2": (2, shard),
    "fsdp2 with empty shards": (4, shard),
    "hsdp": (4, shard_copies),
    "tp": (2, split),
}


def trained(wrap: Wrap, seed: int = 0, num_steps: int = 1) -> dict[str, Any]:
    """A model and AdamW after some steps."""
    torch.manual_seed(seed)
    model = Tied()
    wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=wrap not in (split, untie))
    for _ in range(num_steps):
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of all ranks with the same batch."""
    generator = torch.Generator().manual_seed(5)
    out = model(torch.randn(8, 4, generator=generator))
    local_of(out).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def leaves(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The live tensors by component and key."""
    model, optimizer = state["model"], state["optimizer"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {
        f"{names[id(parameter)]}.{slot}": value
        for parameter, held in optimizer.state.items()
        for slot, value in held.items()
    }
    return {"model": model.state_dict(), "optimizer": slots}


def full(tensor: Tensor) -> Tensor:
    """All of a tensor; a collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def check_captured(captured: Captured, state: Mapping[str, Any]) -> None:
    """Each local tensor and each box of it is the right part of the full tensor."""
    for name, live in leaves(state).items():
        component = captured.components[name]
        specs = {spec.key: spec for spec in component.specs}
        for key, tensor in live.items():
            whole = full(tensor)
            if key not in component.tensors:
                assert f"{name}.{key}" == "model.last.weight"
                continue
            assert specs[key].shape == component.tensors[key].shape
            assert (key in component.shards) == isinstance(tensor, DTensor)
            if key in component.shards:
                shards = component.shards[key]
                assert component.tensors[key].is_set_to(local_of(tensor).detach())
                assert shards.shape == whole.shape
                for box, view in zip(shards.boxes, shards.views, strict=True):
                    assert torch.equal(region(whole, box), view)
            else:
                assert torch.equal(component.tensors[key], whole)


def capture_three_times(wrap: Wrap, rank: int) -> dict[str, bytes]:
    """Capture, step, capture again: the same boxes of other values. Returns the trees."""
    state = trained(wrap)
    capturer = Capturer(state, is_shared=True)
    first = capturer.capture()
    check_captured(first, state)
    step(state["model"], state["optimizer"])
    second = capturer.capture()
    check_captured(second, state)
    for name in ("model", "optimizer"):
        before, after = first.components[name], second.components[name]
        assert before.shards is after.shards
        assert before.specs is after.specs
        assert after.may_overlap == before.may_overlap
        assert {*after.shards} <= after.may_overlap | {"last.bias"}
    with torch.no_grad():
        state["model"].eval()(torch.ones(2, 4))  # FSDP2 leaves the outer parameters gathered
    third = capturer.capture()
    assert third.components["model"].shards is first.components["model"].shards
    check_captured(third, state)
    fresh = Capturer(state, is_shared=True)
    with torch.no_grad():
        state["model"](torch.ones(2, 4))
    check_captured(fresh.capture(), state)
    return {name: third.components[name].tree for name in ("model", "optimizer")}


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_captures_its_part_of_each_tensor_and_the_same_tree(way: str) -> None:
    num_ranks, wrap = WAYS[way]
    trees = run_ranks(num_ranks, partial(capture_three_times, wrap))
    assert trees == [trees[0]] * num_ranks


def stored_of(captured: Captured, state: Mapping[str, Any]) -> tuple[Stored, Wholes]:
    """The components as a checkpoint has them, and all of each tensor."""
    stored, wholes = {}, {}
    for name, live in leaves(state).items():
        component = captured.components[name]
        specs = {
            spec.key: TensorSpec(spec.key, spec.dtype, component.shards[spec.key].shape)
            if spec.key in component.shards
            else spec
            for spec in component.specs
        }
        stored[name] = replace(component.stored, tensors=specs)
        wholes[name] = {key: full(tensor) for key, tensor in live.items()}
    return stored, wholes


def parts_for(prepared: Prepared, wholes: Wholes) -> Wholes:
    """What the caller reads: a rank's part of what goes into DTensors, else all of it."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, keys in prepared.needed.items():
        of_component = tensors[name] = {}
        shards = prepared.shards.get(name, {})
        for key in keys:
            whole = wholes[name][key].clone()
            if key not in shards:
                of_component[key] = whole
                continue
            held = shards[key]
            of_component[key] = torch.full(held.local_shape, torch.nan, dtype=whole.dtype)
            for box, place in zip(held.boxes, held.places, strict=True):
                region(of_component[key], place).copy_(region(whole, box))
    return tensors


def check_loaded(wholes: Wholes, state: Mapping[str, Any]) -> None:
    """All of each tensor has the bits that were saved."""
    for name, live in leaves(state).items():
        assert live.keys() == wholes[name].keys()
        for key, tensor in live.items():
            assert torch.equal(full(tensor), wholes[name][key]), (name, key)


def load(state: Mapping[str, Any], stored: Stored, wholes: Wholes) -> Prepared:
    """Load into a state, and train on; the optimizer must work on what was made."""
    prepared = prepare(state, stored, where="the checkpoint", options=StateLoadOptions(rng=False))
    prepared.apply_values(parts_for(prepared, wholes))
    check_loaded(wholes, state)
    return prepared


def load_everywhere(wrap: Wrap, rank: int) -> None:
    """A checkpoint of DTensors and one of plain tensors, each into states of both kinds."""
    wrap_plain = untie if wrap is split else keep
    for of_saved in (wrap, wrap_plain):
        saved = trained(of_saved, num_steps=2)
        stored, wholes = stored_of(Capturer(saved, is_shared=True).capture(), saved)
        step(saved["model"], saved["optimizer"])
        _, later = stored_of(Capturer(saved, is_shared=True).capture(), saved)
        for num_steps in (0, 1):  # without slots, and with
            state = trained(wrap, seed=7, num_steps=num_steps)
            prepared = load(state, stored, wholes)
            slots = leaves(state)["optimizer"]
            for name, live in (("model", leaves(state)["model"]), ("optimizer", slots)):
                placed = {key for key, tensor in live.items() if isinstance(tensor, DTensor)}
                assert placed - {"last.weight"} == {*prepared.shards[name]} - {"last.weight"}
            assert isinstance(slots["second.weight.exp_avg"], DTensor)
            assert not isinstance(slots["second.weight.step"], DTensor)
            step(state["model"], state["optimizer"])
            if of_saved is wrap:
                check_loaded(later, state)
            plain = trained(wrap_plain, seed=7, num_steps=num_steps)
            assert not any(load(plain, stored, wholes).shards.values())


@pytest.mark.parametrize("way", ["fsdp2 with empty shards", "tp", *marks.full("fsdp2", "hsdp")])
def test_checkpoints_of_plain_tensors_and_dtensors_load_into_either(way: str) -> None:
    num_ranks, wrap = WAYS[way]
    run_ranks(num_ranks, partial(load_everywhere, wrap))
