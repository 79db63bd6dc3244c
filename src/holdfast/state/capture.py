"""Live objects to named leaves and typed trees. Reads only; the leaves are not yet copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import UnsupportedState
from holdfast.format.tensors import TensorSpec
from holdfast.state import modules, optimizers
from holdfast.state.components import RNG, Kind, check_state, kind_of
from holdfast.state.generators import global_generators
from holdfast.state.leaves import Leaves
from holdfast.state.names import ParameterNames, parameter_names
from holdfast.state.trees import encode

__all__ = ["Captured", "CapturedComponent", "capture", "check_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedComponent:
    """One component, ready to be laid out and staged."""

    name: str
    kind: Kind

    tree: bytes
    """The typed tree, as it will be stored."""

    tensors: Mapping[str, Tensor]
    """Key -> live tensor: detached, of any strides, on any device, in the order of the tree."""

    specs: tuple[TensorSpec, ...]
    """One for each tensor, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A whole state. Its tensors are the live ones: stage them before training goes on."""

    components: Mapping[str, CapturedComponent]

    not_saved: tuple[str, ...]
    """What the state holds on purpose outside of checkpoints, one line each."""

    left_out: tuple[str, ...] = ()
    """Components that an edit left out."""


def capture(state: Mapping[str, Any], only: Collection[str] | None = None) -> Captured:
    """Name every leaf of `state`, and add the global random generators as `rng`.

    `only` names the components that are wanted; None: all.

    Objects are asked for their `state_dict` in the order of the mapping; the generators are read
    last, so that what those calls draw is in the checkpoint too.

    Raises:
        UsageError: a component's name or type is wrong.
        UnsupportedState: lists every leaf of every component that cannot be saved.
    """
    check_state(state)
    names = parameter_names(
        (name, value) for name, value in state.items() if isinstance(value, nn.Module)
    )
    offenders: list[tuple[str, str]] = []
    wanted = {*state, RNG} if only is None else set(only)
    components = {
        name: _capture_one(name, value, names, offenders)
        for name, value in state.items()
        if name in wanted
    }
    if RNG not in state and RNG in wanted:
        components[RNG] = _capture_rng(offenders)
    if offenders:
        raise UnsupportedState(offenders)
    return Captured(components=components, not_saved=tuple(_left_out(state, names)))


def _left_out(state: Mapping[str, Any], names: ParameterNames) -> list[str]:
    elsewhere = {id(value) for value in state.values()}
    lines = []
    for name, value in state.items():
        if isinstance(value, nn.Module):
            lines += modules.not_saved(name, value, elsewhere)
        elif isinstance(value, Optimizer):
            lines += optimizers.not_saved(name, value, names)
    return lines


def _capture_one(
    name: str, value: Any, names: ParameterNames, offenders: list[tuple[str, str]]
) -> CapturedComponent:
    kind = kind_of(value)
    leaves = Leaves(component=name)
    if kind == "module":
        tree = modules.capture_module(value, leaves)
    elif kind == "optimizer":
        leaves.key_of = optimizers.slot_path
        tree = optimizers.capture_optimizer(value, names, leaves)
    else:
        tree = encode(value.state_dict() if kind == "object" else value, leaves)
    return _finished(kind, tree, leaves, offenders)


def _capture_rng(offenders: list[tuple[str, str]]) -> CapturedComponent:
    leaves = Leaves(component=RNG)
    return _finished("rng", encode(global_generators(), leaves), leaves, offenders)


def _finished(
    kind: Kind, tree: bytes, leaves: Leaves, offenders: list[tuple[str, str]]
) -> CapturedComponent:
    offenders += leaves.offenders
    return CapturedComponent(
        name=leaves.component,
        kind=kind,
        tree=tree,
        tensors=leaves.tensors,
        specs=tuple(leaves.specs),
    )
