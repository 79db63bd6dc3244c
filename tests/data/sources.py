"""Iterable sources with the interfaces of other libraries, for tests of Stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Shards(IterableDataset[Any]):
    """Shards of samples, divided among workers, each of which draws from all generators.

    The interface of datasets' IterableDataset: a state of (shard, place), which holds only in the
    epoch that it was made in, and an order of shards by epoch.
    """

    def __init__(self, lengths: tuple[int, ...] = (5, 3, 7, 2)) -> None:
        self._lengths, self._epoch = lengths, 0
        self._start: dict[str, int] | None = None
        self._state = {"epoch": 0, "shard": 0, "place": 0}

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        own = slice(None) if info is None else slice(info.id, None, info.num_workers)
        shards = list(np.random.default_rng(self._epoch).permutation(len(self._lengths)))[own]
        goes_on = self._start is not None and self._start["epoch"] == self._epoch
        begin = self._start if goes_on and self._start else {"shard": 0, "place": 0}
        for number in range(begin["shard"], len(shards)):
            first = begin["place"] if number == begin["shard"] else 0
            for place in range(first, self._lengths[shards[number]]):
                self._state = {"epoch": self._epoch, "shard": number, "place": place + 1}
                yield sample(100 * int(shards[number]) + place)


class Stateless(IterableDataset[Any]):
    """Samples in an order drawn from the global generator, as a pipeline without state has."""

    def __init__(self, num_samples: int = 17) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(self._num_samples).tolist():
            yield sample(index)


def sample(index: int) -> torch.Tensor:
    drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
    return torch.tensor([float(index), *drawn], dtype=torch.float64)
