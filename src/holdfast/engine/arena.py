"""Host memory laid out as a tensor file, and tensors as views of it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from holdfast.errors import FormatError, OutOfMemory
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import TORCH_DTYPES


class Arena:
    """Page-aligned private memory that forked children do not inherit."""

    def __init__(self, nbytes: int) -> None:
        """Take the memory.

        Raises:
            OutOfMemory: the system refuses.
        """
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(f"{nbytes} bytes of memory are not to be had: {error}") from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                _advise(self._map, getattr(mmap, advice))
        self.memory = memoryview(self._map)[:nbytes]

    def tensors(self, specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[torch.Tensor]:
        """Views of the arena with the specs' dtypes and shapes, at the given bytes.

        They keep the memory alive.

        Raises:
            FormatError: a start is not a multiple of its item size; in our own files it always
                is, because data starts on a page and items come in descending size.
        """
        with torch.inference_mode(False):
            return self._tensors(specs, starts)

    def _tensors(self, specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[torch.Tensor]:
        base = torch.frombuffer(self._map, dtype=torch.uint8)
        views: list[torch.Tensor] = []
        for run in _runs(specs, starts):
            views += self._split(base, specs[run.start : run.stop], starts[run.start])
        return views

    def _split(
        self, base: torch.Tensor, specs: Sequence[TensorSpec], start: int
    ) -> list[torch.Tensor]:
        """Views of tensors of one dtype that lie one after the other; one call for all of them."""
        dtype = TORCH_DTYPES[specs[0].dtype]
        if start % dtype.itemsize:
            raise FormatError(f"tensor {specs[0].key!r} starts at byte {start}, not aligned")
        sizes = [spec.nbytes // dtype.itemsize for spec in specs]
        whole = base[start : start + sum(sizes) * dtype.itemsize].view(dtype)
        pieces = whole.split_with_sizes(sizes)
        return [
            piece if len(spec.shape) == 1 else piece.view(spec.shape)
            for piece, spec in zip(pieces, specs, strict=True)
        ]


def _runs(specs: Sequence[TensorSpec], starts: Sequence[int]) -> list[range]:
    """Positions of neighbours that have one dtype and no gap between them."""
    runs: list[range] = []
    first, expected = 0, 0
    for position, (spec, start) in enumerate(zip(specs, starts, strict=True)):
        follows = start == expected and spec.dtype == specs[first].dtype
        if position and not follows:
            runs.append(range(first, position))
            first = position
        expected = start + spec.nbytes
    if specs:
        runs.append(range(first, len(specs)))
    return runs


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:
        # Only advice: a kernel without it keeps ordinary pages and copies on fork.
        return
