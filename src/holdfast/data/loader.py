"""A DataLoader whose position is exact (docs/design.md, section 6).

The order of samples is a pure function of (seed, lap), and each batch is fetched under global
generators seeded from (seed, lap, batch). So two numbers are the whole position, and it counts
the batches that the loop has taken, not those that workers have fetched ahead. With several ranks
they are batches of all ranks, of which each takes its part, so the position is the same on all.
Orders of samplers are in `samplers.py`, the stored position is checked in `position.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import default_collate
from typing_extensions import override

from holdfast.arguments import check_arguments, shown
from holdfast.data import position, randomness, samplers
from holdfast.data.feed import Feed, kill_at_exit, torch_loader
from holdfast.data.randomness import Permutation
from holdfast.data.ranks import HasRank
from holdfast.data.samplers import (
    Mixture,
    Sizes,
    check_dataset,
    check_like_first,
    check_options,
    check_whole,
)
from holdfast.errors import UsageError, listing
from holdfast.state.probing import hides_epochs

logger = logging.getLogger("holdfast")

_BatchSpec = tuple[int, int, int, Sequence[int]]
"""(epoch, batch, number of own samples, indices of the samples that this rank gets)."""
_COMPUTED_ABOVE = 2**27
"""Samples above which a shuffle is computed by default: a stored order of them has 1 GiB."""


class Loader(Feed):
    """Loader of a map-style dataset whose order and position resume exactly.

    `for batch in loader` yields the rest of the current epoch, then stops; the next loop yields
    the next epoch: one lap through the data, or `batches_per_epoch` batches of it. An epoch ends
    when the loop requests a batch beyond its last one, or for the next iterator. A position saved
    after the last batch is still in that epoch: after a resume the first iterator yields no batch,
    and the loop does what it does at the end of an epoch. A loop that counts takes
    `len(loader) - loader.batch` batches from each iterator.

    As a component of the state it stores its position. One iterator is alive at a time: beginning
    another one, or `load_state_dict`, ends the former, whose next item raises `UsageError`.

    Exact for what the dataset and `collate_fn` draw from the global generators of Python, NumPy
    and torch (CPU). A dataset that keeps a generator of its own, or other state that fetching
    changes, is exact with no loader. The generators of the process are left as they were.

    A sampler or batch sampler is drawn anew for each lap, under generators that depend on the seed
    and the lap alone. A resume in the middle of an epoch checks that its order is the same.

    With several ranks, `batch_size` samples of each rank are one batch of all ranks. Order and
    position are the same on all ranks, which count batches of all ranks, so the seed must be, too.

    >>> loader = Loader(range(10), batch_size=4, seed=1)
    >>> taken = next(iter(loader))
    >>> again = Loader(range(10), batch_size=4, seed=1)
    >>> again.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]
    True
    """

    _name = "loader"

    @check_arguments(but=("batch_size", "shuffle", "generator"))
    def __init__(
        self,
        dataset: Any,
        batch_size: int | Mapping[int, int] | Callable[[int], int] | None = None,
        shuffle: bool | Literal["computed"] = True,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        seed: int = 0,
        batches_per_epoch: int | None = None,
        ranks: Literal["group"] | HasRank | None = "group",
        fingerprint: str | None = None,
    ) -> None:
        """Make a loader; arguments that torch's DataLoader has, too, are in its order.

        Args:
            dataset: has `__len__`, and `__getitem__` or `__getitems__`.
            batch_size: samples a batch, of each rank; a function gives that of each epoch, and a
                mapping that of epochs from each of its keys on, as `{0: 32, 10: 64}`.
            shuffle: draw a new order for each lap through the data; otherwise the dataset's own.
                "computed": the order is computed and not stored, as True does above 2**27 samples.
            sampler: in place of `shuffle`, which samples a lap has: a function of (seed, lap) that
                gives indices, such as `Weighted`, or a sampler of torch.
            batch_sampler: in place of `batch_size`, too: gives a list of indices for each batch of
                all ranks, such as `Buckets`.
            num_workers: as for torch's DataLoader, as are the next six.
            collate_fn: see `num_workers`.
            pin_memory: see `num_workers`.
            timeout: see `num_workers`.
            worker_init_fn: see `num_workers`.
            multiprocessing_context: see `num_workers`.
            prefetch_factor: see `num_workers`.
            persistent_workers: see `num_workers`.
            drop_last: leave out a lap's last batch when it is not full. Otherwise the ranks divide
                it; their parts differ by one sample at most, and none is empty.
            generator: None, as all random numbers follow from the seed.
            seed: of the order and of what a fetch draws, the same on all ranks; zero or above.
            batches_per_epoch: an epoch is so many batches, fewer or more than a lap, and the next
                one continues where it ended; None: one lap.
            ranks: rank and world size of those that share the data, such as `DataRanks(0, 8)`;
                "group": those of torch's default process group, or those that a launcher such as
                torchrun has set, if it is made later; None: this process has all of the data.
            fingerprint: name of this very data; a resume with another one is refused.
        """
        check_dataset(dataset)
        check_options(dataset, batch_size, sampler, batch_sampler, shuffle, drop_last)
        if generator is not None:
            raise UsageError(
                f"generator={shown(generator)}: a Loader derives its random numbers from its seed: "
                "pass seed=… instead"
            )
        self._sizes = Sizes(batch_size)
        check_whole("seed", seed, at_least=0)
        if batches_per_epoch is not None:
            check_whole("batches_per_epoch", batches_per_epoch, at_least=1)
            if self._sizes.vary or batch_sampler is not None:
                raise UsageError(
                    "batches_per_epoch needs one batch_size: with a batch_sampler, or batch sizes "
                    "by epoch, an epoch is a lap through the data. Omit it"
                )
        check_whole("num_workers", num_workers, at_least=0)
        if prefetch_factor is not None:
            check_whole("prefetch_factor", prefetch_factor, at_least=1)
        super().__init__(dataset, seed=seed, ranks=ranks, fingerprint=fingerprint)
        self._collate_fn = collate_fn or default_collate
        self._worker_init_fn = worker_init_fn
        self._num_samples = len(dataset)
        self._shuffle, self._asks_computed = bool(shuffle), shuffle == "computed"
        self._is_computed = self._asks_computed or (
            self._shuffle and self._num_samples > _COMPUTED_ABOVE
        )
        self._drop_last = drop_last
        self._batches_per_epoch = batches_per_epoch
        if isinstance(dataset, Mixture):
            sampler = partial(dataset.order, shuffle=self._shuffle)
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._is_sampled = sampler is not None or batch_sampler is not None
        self._laps: dict[tuple[int, int], samplers.Lap] = {}
        """Of a sampler: the last two laps that were drawn, by seed and lap."""
        self._has_compared = False
        self._check_not_empty()
        if self._is_sampled:
            self._check_is_pure()
        self._plan = _PlannedBatches()
        self._batches = torch_loader(
            _Fetcher(dataset, self._collate_fn),
            worker_init_fn,
            sampler=self._plan,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
        )

    @property
    @override
    def at_epoch_end(self) -> bool:
        return self._batch == len(self)

    @property
    @override
    def batch_size(self) -> int | None:
        return self._sizes.compute_size(self._epoch) or None

    @property
    @override
    def drop_last(self) -> bool:
        return self._drop_last

    @property
    @override
    def sampler(self) -> Any:
        """The sampler, if it is iterable; else one of this rank's indices in the epoch."""
        is_iterable = isinstance(self._sampler, Iterable)
        return self._sampler if is_iterable else samplers.EpochSamples(self._planned)

    @property
    @override
    def batch_sampler(self) -> Any:
        """The same of the batch sampler; its items are lists of indices."""
        is_iterable = isinstance(self._batch_sampler, Iterable)
        return self._batch_sampler if is_iterable else samplers.EpochBatches(self._planned)

    def __len__(self) -> int:
        """Return the number of batches of this epoch, the same on all ranks.

        Epochs differ in it only with a batch sampler, or with batch sizes by epoch.
        """
        return self._num_batches(self._seed, self._epoch)

    @property
    def epochs_vary(self) -> bool:
        """Whether epochs may differ in their number of batches."""
        return self._sizes.vary or self._batch_sampler is not None

    @override
    def _infer_steps(self) -> int | None:
        if self.epochs_vary:
            return super()._infer_steps()
        return self._epoch * len(self) + self._batch

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position, with the settings that it depends on."""
        now = self._now
        return {
            **self._position(now),
            **self._settings(self._seed, now.epoch, now.batch),
            **self._identity(),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Validate a position as `load_state_dict` does, without changes; resumes call it first.

        Returns:
            Notes for the resume: where the position among batches of another size goes on, and
            what has changed in the dataset.
        """
        _, notes = self._batch_from(position.check_position(state))
        return notes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stored position. A stored seed that differs replaces this one, with a warning.

        In the middle of an epoch, so does the way in which its order was drawn: all at once, or
        computed. That the dataset is another one is told as far as its type and attributes show.

        A loader of several ranks goes on with batches of another size, too, at the first one
        without a sample that was taken; a warning says how many samples that leaves out.
        """
        stored = position.check_position(state)
        batch, notes = self._batch_from(stored)
        self._move(stored, batch, notes)
        was_computed = stored.get(position.ORDER) == position.COMPUTED
        if self._shuffle and stored["shuffle"] and was_computed != self._is_computed:
            if self._asks_computed and not stored["batch"] and self._batches_per_epoch is None:
                was_computed = True  # a new epoch may be ordered as it likes
            elif self._asks_computed:
                logger.warning(
                    'shuffle="computed", but the position was saved without it: the saved order '
                    "is used until a resume at an epoch's start"
                )
            self._is_computed = was_computed

    @override
    def _of_epoch(self) -> Iterator[Any]:
        return self._across(len(self) - self._batch)

    @override
    def _across(self, count: int) -> Iterator[Any]:
        generation = self._start_iterator()
        if not count:
            return
        if len(self.dataset) != self._num_samples:
            raise UsageError(
                f"the dataset had {self._num_samples} samples and now has {len(self.dataset)}: "
                "make a new loader"
            )
        self._check_group()
        self._plan.specs = self._plan_batches(self._epoch, self._batch, count)
        batches = iter(self._batches)
        kill_at_exit(batches)
        for epoch, batch, num_own, samples in batches:
            self._expect_alive(generation)
            self._epoch, self._batch, self._num_own = epoch, batch + 1, num_own
            self._count_batch()
            yield samples
            self._expect_alive(generation)
        self._taking.finish_iteration()

    def _planned(self) -> Iterator[Sequence[int]]:
        """Yield this rank's indices in each batch of the present epoch."""
        for _, (*_, indices) in self._plan_batches(self._epoch, 0, len(self)):
            yield indices

    def _plan_batches(
        self, epoch: int, batch: int, count: int
    ) -> Iterator[tuple[bytes, _BatchSpec]]:
        orders: tuple[int, Any] = (-1, None)
        # Ranks draw differently. The first draws as a single one does.
        own = (self._ranks.rank,) if self._ranks.rank else ()
        length = self._num_batches(self._seed, epoch)
        for _ in range(count):
            if batch == length:
                epoch, batch = epoch + 1, 0
                length = self._num_batches(self._seed, epoch)
            lap, place = self._locate_batch(epoch, batch)
            if lap != orders[0]:
                orders = lap, self._make_lap_order(lap)
            # Not derived from the epoch: batches do not depend on where epochs end.
            entropy = randomness.derive(self._seed, "batch", lap, place, *own)
            indices = self._indices(orders[1], epoch, place)
            num_own = self._ranks.num_own(len(indices))
            yield entropy, (epoch, batch, num_own, self._ranks.part(indices))
            batch += 1

    def _locate_batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the lap of a batch, and its place there."""
        if self._batches_per_epoch is None:
            return epoch, batch
        return divmod(epoch * self._batches_per_epoch + batch, self._batches_of_lap(self._seed, 0))

    def _make_lap_order(self, lap: int) -> Any:
        if self._is_sampled:
            return self._lap(self._seed, lap)
        if not self._shuffle:
            return range(self._num_samples)
        if self._is_computed:
            return Permutation(self._num_samples, self._seed, lap)
        own = randomness.generator(randomness.derive(self._seed, "order", lap))
        return torch.randperm(self._num_samples, generator=own)

    def _indices(self, order: Any, epoch: int, place: int) -> Sequence[int]:
        if isinstance(order, samplers.Lap):
            return order.select_batch(place)
        batch_size = self._batch_size(epoch)
        part = order[place * batch_size : (place + 1) * batch_size]
        return list(part) if isinstance(part, range) else part.tolist()

    def _lap(self, seed: int, lap: int) -> samplers.Lap:
        """Return a lap of the sampler, drawn if it is not one of the last two."""
        if (seed, lap) not in self._laps:
            drawn = self._drawn(seed, lap)
            if self._batches_per_epoch is not None and lap:
                check_like_first(len(drawn.ends), self._batches_of_lap(seed, 0), lap)
            kept = list(self._laps.items())[-1:]
            self._warn_if_same(lap, drawn, [each for _, each in kept])
            self._laps = dict([*kept, ((seed, lap), drawn)])
        return self._laps[seed, lap]

    def _warn_if_same(self, lap: int, drawn: samplers.Lap, before: list[samplers.Lap]) -> None:
        """Log a warning, once, if a lap has the order of another, as set_epoch is not passed on."""
        if self._has_compared or [each.digest for each in before] != [drawn.digest]:
            return
        self._has_compared = True
        sampler = self._sampler if self._batch_sampler is None else self._batch_sampler
        if len(drawn.ends) > 1 and hides_epochs(sampler, lap):
            logger.warning(
                "the loader's sampler, a %s, gives the same order in each lap: the lap's number "
                "does not reach an object inside of it that has set_epoch. Add a set_epoch to the "
                "sampler that calls that one",
                type(sampler).__name__,
            )

    def _drawn(self, seed: int, lap: int) -> samplers.Lap:
        if self._batch_sampler is not None:
            return samplers.draw_batches(self._batch_sampler, seed, lap, self._num_samples)
        size = self._batch_size(lap)  # the epoch, unless there is one size for all
        return samplers.draw_lap(self._sampler, seed, lap, self._num_samples, size, self._drop_last)

    def _check_is_pure(self) -> None:
        """Raise `UsageError` if the sampler gives another order when it is asked again."""
        if self._drawn(self._seed, 0).digest != self._lap(self._seed, 0).digest:
            which = "sampler" if self._batch_sampler is None else "batch_sampler"
            raise UsageError(
                f"{which}: it returned two orders for one lap, so no resume would be exact: it "
                "draws from a generator of its own. Write a function of (seed, lap), or give it "
                "an attribute `generator` as torch's samplers have"
            )

    def _batch_size(self, epoch: int) -> int:
        """Return the number of samples in a batch of all ranks; zero with a batch sampler."""
        return self._sizes.compute_size(epoch) * self._ranks.world_size

    def _batches_of_lap(self, seed: int, lap: int) -> int:
        if self._is_sampled:
            return len(self._lap(seed, lap).ends)
        return position.num_batches(self._num_samples, self._batch_size(lap), self._drop_last)

    def _num_batches(self, seed: int, epoch: int) -> int:
        found = self._batches_per_epoch or self._batches_of_lap(seed, epoch)
        if not found:
            raise UsageError(f"epoch {epoch} has no full batch (drop_last)")
        return found

    def _settings(self, seed: int, epoch: int, batch: int) -> dict[str, int | bool | str]:
        """Return the settings that a position depends on."""
        settings: dict[str, int | bool | str] = {
            position.VERSION: position.PRESENT_VERSION,
            "num_samples": self._num_samples,
            "batch_size": self._batch_size(epoch),
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }
        if self._batches_per_epoch is not None:
            settings[position.PER_EPOCH] = self._batches_per_epoch
        if self._is_sampled:
            lap = self._lap(seed, self._locate_batch(epoch, batch)[0])
            settings |= {position.ORDER: lap.digest, position.NUM_BATCHES: len(lap.ends)}
        elif self._is_computed:
            settings[position.ORDER] = position.COMPUTED
        return settings

    def _batch_from(self, stored: Mapping[str, Any]) -> tuple[int, list[str]]:
        """Return the batch to resume at, and notes on it and on the dataset.

        Settings may differ only at an epoch's start or end; the batch size may differ everywhere
        in whole laps of several ranks.
        """
        seed, epoch, batch = stored["seed"], stored["epoch"], stored["batch"]
        if epoch == batch == 0:
            return 0, []
        notes = position.changes_of_data(stored, self._num_samples, self._data, self._fingerprint)
        are_laps = position.PER_EPOCH not in stored and self._batches_per_epoch is None
        if are_laps and batch == 0:
            return 0, notes
        settings = self._settings(seed, epoch, batch)
        differing = position.differing_settings(stored, settings)
        if not differing:
            return batch, notes
        if are_laps and batch == position.epoch_length(stored):
            return self._num_batches(seed, epoch), notes
        of_size = {"batch_size", position.NUM_BATCHES}
        if (
            are_laps
            and "batch_size" in differing
            and of_size >= {*differing}
            and not self._is_alone
        ):
            return self._carry_on(stored, notes)
        of_all = "" if self._is_alone else " (batch_size counts all ranks together)"
        raise UsageError(
            f"the position is batch {batch} of epoch {epoch}, which cannot be resumed in an epoch "
            f"with other settings{of_all}:\n"
            + listing(
                f"{name}: stored {stored.get(name)}, here {settings.get(name)}"
                for name in differing
            )
            + position.advice_for_version(stored)
        )

    def _carry_on(self, stored: Mapping[str, Any], notes: list[str]) -> tuple[int, list[str]]:
        """Return the first batch without a sample that was taken in batches of another size."""
        seed, epoch = stored["seed"], stored["epoch"]
        batch_size = self._batch_size(epoch)
        in_lap = len(self._lap(seed, epoch).indices) if self._is_sampled else self._num_samples
        num_taken = stored["batch"] * stored["batch_size"]
        batch = min(-(-num_taken // batch_size), self._num_batches(seed, epoch))
        num_left_out = min(batch * batch_size, in_lap) - num_taken
        note = (
            f"a batch of all ranks had {stored['batch_size']} samples and has {batch_size} here, "
            f"so epoch {epoch} resumes at batch {batch} in place of {stored['batch']}"
        )
        if num_left_out > 0:
            note += f", and {num_left_out} of its samples are left out"
        return batch, [*notes, note]

    def _check_not_empty(self) -> None:
        if self._num_samples == 0:
            raise UsageError("the dataset is empty")
        for epoch in self._sizes.epochs:
            if self._batches_of_lap(self._seed, epoch) == 0:
                num_ranks = self._ranks.world_size
                on_ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
                raise UsageError(
                    f"batch_size={self._sizes.compute_size(epoch)}{on_ranks} with drop_last "
                    f"leaves no batch of {self._num_samples} samples"
                )


class _PlannedBatches:
    """Batch sampler for torch's DataLoader: yields the batches that were planned."""

    def __init__(self) -> None:
        self.specs: Iterator[tuple[bytes, _BatchSpec]] = iter(())

    def __iter__(self) -> Iterator[tuple[bytes, _BatchSpec]]:
        return self.specs


class _Fetcher(torch.utils.data.Dataset[Any]):
    """Dataset for torch's DataLoader, each item of which is a batch. Pickled to workers."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, planned: tuple[bytes, _BatchSpec]) -> tuple[int, int, int, Any]:
        entropy, (epoch, batch, num_own, indices) = planned
        with randomness.seeded(entropy):
            return epoch, batch, num_own, self._collate_fn(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            return list(fetch_many(indices))
        return [self._dataset[index] for index in indices]
