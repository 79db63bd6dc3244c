"""Shards of a state: of each tensor the global shape, and the boxes of it that this rank holds.

Knows the placements of DTensors; the geometry is that of `boxes`. Knows nothing of files,
components and what other ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.format.objects import Refused
from holdfast.state.geometry import (
    Box,
    Span,
    Split,
    boxes_of,
    in_order,
    packed,
    spans_of,
    whole_box,
)
from holdfast.state.leaves import is_dtensor, refusal

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShards:
    """The boxes of one tensor that this rank holds, and their memory."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    boxes: tuple[Box, ...]
    """Empty if the rank holds nothing of it. A tensor without elements is one box on every rank."""
    places: tuple[Box, ...]
    """Where each box lies in the local tensor."""
    views: tuple[Tensor, ...]
    """The elements of each box, as views of the local tensor."""
    local_shape: tuple[int, ...]
    """Shape of the local tensor."""

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Copy the boxes of a whole tensor into one of the local shape."""
        local = tensor.new_empty(self.local_shape)
        for box, place in zip(self.boxes, self.places, strict=True):
            _view(local, place).copy_(_view(tensor, box))
        return local

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds all of the tensor, as it is."""
        return self.boxes == (whole_box(self.shape),)

    def in_memory_of(self, local: Tensor) -> LocalShards:
        """Return the same boxes of another local tensor."""
        if self.views and math.prod(self.shape) == 0:
            return replace(self, views=(local.view(self.shape),))
        return replace(self, views=tuple(_view(local, box) for box in self.places))


def shards_of(tensor: Tensor) -> LocalShards | Refused:
    """Read what this rank holds of a tensor; a plain tensor is one box, the same on every rank."""
    if is_dtensor(tensor):
        return _of_dtensor(tensor)
    reason = refusal(tensor)
    if reason is not None:
        return Refused(reason)
    return _make_shards(tuple(tensor.shape), [[(0, size)] for size in tensor.shape], tensor)


def _of_dtensor(tensor: DTensor) -> LocalShards | Refused:
    mesh, local, shape = tensor.device_mesh, tensor._local_tensor, tuple(tensor.shape)
    reason = refusal(local)
    if reason is not None:
        return Refused(reason)
    splits = _splits(tensor)
    if isinstance(splits, Refused):
        return splits
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalShards(
            shape=shape, boxes=(), places=(), views=(), local_shape=tuple(local.shape)
        )
    spans = spans_of(shape, mesh.shape, coordinate, splits)
    expected = tuple(sum(stop - start for start, stop in of_dim) for of_dim in spans)
    if tuple(local.shape) == expected:
        return _make_shards(shape, spans, local)
    return Refused(
        f"the local tensor has the shape {tuple(local.shape)}, but placements {tensor.placements} "
        f"on {mesh} make it {expected} at {tuple(coordinate)} of a tensor of shape {shape}"
    )


def _splits(tensor: DTensor) -> list[Split] | Refused:
    """Read the shardings of a DTensor, in the order in which they were applied."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: dict[int, Split] = {}
    for over, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):  # in older torch a kind of Shard
            splits[over] = Split(placement.dim, over, int(placement.split_factor))
        elif type(placement) is Shard:
            splits[over] = Split(placement.dim, over)
        elif type(placement) is not Replicate:
            kind = "holds values that are not reduced" if placement.is_partial() else "is unknown"
            return Refused(f"placement {placement!r} of mesh dimension {over} {kind}")
    # Only newer torch records an order, and none where a factor tells it.
    order = getattr(tensor._spec, "shard_order", None)
    if not order:
        return in_order([*splits.values()], tensor.device_mesh.shape)
    return [splits[over] for entry in order for over in entry.mesh_dims]


def _make_shards(
    shape: tuple[int, ...], spans: Sequence[Sequence[Span]], local: Tensor
) -> LocalShards:
    if math.prod(shape) == 0:
        whole = (whole_box(shape),)
        views: tuple[Tensor, ...] = (local.detach().view(shape),)
        return LocalShards(shape=shape, boxes=whole, places=whole, views=views, local_shape=shape)
    places = tuple(boxes_of(packed(spans)))
    return LocalShards(
        shape=shape,
        boxes=tuple(boxes_of(spans)),
        places=places,
        views=tuple(_view(local, box) for box in places),
        local_shape=tuple(local.shape),
    )


def _view(local: Tensor, box: Box) -> Tensor:
    if box.sizes == tuple(local.shape):
        return local  # itself, so that it is recognised in the next save
    view = local.detach()
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        view = view.narrow(dim, start, size)
    return view
