"""Micro-batches, which fit into memory, and the weights of their losses in a step.

A batch is split along its first dimension; the gradient is that of the whole batch. With "auto" the
size is halved when memory runs out, and is a component of the run. If losses have weights, the
gradient is the mean over all tokens or samples of all ranks, `sum(weight * grad) / sum(weight)`,
without waiting for the device.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.train.argument_checks import check_range
from holdfast.train.group import Group
from holdfast.train.outputs import StepOutput
from holdfast.train.step.device_metrics import convert_metric
from holdfast.train.strategies import local

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
                    f"another rank splits into {count}: give all ranks batches of equal size"
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
            "samples at most from now on, and the step is repeated",
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


class Weighing:
    """Weighs a step's losses, by share without weights, and divides its gradients by the total."""

    def __init__(self, group: Group, *, is_scaled: bool) -> None:
        """Start; `is_scaled`: losses are scaled for fp16, so that large weights would overflow."""
        self._group = group
        self._is_scaled = is_scaled
        self._has_weights: bool | None = None
        """Whether the loss function gives weights, for all steps of this process."""
        self._reference = 1.0
        self._total: Tensor | float | None = None
        self._device = torch.device("cpu")

    def start_step(self) -> None:
        """Begin a step."""
        self._total = None

    def weighted(
        self, output: StepOutput, share: float, num_batches: int
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss to differentiate, and the batch's weight, if any, else by its `share`."""
        self._check_weights_agree(output.weight is not None)
        if output.weight is None:
            return (output.loss if share == 1 else output.loss * share), None
        weight = convert_metric("weight", output.weight)
        if self._total is None:
            self._device = output.loss.device
            self._reference = self._agreed_reference(weight, num_batches)
            self._total = weight
        else:
            self._total = self._total + weight
        factor = weight if self._reference == 1 else weight / self._reference
        # Half precision would round the weight, or overflow.
        loss = output.loss if output.loss.element_size() > 2 else output.loss.float()
        if isinstance(factor, Tensor):
            factor = factor.to(loss.dtype)
        return loss * factor, weight

    def divide(self, parameters: Iterable[Tensor]) -> None:
        """Divide gradients, averaged over ranks, by their total weight, unless it is zero."""
        if self._total is None:
            return
        divisor = self._of_ranks(self._total) / self._reference
        if isinstance(divisor, Tensor):
            divisor = torch.where(divisor == 0, 1.0, divisor)
        elif divisor in (0, 1):
            return
        gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradients.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), several in gradients.items():
            known = divisor.to(device, dtype) if isinstance(divisor, Tensor) else divisor
            torch._foreach_div_(several, known)

    def _check_weights_agree(self, has_weight: bool) -> None:
        if self._has_weights is None:
            of_ranks = self._group.gather_values(has_weight)
            self._has_weights = of_ranks[0]
            if len({*of_ranks}) > 1:
                with_weights = [rank for rank, has in enumerate(of_ranks) if has]
                raise UsageError(f"loss: only ranks {with_weights} give a weight: all or none must")
        elif has_weight != self._has_weights:
            given, before = ("a", "none") if has_weight else ("no", "one")
            raise UsageError(
                f"loss: this batch has {given} weight, and earlier ones had {before}: all or none"
            )

    def _agreed_reference(self, weight: Tensor | float, num_batches: int) -> float:
        """Return a power of two, by this step's batches only, that keeps scaled losses in range."""
        if not self._is_scaled:
            return 1.0
        exponent = math.frexp(float(weight))[1] + (num_batches - 1).bit_length()
        return float(2.0 ** max(0, *self._group.max([exponent])))

    def _of_ranks(self, total: Tensor | float) -> Tensor | float:
        if self._group.is_alone:
            return total
        summed = torch.as_tensor(total, dtype=torch.float64, device=self._device).reshape(1)
        mean = self._group.sum_over_ranks(summed.clone())[0] / self._group.world_size
        return float(mean) if mean.is_cpu else mean
