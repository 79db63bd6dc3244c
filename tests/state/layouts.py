"""Random layouts of a tensor over a mesh, and what each rank holds by torch's own chunking."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.state.shards import Box, Split


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a tensor, shape of a mesh, and a placement for each dimension of the mesh."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def whole(self) -> Tensor:
        """The global tensor: each element is its number."""
        return torch.arange(math.prod(self.shape)).reshape(self.shape)

    @property
    def splits(self) -> list[Split]:
        """The placements that shard, from left to right."""
        return [
            Split(placement.dim, over, getattr(placement, "split_factor", 1))
            for over, placement in enumerate(self.placements)
            if not isinstance(placement, Replicate)
        ]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Position of each rank in the mesh, in the order of ranks."""
        yield from np.ndindex(self.mesh)

    def scattered(self, coordinate: Sequence[int]) -> Tensor:
        """What `distribute_tensor` gives to a rank: placement by placement, left to right."""
        part = self.whole
        for placement, num_chunks, number in zip(
            self.placements, self.mesh, coordinate, strict=True
        ):
            if isinstance(placement, Shard | _StridedShard):
                chunks, _ = placement._split_tensor(part, num_chunks, with_padding=False)
                part = chunks[number]
        return part

    def dtensor(self, coordinate: Sequence[int], local: Tensor) -> DTensor:
        """The DTensor of a rank, without a process group."""
        ranks = torch.arange(math.prod(self.mesh)).reshape(self.mesh)
        rank = int(ranks[tuple(coordinate)])
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        stride = self.whole.stride()
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.whole.shape, stride=stride
        )


def placements(num_dims: int) -> st.SearchStrategy[Placement]:
    """Placements of a tensor with so many dimensions."""
    if not num_dims:
        return st.just(Replicate())
    dims, factors = st.integers(0, num_dims - 1), st.integers(2, 4)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, factors)
    return st.just(Replicate()) | st.builds(Shard, dims) | strided


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any placements; sizes that divide, that do not, and that leave ranks with nothing."""
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    return Layout(shape, mesh, tuple(draw(placements(len(shape))) for _ in mesh))


@st.composite
def orders(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    """A dimension that is sharded over mesh dimensions in any order, as FSDP2 after TP does.

    The placements note the order by the factors of `_StridedShard`.
    """
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = (draw(st.integers(0, 40)), draw(st.integers(1, 3)))
    order = draw(st.permutations(range(len(mesh))))
    noted = []
    for over in range(len(mesh)):
        before = order[: order.index(over)]
        factor = math.prod(mesh[other] for other in before if other > over)
        noted.append(Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor))
    return Layout(shape, mesh, tuple(noted)), order


def chunked_in(layout: Layout, order: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """What a rank holds when dimension 0 is sharded over the mesh dimensions in this order."""
    part = layout.whole
    for over in order:
        chunks, _ = Shard(0)._split_tensor(part, layout.mesh[over], with_padding=False)
        part = chunks[coordinate[over]]
    return part


def region(whole: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    return whole[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]
