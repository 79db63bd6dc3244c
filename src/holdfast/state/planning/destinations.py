"""Destinations of stored tensors: which go into DTensors, and how these are placed.

A rank needs only its own part of such a tensor. Pairs stored with live values as `merge` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.format.nodes import TensorRef
from holdfast.format.objects import Refused, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import PLAIN_TYPES, is_dtensor
from holdfast.state.planning.copying import Stored, fetched
from holdfast.state.selection import Problems
from holdfast.state.shards import LocalShards, shards_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PLAIN = PLAIN_TYPES | {bool, int, float, str, type(None)}


class Destinations:
    """The live tensor of each stored one of a component, where either is a DTensor."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs
        self._first: dict[str, tuple[str, DTensor | None]] = {}
        self._seen: set[int] = set()
        self.are_plain = True
        """Whether none is a DTensor, so that nothing need be matched."""
        self.layouts: dict[str, DTensor] = {}
        """Key -> DTensor of the same global shape, whose mesh and placements the new one has."""
        self.shards: dict[str, LocalShards] = {}
        """Key -> the boxes that this rank holds of it."""

    def look_in(self, live: Any) -> None:
        """Look for DTensors in the live values, before any is matched."""
        self.are_plain = not _has_dtensors(live, set())

    def match(
        self, live: Any, stored: Any, path: str, problems: Problems, beside: Tensor | None = None
    ) -> None:
        """Record the destination of each tensor in `stored`, the nodes of a tree.

        `beside`: parameter of an optimizer. A slot of its shape that has no live tensor is placed
        as the parameter.
        """
        if self.are_plain:
            return
        if isinstance(stored, TensorRef):
            self._add_destination(live, stored.key, path, problems, beside)
        elif isinstance(stored, dict | list | tuple) and id(stored) not in self._seen:
            self._seen.add(id(stored))
            for name, item in stored.items() if isinstance(stored, dict) else enumerate(stored):
                self.match(_item(live, name), item, join_path(path, name), problems, beside)

    def _add_destination(
        self, live: Any, key: str, path: str, problems: Problems, beside: Tensor | None
    ) -> None:
        shape = self._specs[key].shape
        known = next(
            (one for one in (live, beside) if isinstance(one, Tensor) and one.shape == shape), None
        )
        layout = known if is_dtensor(known) else None
        if known is None and is_dtensor(beside) and math.prod(shape) > 1:
            problems.other.append(
                f"{path}: stored {list(shape)}, its parameter is {list(beside.shape)}, and no live "
                "tensor tells how it is placed over the ranks: make one optimizer step before "
                "the load"
            )
        first, other = self._first.setdefault(key, (path, layout))
        if not _are_alike(layout, other):
            problems.other.append(
                f"{first} and {path} are placed over the ranks in different ways here, and were "
                "one tensor when saved"
            )
        if layout is None or key in self.layouts:
            return
        shards = shards_of(layout)
        if isinstance(shards, Refused):
            problems.offenders.append((path, shards.reason))
        else:
            self.layouts[key], self.shards[key] = layout, shards

    def placed(self, tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Return the tensors, with those that go into DTensors as DTensors."""
        if not self.layouts:
            return tensors
        made = {
            key: placed_as(layout, fetched(tensors[key]))
            for key, layout in self.layouts.items()
            if key in tensors
        }
        return {**tensors, **made}


def _has_dtensors(value: Any, seen: set[int]) -> bool:
    if not isinstance(value, dict | list | tuple):
        return is_dtensor(value)
    if id(value) in seen:
        return False
    seen.add(id(value))
    items = [*dict.values(value)] if isinstance(value, dict) else value
    if _PLAIN.issuperset(map(type, items)):
        return False
    return any(_has_dtensors(item, seen) for item in items)


def _item(live: Any, name: Any) -> Any:
    if isinstance(live, dict):
        return dict.get(live, name)
    is_there = isinstance(live, list | tuple) and isinstance(name, int) and name < len(live)
    return live[name] if is_there else None


def _are_alike(one: DTensor | None, other: DTensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return _layout_of(one) == _layout_of(other)


def _layout_of(tensor: DTensor) -> tuple[Any, ...]:
    """Return what decides the boxes of each rank."""
    order = getattr(tensor._spec, "shard_order", None)  # only newer torch has one
    return tensor.device_mesh, tensor.placements, order


def placed_as(layout: DTensor, local: Tensor) -> Tensor:
    """Make a DTensor with the mesh, placements and global shape of another one.

    `local` is its local tensor, of any dtype; it is moved to the device of the other's.
    """
    # Not `from_local`: it does not take the order in which a dimension was sharded.
    spec = layout._spec
    assert spec.tensor_meta is not None, "a live DTensor has a shape"
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    placed = local.detach().to(layout._local_tensor.device)
    return type(layout)(placed, replace(spec, tensor_meta=meta), requires_grad=False)
