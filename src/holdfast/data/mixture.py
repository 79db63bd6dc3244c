"""Several map-style datasets as one, each with a share of the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from holdfast.arguments import shown
from holdfast.data import randomness
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
