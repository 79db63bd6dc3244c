"""Host memory laid out as a tensor file, and tensors as views of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from holdfast.engine.staging.memory import take
from holdfast.errors import FormatError
from holdfast.format.index import Column
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import TORCH_DTYPES


class Arena:
    """Page-aligned private memory, which forked children find empty."""

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        """Take the memory; in small pages without `huge`, for what is used here and there.

        Raises:
            OutOfMemory: the system refuses.
        """
        self.nbytes = nbytes
        self._map = take(nbytes, huge=huge)
        self.memory = memoryview(self._map)[:nbytes]

    def tensors(
        self,
        specs: Sequence[TensorSpec],
        starts: Sequence[int] | Column,
        nbytes: Column | None = None,
    ) -> list[torch.Tensor]:
        """Views of the arena with the specs' dtypes and shapes, at the given bytes.

        They keep the memory alive. `nbytes` are those of the specs, where they are known.

        Raises:
            FormatError: a start is not a multiple of its item size; in our own files it always
                is, because data starts on a page and items come in descending size.
        """
        if not len(specs):
            return []
        start = np.asarray(starts, np.int64)
        if nbytes is None:
            nbytes = np.fromiter((spec.nbytes for spec in specs), np.int64, len(specs))
        with torch.inference_mode(False):
            base = torch.frombuffer(self._map, dtype=torch.uint8)
            runs = pairwise([0, *_run_starts(specs, start, nbytes), len(specs)])
            return [
                view
                for first, stop in runs
                for view in _split(base, specs[first:stop], int(start[first]), nbytes[first:stop])
            ]


def _run_starts(specs: Sequence[TensorSpec], start: Column, nbytes: Column) -> list[int]:
    """The tensors, but the first, that lie behind a gap or are not of the dtype before them."""
    begins = start[1:] != (start + nbytes)[:-1]
    dtypes = [spec.dtype for spec in specs]
    if len(names := {*dtypes}) > 1:
        numbers = {name: number for number, name in enumerate(names)}
        column = np.fromiter(map(numbers.__getitem__, dtypes), np.int64, len(dtypes))
        begins |= column[1:] != column[:-1]
    found: list[int] = (np.flatnonzero(begins) + 1).tolist()
    return found


def _split(
    base: torch.Tensor, specs: Sequence[TensorSpec], start: int, nbytes: Column
) -> list[torch.Tensor]:
    """Views of tensors of one dtype that lie one after the other; one call for all of them."""
    dtype = TORCH_DTYPES[specs[0].dtype]
    if start % dtype.itemsize:
        raise FormatError(f"tensor {specs[0].key!r} starts at byte {start}, not aligned")
    whole = base[start : start + int(nbytes.sum())].view(dtype)
    pieces = whole.split_with_sizes((nbytes // dtype.itemsize).tolist())
    return [
        piece if len(spec.shape) == 1 else piece.view(spec.shape)
        for piece, spec in zip(pieces, specs, strict=True)
    ]
