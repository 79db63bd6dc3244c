"""Shards of a state: of each tensor the global shape, and the boxes of it that this rank holds.

Knows the placements of DTensors. Knows nothing of files, components and what other ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise, product
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from holdfast.format.objects import Refused
from holdfast.state.leaves import is_dtensor, refusal

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Span: TypeAlias = tuple[int, int]
"""Indices [start, stop) in one dimension of the global tensor."""


class Box(NamedTuple):
    """An axis-aligned part of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Split(NamedTuple):
    """Sharding of tensor dimension `dim` over mesh dimension `over`, in chunks as of `torch.chunk`.

    A `factor` above 1 cuts the dimension into so many chunks first and shards each of them: the
    placement `_StridedShard`.
    """

    dim: int
    over: int
    factor: int = 1


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
    return spans


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


def in_order(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split]:
    """Turn `_StridedShard` placements into plain shardings in the order in which they were made.

    FSDP2 shards what tensor parallelism has sharded already, over mesh dimensions further right.
    torch notes this by a factor: the number of shards that existed before. A factor that is no
    such number stays.
    """
    ordered: list[Split] = []
    for dim in sorted({split.dim for split in splits}):
        own = [split for split in splits if split.dim == dim]
        ordered += _order_splits(own, mesh_shape) or own
    return ordered


def _order_splits(splits: Sequence[Split], mesh_shape: Sequence[int]) -> list[Split] | None:
    order: list[Split] = []
    for split in reversed(splits):
        shards_before = accumulate((mesh_shape[it.over] for it in order), mul, initial=1)
        place = next((n for n, shards in enumerate(shards_before) if shards == split.factor), None)
        if place is None:
            return None
        order.insert(place, split._replace(factor=1))
    return order


def packed(spans: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Compute where the spans lie in the local tensor, which has nothing between them."""
    sizes = [[stop - start for start, stop in of_dim] for of_dim in spans]
    return [[*pairwise(accumulate(of_dim, initial=0))] for of_dim in sizes]


def boxes_of(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Make a box of each combination of spans, one of each dimension."""
    return [box_of(cell) for cell in product(*spans)]


def box_of(cell: Iterable[Span]) -> Box:
    """Make a box from its span in each dimension."""
    sides = [*cell]
    return Box(tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))


def whole_box(shape: Sequence[int]) -> Box:
    """Make the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def corners(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Compute the positions of a box's first and last element; 0 and -1 if there are none."""
    if math.prod(shape) == 0:
        return 0, -1
    first = last = 0
    for extent, offset, size in zip(shape, *box, strict=True):
        first = first * extent + offset
        last = last * extent + offset + size - 1
    return first, last


def box_at(shape: Sequence[int], first: int, last: int) -> Box:
    """Make a box from its corners."""
    if math.prod(shape) == 0:
        return whole_box(shape)
    sides: list[Span] = []
    for extent in shape[:0:-1]:
        first, start = divmod(first, extent)
        last, end = divmod(last, extent)
        sides.append((start, end + 1))
    if shape:  # the first dimension shows what is beyond the end
        sides.append((first, last + 1))
    return box_of(reversed(sides))


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


def shards_of_inner(outer: DTensor, inner: Tensor) -> LocalShards | Refused:
    """Read what this rank holds of an inner tensor of the local tensor of a DTensor.

    If it is sharded like the DTensor, it has a global shape. Otherwise the parts of all shards are
    concatenated: in the order of the elements that they describe, such as scales of blocks, or one
    for each rank, such as tables.
    """
    splits = _splits(outer)
    if isinstance(splits, Refused):
        return splits
    mesh, shape, sizes = outer.device_mesh, tuple(outer.shape), tuple(inner.shape)
    coordinate = mesh.get_coordinate()
    dims = {split.dim for split in splits if mesh.shape[split.over] > 1}
    if coordinate is None or 0 in outer._local_tensor.shape:
        return Refused("a tensor subclass needs elements on every rank; shard it over fewer ranks")
    whole = [[(0, size)] for size in sizes]
    spans = spans_of(shape, mesh.shape, coordinate, splits)
    local = outer._local_tensor.shape
    if all(dim < len(sizes) and sizes[dim] == local[dim] for dim in dims) or not sizes:
        cut = [spans[dim] if dim in dims else of_dim for dim, of_dim in enumerate(whole)]
        inside = tuple(shape[dim] if dim in dims else size for dim, size in enumerate(sizes))
        return _make_shards(inside, cut if sizes else whole, inner)
    every = {
        tuple(spans_of(shape, mesh.shape, one, splits)[0])
        for one in product(*map(range, mesh.shape))
    }
    if dims != {0} or not all(len(of_rank) == 1 for of_rank in every):
        return Refused(f"its shape {list(sizes)} does not follow the placements {outer.placements}")
    parts, row = sorted(of_rank[0] for of_rank in every), math.prod(shape[1:])
    (own,) = spans[0]
    ratio = Fraction(sizes[0], (own[1] - own[0]) * row)
    if all((start * row * ratio).denominator == 1 for start, _ in parts):
        start, total = int(own[0] * row * ratio), shape[0] * row * ratio
    else:
        start, total = parts.index(own) * sizes[0], Fraction(len(parts) * sizes[0])
    if total.denominator != 1:
        return Refused(f"its shape {list(sizes)} does not follow from the shards of the tensor")
    return _make_shards((int(total), *sizes[1:]), [[(start, start + sizes[0])], *whole[1:]], inner)


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
