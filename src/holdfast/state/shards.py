"""Shards of a state: of each tensor the global shape, and the boxes of it that this rank holds.

The geometry is integers and needs no process group (`spans_of`, `boxes_of`). Knows the placements
of DTensors; knows nothing of files, components or what other ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from holdfast.errors import UnsupportedState
from holdfast.format.objects import Refused
from holdfast.state.leaves import refusal

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Span: TypeAlias = tuple[int, int]
"""Indices [start, stop) in one dimension of the global tensor."""


class Box(NamedTuple):
    """An axis-aligned part of a tensor, in elements."""

    offsets: tuple[int, ...]
    """Its first element in the global tensor."""
    sizes: tuple[int, ...]
    local: tuple[int, ...]
    """Its first element in the local tensor of this rank."""


class Split(NamedTuple):
    """Sharding of tensor dimension `dim` over mesh dimension `over`, in chunks as of `torch.chunk`.

    A `factor` above 1 cuts the dimension into so many chunks first and shards each of them: the
    placement `_StridedShard`.
    """

    dim: int
    over: int
    factor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The boxes of one tensor that this rank holds, and their memory."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    boxes: tuple[Box, ...]
    """None if the rank holds nothing of it. A tensor without elements is one box on every rank."""
    views: tuple[Tensor, ...]
    """The elements of each box, as views of the local tensor."""


def read_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shards]:
    """Read what this rank holds of each tensor, by path.

    Raises:
        UnsupportedState: some cannot be saved; lists every path with its reason.
    """
    found = {path: shards_of(tensor) for path, tensor in tensors.items()}
    refused = [(path, it.reason) for path, it in found.items() if isinstance(it, Refused)]
    if refused:
        raise UnsupportedState(refused)
    return {path: it for path, it in found.items() if isinstance(it, Shards)}


def shards_of(tensor: Tensor) -> Shards | Refused:
    """Read what this rank holds of a tensor; a plain tensor is one box, the same on every rank."""
    name = type(tensor).__name__
    if name == "DTensor":
        return _of_dtensor(tensor)  # type: ignore[arg-type]
    if name == "ShardedTensor":
        return Refused(
            "a ShardedTensor cannot be saved; shard with fully_shard or DTensors instead"
        )
    reason = refusal(tensor)
    if reason is not None:
        return Refused(reason)
    return _held(tuple(tensor.shape), [[(0, size)] for size in tensor.shape], tensor)


def spans_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    splits: Sequence[Split],
) -> list[list[Span]]:
    """Compute the indices that one rank holds in each dimension, in the order of its local tensor.

    Args:
        shape: Shape of the global tensor.
        mesh_shape: Number of ranks in each dimension of the mesh.
        coordinate: Position of the rank in the mesh.
        splits: In the order in which they are applied.
    """
    spans = [[(0, size)] for size in shape]
    for dim, over, factor in splits:
        chunks = (_chunk(spans[dim], factor, number) for number in range(factor))
        parts = (_chunk(chunk, mesh_shape[over], coordinate[over]) for chunk in chunks)
        spans[dim] = [span for part in parts for span in part]
    return [_joined(of_dim) for of_dim in spans]


def boxes_of(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Make the boxes of a rank from its indices in each dimension."""
    sides = []
    for of_dim in spans:
        sizes = [stop - start for start, stop in of_dim]
        starts = [start for start, _ in of_dim]
        sides.append([*zip(starts, sizes, accumulate(sizes, initial=0), strict=False)])
    corners = (zip(*corner, strict=True) if corner else ((), (), ()) for corner in product(*sides))
    return [Box(*map(tuple, corner)) for corner in corners]


def in_order(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split]:
    """Turn `_StridedShard` placements into plain shardings in the order in which they were made.

    FSDP2 shards what tensor parallelism has sharded already, over mesh dimensions further right.
    torch notes this by a factor: the number of shards that existed before. A factor that is no
    such number stays.
    """
    ordered: list[Split] = []
    for dim in sorted({split.dim for split in splits}):
        own = [split for split in splits if split.dim == dim]
        ordered += _decoded(own, mesh_shape) or own
    return ordered


def _decoded(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split] | None:
    order: list[Split] = []
    for split in reversed(splits):
        shards_before = accumulate((mesh_shape[it.over] for it in order), mul, initial=1)
        place = next((n for n, shards in enumerate(shards_before) if shards == split.factor), None)
        if place is None:
            return None
        order.insert(place, split._replace(factor=1))
    return order


def _chunk(spans: Sequence[Span], num_chunks: int, number: int) -> list[Span]:
    """Select one chunk of consecutive spans as `torch.chunk` does: the last ones may be empty."""
    size = -(-sum(stop - start for start, stop in spans) // num_chunks)
    kept, skip = [], size * number
    for start, stop in spans:
        first, last = max(start, start + skip), min(stop, start + skip + size)
        if first < last:
            kept.append((first, last))
        skip -= stop - start
    return kept


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join spans that continue each other."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _of_dtensor(tensor: DTensor) -> Shards | Refused:
    mesh, local, shape = tensor.device_mesh, tensor._local_tensor, tuple(tensor.shape)
    reason = refusal(local)
    if reason is not None:
        return Refused(reason)
    splits = _splits(tensor)
    if isinstance(splits, Refused):
        return splits
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shards(shape=shape, boxes=(), views=())
    spans = spans_of(shape, mesh.shape, coordinate, splits)
    expected = tuple(sum(stop - start for start, stop in of_dim) for of_dim in spans)
    if tuple(local.shape) == expected:
        return _held(shape, spans, local)
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
            kind = "holds sums that are not reduced" if placement.is_partial() else "is unknown"
            return Refused(f"placement {placement!r} of mesh dimension {over} {kind}")
    # Only newer torch records an order, and none where a factor tells it.
    order = getattr(tensor._spec, "shard_order", None)
    if not order:
        return in_order([*splits.values()], tensor.device_mesh.shape)
    return [splits[over] for entry in order for over in entry.mesh_dims]


def _held(shape: tuple[int, ...], spans: Sequence[Sequence[Span]], local: Tensor) -> Shards:
    if math.prod(shape) == 0:
        nowhere = (0,) * len(shape)
        return Shards(
            shape=shape, boxes=(Box(nowhere, shape, nowhere),), views=(local.detach().view(shape),)
        )
    boxes = tuple(boxes_of(spans))
    return Shards(shape=shape, boxes=boxes, views=tuple(_view(local, box) for box in boxes))


def _view(local: Tensor, box: Box) -> Tensor:
    if box.sizes == tuple(local.shape):
        return local  # itself, so that it is recognised in the next save
    view = local.detach()
    for dim, (start, size) in enumerate(zip(box.local, box.sizes, strict=True)):
        view = view.narrow(dim, start, size)
    return view
