"""Samplers, mixtures of datasets and batch sizes by epoch, which decide a `Loader`'s batches.

A sampler gives an order of samples other than a plain shuffle, for each lap (pass over the data).
It is a pure function of seed and lap. So no state of it is saved: the position has a digest of the
order of a lap, by which a resume detects that it would be another one.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from holdfast.arguments import check_arguments, shown
from holdfast.data import randomness, samplers
from holdfast.data.randomness import Permutation
from holdfast.errors import UsageError

_COMPUTED_ABOVE = 2**16
"""Samples of a part above which its order is computed, as a lap may take only some of it."""


class Mixture:
    """Map-style dataset of several, of which a `Loader` takes samples by weights.

    Each lap has the same number of samples of each dataset, in a new order. A dataset goes through
    its own laps, in an order of its own: none of its samples comes again before all have come. So
    the position is that of any Loader, and whatever was taken follows from it.

    >>> from holdfast.data import Loader
    >>> mixture = Mixture([(range(3), 1), (range(100, 200), 2)], num_samples=9)
    >>> (batch,) = Loader(mixture, batch_size=9)
    >>> sorted(batch.tolist())[:3], sum(batch > 99).item()
    ([0, 1, 2], 6)
    """

    def __init__(
        self, parts: Iterable[tuple[Any, float]], *, num_samples: int | None = None
    ) -> None:
        """Make a mixture of (dataset, weight).

        Args:
            parts: datasets with `__len__` and `__getitem__`, and weights above zero, whose sum is
                arbitrary.
            num_samples: samples of a lap; None: as many as all datasets have together.
        """
        pairs = [*parts] if isinstance(parts, Iterable) else []
        if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise UsageError(
                f"parts={shown(parts)}: must be a list of (dataset, weight), not empty"
            )
        for number, (dataset, weight) in enumerate(pairs):
            _check_part(f"parts[{number}]={shown((dataset, weight))}", dataset, weight)
        self.datasets = [dataset for dataset, _ in pairs]
        self._lengths = [len(dataset) for dataset in self.datasets]
        self._ends = list(accumulate(self._lengths))
        total = self._ends[-1] if num_samples is None else num_samples
        if type(total) is not int or total < 1:
            raise UsageError(
                f"num_samples={shown(num_samples)}: must be a whole number, 1 or above"
            )
        self.counts = _apportioned(total, [float(weight) for _, weight in pairs])
        """Samples of each dataset in a lap."""
        if 0 in self.counts:
            number = self.counts.index(0)
            raise UsageError(
                f"parts[{number}]: weight={pairs[number][1]} is too small: none of the "
                f"{total} samples of a lap are from this dataset. Raise num_samples or the weight"
            )

    def __len__(self) -> int:
        """Return the number of samples of all datasets together."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample, counted through the datasets one after the other."""
        number = bisect_right(self._ends, index)
        return self.datasets[number][index - (self._ends[number - 1] if number else 0)]

    def order(self, seed: int, lap: int, *, shuffle: bool = True) -> Tensor:
        """Return the indices of a lap; a sampler."""
        parts = [
            self._select_indices(seed, lap, number, shuffle) for number in range(len(self.counts))
        ]
        taken = torch.cat(parts)
        if shuffle:
            own = randomness.generator(randomness.derive(seed, "mixture", lap))
            return taken[torch.randperm(len(taken), generator=own)]
        # Spread evenly: the sample k of n comes at (k + 1/2) / n of the lap.
        places = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in self.counts]
        return taken[torch.argsort(torch.cat(places), stable=True)]

    def _select_indices(self, seed: int, lap: int, number: int, shuffle: bool) -> Tensor:
        """Return the indices that a lap takes of one dataset, from where the lap before ended."""
        count, length = self.counts[number], self._lengths[number]
        start = lap * count
        found = []
        for own_lap in range(start // length, (start + count - 1) // length + 1):
            first = max(0, start - own_lap * length)
            stop = min(length, start + count - own_lap * length)
            if not shuffle:
                found.append(torch.arange(first, stop))
            elif length > _COMPUTED_ABOVE:
                order = Permutation(length, seed, own_lap, number)
                found.append(torch.from_numpy(order[first:stop]))
            else:
                entropy = randomness.derive(seed, "part", number, own_lap)
                own = randomness.generator(entropy)
                found.append(torch.randperm(length, generator=own)[first:stop])
        return torch.cat(found) + (self._ends[number] - length)


def _check_part(name: str, dataset: Any, weight: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"{name}: a {type(dataset).__name__} has no __len__ and __getitem__, so it cannot "
            "be mixed exactly. Mix iterable sources with their own library, such as "
            "datasets.interleave_datasets, and read the result with a Stream"
        )
    if not len(dataset):
        raise UsageError(f"{name}: the dataset is empty")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UsageError(f"{name}: weight={shown(weight)} must be a number above zero")
    if not 0 < weight < math.inf:
        raise UsageError(f"{name}: weight={shown(weight)} must be a number above zero")


def _apportioned(total: int, weights: list[float]) -> list[int]:
    """Divide `total` by weights, the largest remainders rounded up."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


Sampler = Callable[[int, int], Sequence[int] | Tensor] | Iterable[int]
BatchSampler = Callable[[int, int], Sequence[Sequence[int]]] | Iterable[Sequence[int]]


class Weighted:
    """Sampler that draws samples by weights, such as for classes that are rare.

    >>> order = Weighted([1, 0, 3], num_samples=1000)(0, 0)
    >>> counts = order.bincount(minlength=3).tolist()
    >>> counts[1], counts[2] > 2 * counts[0]
    (0, True)
    """

    @check_arguments(but=("weights", "num_samples"))
    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
    ) -> None:
        """Make a sampler.

        Args:
            weights: one for each sample of the dataset, zero or above; their sum is arbitrary.
            num_samples: samples of a lap; None: as many as there are weights, or, without
                replacement, as many as have a weight above zero.
            replacement: a sample may come several times in a lap.
        """
        self._weights = _vector("weights", weights, torch.float64)
        self.dataset_length = len(self._weights)
        num_positive = int((self._weights > 0).sum())
        is_good = bool(torch.isfinite(self._weights).all() and (self._weights >= 0).all())
        if not is_good or not num_positive:
            raise UsageError(
                f"weights={shown(weights)}: must be finite numbers, zero or above, and not all zero"
            )
        default = self.dataset_length if replacement else num_positive
        self._num_samples = default if num_samples is None else num_samples
        if type(self._num_samples) is not int or self._num_samples < 1:
            raise UsageError(
                f"num_samples={shown(num_samples)}: must be a whole number, 1 or above"
            )
        if not replacement and self._num_samples > num_positive:
            raise UsageError(
                f"num_samples={num_samples}: without replacement there are {num_positive} samples "
                "with a weight above zero"
            )
        self._replacement = replacement

    def __call__(self, seed: int, lap: int) -> Tensor:
        """Return the order of a lap."""
        own = randomness.generator(randomness.derive(seed, "weighted", lap))
        if self._replacement:
            # Not torch.multinomial, which takes 2**24 weights at most.
            sums = np.cumsum(self._weights.numpy())
            drawn = torch.rand(self._num_samples, generator=own, dtype=torch.float64).numpy()
            places = np.searchsorted(sums, drawn * sums[-1], side="right")
            last = int(np.flatnonzero(self._weights.numpy())[-1])  # for a product rounded up
            return torch.from_numpy(np.minimum(places, last).astype(np.int64))
        # The order of exponential times with these rates (Efraimidis and Spirakis, 2006).
        drawn_times = torch.rand(self.dataset_length, generator=own, dtype=torch.float64)
        times = -torch.log1p(-drawn_times) / self._weights
        times[self._weights == 0] = float("inf")
        return torch.argsort(times, stable=True)[: self._num_samples]


class Buckets:
    """Batch sampler that puts samples of similar length into a batch, so that little is padded.

    Samples are shuffled, divided into pools, sorted by length within each pool, cut into batches,
    and the batches are shuffled.

    >>> batches = Buckets([5, 90, 6, 80, 7, 85], max_tokens=180)(0, 0)
    >>> sorted(sorted(batch) for batch in batches)
    [[0, 2, 4], [1], [3, 5]]
    """

    @check_arguments(but=("lengths", "batch_size", "max_tokens", "pool"))
    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        pool: int = 100,
    ) -> None:
        """Make a batch sampler, with one of `batch_size` and `max_tokens`.

        Args:
            lengths: of each sample of the dataset.
            batch_size: samples of a batch, of all ranks together.
            max_tokens: the most that a batch has, of all ranks together, when each of its samples
                is padded to the longest one.
            pool: batches of a pool, about; more of them mean less padding and less chance.
        """
        self._lengths = _vector("lengths", lengths, torch.int64)
        self.dataset_length = len(self._lengths)
        given = [size for size in (batch_size, max_tokens) if size is not None]
        if len(given) != 1 or any(type(size) is not int or size < 1 for size in [*given, pool]):
            raise UsageError(
                f"batch_size={shown(batch_size)}, max_tokens={shown(max_tokens)}, "
                f"pool={shown(pool)}: give either batch_size or max_tokens; whole numbers, 1 or "
                "above"
            )
        if not self.dataset_length or int(self._lengths.min()) < 0:
            raise UsageError(f"lengths={shown(lengths)}: must be zero or above, and not empty")
        longest = int(self._lengths.max())
        if max_tokens is not None and longest > max_tokens:
            raise UsageError(f"max_tokens={max_tokens}: the longest sample has {longest}")
        self._batch_size, self._max_tokens = batch_size, max_tokens
        mean = max(1.0, float(self._lengths.double().mean()))
        about = int((max_tokens or 0) / mean) if batch_size is None else batch_size
        self._num_pooled = max(1, about) * pool

    def __call__(self, seed: int, lap: int) -> list[list[int]]:
        """Return the batches of a lap."""
        own = randomness.generator(randomness.derive(seed, "buckets", lap))
        order = torch.randperm(self.dataset_length, generator=own)
        batches = []
        for pool in torch.split(order, self._num_pooled):
            ranked = pool[torch.argsort(self._lengths[pool], stable=True)]
            batches += list(self._cut_batches(ranked.tolist(), self._lengths[ranked].tolist()))
        return [batches[place] for place in torch.randperm(len(batches), generator=own).tolist()]

    def _cut_batches(self, indices: list[int], lengths: list[int]) -> Iterator[list[int]]:
        """Cut indices, sorted by length, into batches."""
        first = 0
        for place, length in enumerate(lengths):
            count = place - first
            if self._batch_size is None:
                is_full = (count + 1) * length > (self._max_tokens or 0)
            else:
                is_full = count == self._batch_size
            if is_full and count:
                yield indices[first:place]
                first = place
        yield indices[first:]


class EpochBatches(torch.utils.data.Sampler[Any]):
    """Indices that a rank takes in an epoch of a `Loader`, as a list for each batch."""

    def __init__(self, planned: Callable[[], Iterator[Sequence[int]]]) -> None:
        self._planned = planned

    def __iter__(self) -> Iterator[Any]:
        return map(list, self._planned())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class EpochSamples(EpochBatches):
    """The same, one index after the other."""

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._planned())


@dataclass(frozen=True, kw_only=True)
class Lap:
    """Batches of one lap that a sampler gave."""

    indices: Tensor
    """Of all batches, one after the other."""
    ends: Sequence[int]
    """For each batch, where it ends in `indices`."""
    digest: str
    """Of the order; for a batch sampler also of where batches end."""

    def select_batch(self, place: int) -> list[int]:
        """Return the indices of a batch."""
        start = self.ends[place - 1] if place else 0
        found: list[int] = self.indices[start : self.ends[place]].tolist()
        return found


def draw_lap(
    sampler: Sampler, seed: int, lap: int, num_samples: int, batch_size: int, drop_last: bool
) -> Lap:
    """Draw a lap from a sampler of samples, and cut it into batches."""
    given = _draw(sampler, seed, lap)
    indices = given if isinstance(given, Tensor) else _index_tensor(given, "sampler", lap)
    indices = _checked_indices(indices, num_samples, "sampler", lap)
    ends = list(range(batch_size, len(indices) + 1, batch_size))
    if not drop_last and len(indices) % batch_size:
        ends.append(len(indices))
    return Lap(indices=indices, ends=ends, digest=_digest_numbers(indices))


def draw_batches(sampler: BatchSampler, seed: int, lap: int, num_samples: int) -> Lap:
    """Draw a lap from a batch sampler."""
    batches = _draw(sampler, seed, lap)
    if not all(hasattr(batch, "__len__") and len(batch) for batch in batches):
        raise UsageError(f"batch_sampler: a batch of lap {lap} is empty, or no list of indices")
    flat = _index_tensor([index for batch in batches for index in batch], "batch_sampler", lap)
    indices = _checked_indices(flat, num_samples, "batch_sampler", lap)
    ends = list(accumulate(len(batch) for batch in batches))
    return Lap(indices=indices, ends=ends, digest=_digest_numbers(indices, torch.tensor(ends)))


def check_sampler(name: str, sampler: Any, num_samples: int) -> None:
    """Check that a sampler can be drawn from again, for this dataset."""
    for inner in _with_inner(sampler):
        if isinstance(inner, DistributedSampler) or hasattr(inner, "num_replicas"):
            raise UsageError(
                f"{name}: a {type(inner).__name__} gives each rank its part, which the Loader does "
                "itself (ranks=): omit it"
            )
    if not callable(sampler) and (not hasattr(sampler, "__iter__") or iter(sampler) is sampler):
        raise UsageError(
            f"{name}={shown(sampler)} is a {type(sampler).__name__}: must be a function of "
            "(seed, lap), or an object that gives its indices each time it is iterated over"
        )
    made_for = getattr(sampler, "dataset_length", num_samples)
    if made_for != num_samples:
        raise UsageError(
            f"{name}: the {type(sampler).__name__} was made for {made_for} samples, and the "
            f"dataset has {num_samples}"
        )


def _draw(sampler: Any, seed: int, lap: int) -> Any:
    """Call or iterate over a sampler, under generators that depend on seed and lap alone."""
    entropy = randomness.derive(seed, "sampler", lap)
    with randomness.seeded(entropy):
        if callable(sampler):
            return sampler(seed, lap)
        with _reseeded(_with_inner(sampler), entropy, lap):
            return list(sampler)


@contextmanager
def _reseeded(samplers: list[Any], entropy: bytes, lap: int) -> Iterator[None]:
    """Give torch's samplers their own seeded generator for the block, and the lap as epoch."""
    before = [(each, each.generator) for each in samplers if hasattr(each, "generator")]
    for each, _ in before:
        each.generator = randomness.generator(entropy)
    for each in samplers:
        if hasattr(each, "set_epoch"):
            each.set_epoch(lap)
    try:
        yield
    finally:
        for each, generator in before:
            each.generator = generator


def _with_inner(sampler: Any) -> list[Any]:
    """Return a sampler, and the one that it takes its indices from, as torch's BatchSampler."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, *_with_inner(inner)]


def _vector(name: str, given: Any, dtype: torch.dtype) -> Tensor:
    try:
        vector = torch.as_tensor(given, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{name}={shown(given)}: must be a list of numbers: {error}") from None
    if vector.dim() != 1:
        raise UsageError(f"{name}={shown(given)}: must be a list of numbers")
    return vector


def _index_tensor(given: Any, name: str, lap: int) -> Tensor:
    try:
        found = np.asarray(list(given))
        return torch.as_tensor(found if len(found) else found.astype(np.int64))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name}={shown(given)}: lap {lap} must be a list of indices: {error}"
        ) from None


def _checked_indices(indices: Tensor, num_samples: int, name: str, lap: int) -> Tensor:
    if not len(indices):
        raise UsageError(f"{name}: lap {lap} has no sample")
    if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
        raise UsageError(f"{name}: lap {lap} must be whole numbers, indices of the dataset")
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= num_samples:
        wrong = least if least < 0 else most
        raise UsageError(
            f"{name}: lap {lap} has the index {wrong}, and the dataset has {num_samples} samples"
        )
    return indices.to("cpu", torch.int64)


def _digest_numbers(*numbers: Tensor) -> str:
    found = hashlib.blake2b(digest_size=8)
    for each in numbers:
        found.update(len(each).to_bytes(8, "little"))
        found.update(np.ascontiguousarray(each.numpy(), dtype="<i8").data)
    return found.hexdigest()


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
            f"batch_sampler={shown(batch_sampler)}: it decides the batches, so omit batch_size, "
            "sampler and drop_last"
        )
    is_of_samples = batch_sampler is None
    name, given = ("sampler", sampler) if is_of_samples else ("batch_sampler", batch_sampler)
    is_mixture = isinstance(dataset, Mixture)
    if given is None:
        if is_mixture and shuffle == "computed":
            raise UsageError('shuffle="computed": the order of a Mixture is stored; omit it')
        return
    if is_mixture:
        raise UsageError(f"{name}: a Mixture has an order of its own, by its weights")
    if shuffle is not True:
        raise UsageError(f"{name}: it decides the order, so omit shuffle")
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
