"""Host memory laid out as a tensor file, and tensors as views of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from holdfast.errors import FormatError
from holdfast.format.boxes import Column
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.threads.buffers import allocate_pages

_LARGEST_ITEM_NBYTES = max(ITEM_NBYTES.values())


class Arena:
    """Page-aligned private memory, filled with zeros in forked children."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory."""
        self.nbytes = nbytes
        self._map = allocate_pages(nbytes)
        self.memory = memoryview(self._map)[:nbytes]

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def make_tensor_views(
        self,
        specs: Sequence[TensorSpec],
        starts: Sequence[int] | Column,
        nbytes: Column | None = None,
    ) -> list[torch.Tensor]:
        """Create views of the arena with the specs' dtypes and shapes, at byte offsets `starts`.

        They keep the memory alive. `nbytes`: the sizes of the tensors, if the caller knows them.
        """
        if not len(specs):
            return []
        # One view for each run of equal dtype, split in one call: a call of torch takes longer than
        # all else that is done for a small tensor.
        start = np.asarray(starts, np.int64)
        if nbytes is None:
            nbytes = np.fromiter((spec.nbytes for spec in specs), np.int64, len(specs))
        # An inference tensor could not be written to outside of inference mode.
        with torch.inference_mode(False):
            base = torch.frombuffer(self._map, dtype=torch.uint8)
            runs = pairwise([0, *_run_starts(specs, start, nbytes), len(specs)])
            return [
                view
                for first, stop in runs
                for view in _split_views(
                    base, specs[first:stop], int(start[first]), nbytes[first:stop]
                )
            ]


def check_aligned(specs: Sequence[TensorSpec], start: Column) -> None:
    """Check the alignment of tensors before any view of them is made."""
    # Few starts are unaligned for the largest item; only these are checked for their own.
    for number in np.flatnonzero(start % _LARGEST_ITEM_NBYTES).tolist():
        _check_aligned(specs[number], int(start[number]))


def _check_aligned(spec: TensorSpec, start: int) -> None:
    if start % ITEM_NBYTES[spec.dtype]:
        raise FormatError(f"tensor {spec.key!r} starts at byte {start}, not aligned")


def _run_starts(specs: Sequence[TensorSpec], start: Column, nbytes: Column) -> list[int]:
    """Return the numbers of tensors, after 0, that follow a gap or one of another dtype."""
    begins = start[1:] != (start + nbytes)[:-1]
    dtypes = [spec.dtype for spec in specs]
    if len(names := {*dtypes}) > 1:
        numbers = {name: number for number, name in enumerate(names)}
        column = np.fromiter(map(numbers.__getitem__, dtypes), np.int64, len(dtypes))
        begins |= column[1:] != column[:-1]
    starts: list[int] = (np.flatnonzero(begins) + 1).tolist()
    return starts


def _split_views(
    base: torch.Tensor, specs: Sequence[TensorSpec], start: int, nbytes: Column
) -> list[torch.Tensor]:
    """Create the views of adjacent tensors of one dtype by one call of torch."""
    dtype = TORCH_DTYPES[specs[0].dtype]
    _check_aligned(specs[0], start)
    whole = base[start : start + int(nbytes.sum())].view(dtype)
    pieces = whole.split_with_sizes((nbytes // dtype.itemsize).tolist())
    return [
        piece if len(spec.shape) == 1 else piece.view(spec.shape)
        for piece, spec in zip(pieces, specs, strict=True)
    ]
