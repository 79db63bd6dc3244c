"""Micro-batches: a batch is split along its first dimension, so that it fits into memory.

The gradient is that of the whole batch. With "auto" the size is halved when memory runs out, and
is a component of the run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.train.argument_checks import check_range
from holdfast.train.parallel.group import Group

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A part of a step's batches, with one forward and one backward pass."""

    batch: Any
    share: float
    """Its part of the step: factor of its mean loss in that of the step."""
    weight: float
    """Its part of its batch: weight of its metrics."""


class MicroBatches:
    """Splits the batches of a step."""

    def __init__(self, given: Literal["auto"] | int | None, group: Group) -> None:
        """Split into pieces of at most `given` samples; "auto": as many as fit; None: no split."""
        if given is not None and given != "auto":
            check_range("micro_batch", given, 1, 2**31)
        if given == "auto" and not group.is_alone:
            raise UsageError(
                'micro_batch="auto" needs one process: when memory runs out on a rank, the others '
                "wait in its collectives; give a number of samples"
            )
        self.is_auto = given == "auto"
        self._group = group
        self._size: int | None = given if isinstance(given, int) else None

    @property
    def max_samples(self) -> int | None:
        """Largest number of samples in a piece; None: batches are not split."""
        return self._size

    def split_window(self, window: Sequence[Any]) -> list[MicroBatch]:
        """Return the pieces of a step's batches."""
        whole = 1 / len(window)
        if self._size is None:
            return [MicroBatch(batch=batch, share=whole, weight=1.0) for batch in window]
        sizes = [num_samples(batch) for batch in window]
        counts = self._group.max([-(-size // self._size) for size in sizes])
        found = []
        for batch, size, count in zip(window, sizes, counts, strict=True):
            if count > size:
                raise UsageError(
                    f"micro_batch={self._size}: this rank has {size} samples in a batch that "
                    f"another rank splits into {count}: give all ranks batches of one size"
                )
            for part, start, end in _split_batch(batch, size, count):
                part_of_batch = (end - start) / size
                found.append(
                    MicroBatch(batch=part, share=whole * part_of_batch, weight=part_of_batch)
                )
        return found

    def can_halve(self, window: Sequence[Any]) -> bool:
        """Whether a piece of these batches has more than one sample."""
        return self._largest(window) > 1

    def halve(self, window: Sequence[Any]) -> None:
        """Halve the size after memory ran out."""
        size = self._largest(window)
        self._size = -(-size // 2)
        logger.warning(
            "out of memory with %d samples at once: batches are split into micro-batches of %d "
            "samples at most from now on, and the step is done again",
            size,
            self._size,
        )

    def _largest(self, window: Sequence[Any]) -> int:
        largest = max(map(num_samples, window))
        return largest if self._size is None else min(self._size, largest)

    def state_dict(self) -> dict[str, int | None]:
        """Return the size to save."""
        return {"size": self._size}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a stored size is not one."""
        size = state.get("size")
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if set(state) != {"size"} or not (size is None or is_size):
            raise UsageError(f"not the state of micro-batches: {shown(dict(state))}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stored size."""
        self.check_state_dict(state)
        self._size = state["size"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def num_samples(batch: Any) -> int:
    """Count the samples of a batch: the first dimension, which all its tensors share."""
    sizes = {*_sizes(batch)}
    if len(sizes) != 1:
        said = "no tensors with a dimension" if not sizes else f"first dimensions {sorted(sizes)}"
        raise UsageError(
            f"micro_batch: a batch of type {type(batch).__name__} has {said}; all its tensors must "
            "have one, their samples"
        )
    size = sizes.pop()
    if size < 1:
        raise UsageError("micro_batch: a batch has no samples")
    return size


def _split_batch(batch: Any, size: int, count: int) -> Iterator[tuple[Any, int, int]]:
    """Split a batch into parts of nearly equal size; yields each with its first and last sample."""
    if count == 1:
        yield batch, 0, size
        return
    edges = [size * at // count for at in range(count + 1)]
    for start, end in pairwise(edges):
        yield _slice_batch(batch, slice(start, end), size), start, end


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _sizes(value)
    elif not isinstance(batch, _SHARED):
        raise UsageError(
            f"micro_batch: a {type(batch).__name__} in a batch cannot be split: only tensors and "
            "arrays in mappings, lists and tuples can"
        )


_SHARED = (str, bytes, bool, int, float, complex, np.generic, type(None))


def _slice_batch(batch: Any, part: slice, size: int) -> Any:
    """Return a part of each tensor, and of each list with one item for each sample."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[part] if batch.ndim else batch
    if isinstance(batch, Mapping):
        cut = {key: _slice_batch(value, part, size) for key, value in batch.items()}
        if type(batch) is dict:
            return cut
        other: Any = copy.copy(batch)
        for key, value in cut.items():
            other[key] = value
        return other
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_slice_batch(value, part, size) for value in batch))
    if isinstance(batch, list | tuple):
        if len(batch) == size and all(isinstance(item, _SHARED) for item in batch):
            return batch[part]
        return type(batch)(_slice_batch(value, part, size) for value in batch)
    return batch
