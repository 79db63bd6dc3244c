"""Arguments of a `Loader` that decide its batches: checks, and batch sizes by epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.arguments import shown
from holdfast.data import samplers
from holdfast.data.mixture import Mixture
from holdfast.errors import UsageError


class Sizes:
    """Batch size of one rank, by epoch."""

    def __init__(self, given: int | Mapping[int, int] | Callable[[int], int] | None) -> None:
        """Keep a size, a mapping or a function; None, as with a batch sampler, means zero."""
        self._given = given
        self.vary = isinstance(given, Mapping) or callable(given)
        if isinstance(given, Mapping):
            self._check_mapping(given)
        elif given is not None and not callable(given):
            check_whole("batch_size", given, at_least=1)
        self.compute_size(0)

    @property
    def epochs(self) -> list[int]:
        """Epochs whose size can be checked beforehand."""
        return sorted(self._given) if isinstance(self._given, Mapping) else [0]

    def compute_size(self, epoch: int) -> int:
        """Return the size in an epoch."""
        if self._given is None or isinstance(self._given, int):
            return self._given or 0
        if isinstance(self._given, Mapping):
            return self._given[max(first for first in self._given if first <= epoch)]
        size = self._given(epoch)
        check_whole(f"batch_size({epoch})", size, at_least=1)
        return size

    @staticmethod
    def _check_mapping(given: Mapping[int, int]) -> None:
        for first, size in given.items():
            check_whole("batch_size: an epoch", first, at_least=0)
            check_whole(f"batch_size[{first}]", size, at_least=1)
        if 0 not in given:
            raise UsageError(f"batch_size={shown(given)}: must have a size for epoch 0")


def check_dataset(dataset: Any) -> None:
    """Raise `UsageError` if a dataset cannot be read by index."""
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset cannot be read by index: use holdfast.data.Stream(dataset, "
            "batch_size=…) (docs/data.md)"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"dataset={shown(dataset)} is a {type(dataset).__name__}: it must have __len__ and "
            "__getitem__"
        )


def check_options(
    dataset: Any, batch_size: Any, sampler: Any, batch_sampler: Any, shuffle: Any, drop_last: bool
) -> None:
    """Raise `UsageError` if options that decide the batches contradict each other."""
    if not isinstance(shuffle, bool) and shuffle != "computed":
        raise UsageError(f'shuffle={shown(shuffle)}: must be True, False or "computed"')
    if batch_size is None and batch_sampler is None:
        raise UsageError("batch_size=None: must be a whole number, 1 or above (or a batch_sampler)")
    if batch_sampler is not None and (batch_size is not None or sampler is not None or drop_last):
        raise UsageError(
            f"batch_sampler={shown(batch_sampler)}: it decides the batches, so give no batch_size, "
            "sampler or drop_last"
        )
    is_of_samples = batch_sampler is None
    name, given = ("sampler", sampler) if is_of_samples else ("batch_sampler", batch_sampler)
    is_mixture = isinstance(dataset, Mixture)
    if given is None:
        if is_mixture and shuffle == "computed":
            raise UsageError('shuffle="computed": the order of a Mixture is stored; leave it out')
        return
    if is_mixture:
        raise UsageError(f"{name}: a Mixture has an order of its own, by its weights")
    if shuffle is not True:
        raise UsageError(f"{name}: it decides the order, so leave out shuffle")
    samplers.check_sampler(name, given, len(dataset))


def check_like_first(num_batches: int, first: int, lap: int) -> None:
    """Raise `UsageError` if a lap of a sampler has another length than the first one."""
    if num_batches != first:
        raise UsageError(
            f"sampler: lap {lap} has {num_batches} batches and the first one {first}; with "
            "batches_per_epoch all laps must be of one length"
        )


def check_whole(name: str, value: Any, *, at_least: int) -> None:
    """Raise `UsageError` if a value is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{name}={value!r}: must be a whole number, {at_least} or above")
