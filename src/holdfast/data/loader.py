"""A DataLoader whose position is exact (docs/design.md, section 6).

The order of samples is a pure function of (seed, lap), and each batch is fetched under global
generators seeded from (seed, lap, batch). So two numbers are the whole position, and it counts
the batches that the loop has taken, not those that workers have fetched ahead. With several ranks
they are batches of all ranks, of which each takes its part, so the position is the same on all.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from holdfast.arguments import checked, shown
from holdfast.data import randomness
from holdfast.data.ranks import ALONE, DataRanks, HasRank, data_ranks
from holdfast.errors import UsageError, listing
from holdfast.launched import has_group, present_ranks

logger = logging.getLogger("holdfast")

_BatchSpec = tuple[int, int, Sequence[int]]
"""(epoch, batch, indices of this rank's samples)."""
_SETTINGS = ("num_samples", "batch_size", "shuffle", "drop_last")
_PER_EPOCH = "batches_per_epoch"
"""Member of the position that is stored only if the option is given."""
_iterators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""torch's iterators with workers -> id of the process that started them."""


class Loader:
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

    With several ranks, `batch_size` samples of each rank are one batch of all ranks. Order and
    position are the same on all ranks, which count batches of all ranks, so the seed must be, too.

    >>> loader = Loader(range(10), batch_size=4, seed=1)
    >>> taken = next(iter(loader))
    >>> again = Loader(range(10), batch_size=4, seed=1)
    >>> again.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]
    True
    """

    @checked()
    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        batches_per_epoch: int | None = None,
        ranks: Literal["group"] | HasRank | None = "group",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """Make a loader; options from `num_workers` on are those of torch's DataLoader.

        Args:
            dataset: has `__len__`, and `__getitem__` or `__getitems__`.
            batch_size: samples a batch, of each rank.
            seed: of the order and of what a fetch draws, the same on all ranks; zero or above.
            shuffle: draw a new order for each lap through the data; otherwise the dataset's own.
            drop_last: leave out a lap's last batch when it is not full. Otherwise the ranks divide
                it; their parts differ by one sample at most, and none is empty.
            batches_per_epoch: an epoch is so many batches, fewer or more than a lap, and the next
                one continues where it ended; None: one lap.
            ranks: rank and world size of those that share the data, such as `DataRanks(0, 8)`;
                "group": those of torch's default process group, or those that a launcher such as
                torchrun has set, if it is made later; None: this process has all of the data.

        Raises:
            UsageError: an iterable, an empty dataset, or one without a full batch; or ranks that
                are none.
        """
        _check_dataset(dataset)
        _check_whole("batch_size", batch_size, at_least=1)
        _check_whole("seed", seed, at_least=0)
        if batches_per_epoch is not None:
            _check_whole("batches_per_epoch", batches_per_epoch, at_least=1)
        _check_whole("num_workers", num_workers, at_least=0)
        if prefetch_factor is not None:
            _check_whole("prefetch_factor", prefetch_factor, at_least=1)
        self.dataset = dataset
        self._num_samples = len(dataset)
        given = data_ranks(ranks)
        self._ranks, self._is_alone = given or ALONE, given is None
        self._follows_group, self._has_warned = ranks == "group", False
        self._batch_size = batch_size * self._ranks.world_size
        """Samples of a batch of all ranks."""
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._batches_per_lap = _num_batches(self._num_samples, self._batch_size, drop_last)
        self._batches_per_epoch = batches_per_epoch
        self._check_not_empty()
        self._seed = seed
        self._epoch = 0
        self._batch = 0
        self._generation = 0
        self._begun_epoch = -1
        """Epoch that an iterator was made for since the position was loaded."""
        self._plan = _PlannedBatches()
        try:
            self._batches: DataLoader[Any] = DataLoader(
                _Fetcher(dataset, collate_fn or default_collate),
                batch_size=None,
                sampler=self._plan,
                collate_fn=_identity,
                # A separate generator, because the start of an iteration draws from it.
                generator=torch.Generator(),
                num_workers=num_workers,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
                prefetch_factor=prefetch_factor,
                multiprocessing_context=multiprocessing_context,
                worker_init_fn=_begin_worker,
            )
        except (TypeError, ValueError) as error:  # its message names the option
            raise UsageError(f"torch's DataLoader: {error}") from error

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Number of batches, of all ranks, that the loop has taken of this epoch."""
        return self._batch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the loop has taken the epoch's last batch and has not requested another."""
        return self._batch == len(self)

    @property
    def ranks(self) -> DataRanks:
        """Rank of this process among those that share the data, and their number."""
        return self._ranks

    @property
    def seed(self) -> int:
        """The seed in use; after `load_state_dict`, the stored one."""
        return self._seed

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on all ranks."""
        return self._batches_per_epoch or self._batches_per_lap

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of this epoch, or the next one if this one is at its end."""
        if self.at_epoch_end and self._begun_epoch == self._epoch:
            self._end_epoch()
        self._begun_epoch = self._epoch
        return self._rest()

    def until(self, step: int, *, start: int = 0, batches_per_step: int = 1) -> Iterator[Any]:
        """Iterate over batches, across epochs, until `step` steps are done.

        Args:
            step: steps that are done in the end.
            start: steps that are done already.
            batches_per_step: batches of an accumulation window.

        Raises:
            UsageError: an argument is not a whole number, or is too small.
        """
        _check_whole("step", step, at_least=0)
        _check_whole("start", start, at_least=0)
        _check_whole("batches_per_step", batches_per_step, at_least=1)
        if start and self._epoch == self._batch == 0:
            logger.warning(
                "until(start=%d): the loader stands at its very first batch; was it in the state "
                "that was resumed?",
                start,
            )
        return self._take(max(0, step - start) * batches_per_step)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position, with the settings that it depends on."""
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "seed": self._seed,
            **self._settings(),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Validate a position as `load_state_dict` does, without changes; resumes call it first.

        Returns:
            Notes for the resume: where the position among batches of another size goes on.
        """
        _, notes = self._batch_from(_checked(state))
        return notes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stored position. A stored seed that differs replaces this one, with a warning.

        A loader of several ranks goes on with batches of another size, too, at the first one
        without a sample that was taken; a warning says how many samples that leaves out.

        Raises:
            UsageError: not a position, or one inside an epoch that has another length, batch
                size or order here; with `batches_per_epoch`, any such difference unless the
                stored position is the very first. Nothing is changed then.
        """
        stored = _checked(state)
        batch, notes = self._batch_from(stored)
        for note in notes:
            logger.warning("the loader's position: %s", note)
        if stored["seed"] != self._seed:
            logger.warning(
                "the loader's seed is %d, the stored one %d: the stored one is used",
                self._seed,
                stored["seed"],
            )
        self._seed, self._epoch, self._batch = stored["seed"], stored["epoch"], batch
        self._generation += 1
        self._begun_epoch = -1

    def _rest(self) -> Iterator[Any]:
        epoch = self._begun_epoch = self._epoch
        yield from self._take(len(self) - self._batch)
        if self._epoch == epoch:  # otherwise a later iterator has ended it
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._epoch, self._batch = self._epoch + 1, 0

    def _take(self, count: int) -> Iterator[Any]:
        self._generation += 1
        generation = self._generation
        if not count:
            return
        if len(self.dataset) != self._num_samples:
            raise UsageError(
                f"the dataset had {self._num_samples} samples and now has {len(self.dataset)}: "
                "make a new loader"
            )
        self._check_group()
        self._plan.specs = self._specs(self._epoch, self._batch, count)
        batches = iter(self._batches)
        _iterators[batches] = os.getpid()
        for epoch, batch, samples in batches:
            self._epoch, self._batch = epoch, batch + 1
            yield samples
            if generation != self._generation:
                raise UsageError(
                    "this iterator of the loader has ended: another one began, or the position "
                    "was loaded; iterate over the loader anew"
                )

    def _specs(self, epoch: int, batch: int, count: int) -> Iterator[tuple[bytes, _BatchSpec]]:
        first = epoch * len(self) + batch
        order, ordered_lap = torch.empty(0), -1
        # Ranks draw differently. The first draws as a single one does.
        own = (self._ranks.rank,) if self._ranks.rank else ()
        for number in range(first, first + count):
            lap, place = divmod(number, self._batches_per_lap)
            if lap != ordered_lap:
                order, ordered_lap = self._order(lap), lap
            indices = order[place * self._batch_size : (place + 1) * self._batch_size].tolist()
            # Not derived from the epoch: batches do not depend on where epochs end.
            entropy = randomness.derive(self._seed, "batch", lap, place, *own)
            yield entropy, (*divmod(number, len(self)), self._ranks.part(indices))

    def _order(self, lap: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples)
        own = randomness.generator(randomness.derive(self._seed, "order", lap))
        return torch.randperm(self._num_samples, generator=own)

    def _settings(self) -> dict[str, int | bool]:
        settings: dict[str, int | bool] = {
            "num_samples": self._num_samples,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }
        if self._batches_per_epoch is not None:
            settings[_PER_EPOCH] = self._batches_per_epoch
        return settings

    def _batch_from(self, stored: Mapping[str, int]) -> tuple[int, list[str]]:
        """Return the batch to resume at, and notes on it.

        Settings may differ only at an epoch's start or end; the batch size may differ everywhere
        in whole laps of several ranks.
        """
        batch, settings = stored["batch"], self._settings()
        names = (*_SETTINGS, _PER_EPOCH)
        differing = [name for name in names if stored.get(name) != settings.get(name)]
        if not differing or stored["epoch"] == batch == 0:
            return batch, []
        are_laps = _PER_EPOCH not in stored and _PER_EPOCH not in settings
        if are_laps and batch == _epoch_length(stored):
            return len(self), []
        if batch and are_laps and differing == ["batch_size"] and not self._is_alone:
            return self._carry_on(stored)
        if batch or not are_laps:
            of_all = "" if self._is_alone else " (batch_size is that of all ranks together)"
            raise UsageError(
                f"the position is batch {batch} of epoch {stored['epoch']}, and means nothing in "
                f"an epoch of another shape{of_all}:\n"
                + listing(
                    f"{name}: stored {stored.get(name)}, here {settings.get(name)}"
                    for name in differing
                )
            )
        return batch, []

    def _carry_on(self, stored: Mapping[str, int]) -> tuple[int, list[str]]:
        """Return the first batch without a sample that was taken in batches of another size."""
        num_taken = stored["batch"] * stored["batch_size"]
        batch = min(-(-num_taken // self._batch_size), len(self))
        num_left_out = min(batch * self._batch_size, self._num_samples) - num_taken
        note = (
            f"a batch of all ranks was of {stored['batch_size']} samples and is of "
            f"{self._batch_size} here, so epoch {stored['epoch']} goes on at batch {batch} in "
            f"place of {stored['batch']}"
        )
        if num_left_out > 0:
            note += f", and {num_left_out} of its samples are left out"
        return batch, [note]

    def _check_group(self) -> None:
        """Raise `UsageError` if the process group is not that for which the loader was made."""
        if not self._follows_group:
            return
        present = present_ranks()
        group = DataRanks(present.rank, present.world_size)
        if group.world_size > 1 and not has_group() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the loader gives this process the part of rank %d of %d, as its launcher says, "
                "and there is no process group: where each process trains by itself, pass "
                "ranks=None",
                *group,
            )
        if group != self._ranks:
            made_for, now = (f"rank {ranks[0]} of {ranks[1]}" for ranks in (self._ranks, group))
            raise UsageError(
                f"the loader was made for {made_for}, but in the process group this is {now}: "
                "make the loader after the group, or give it `ranks`"
            )

    def _check_not_empty(self) -> None:
        if self._num_samples == 0:
            raise UsageError("the dataset is empty")
        if self._batches_per_lap == 0:
            num_ranks = self._ranks.world_size
            on_ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise UsageError(
                f"batch_size={self._batch_size // num_ranks}{on_ranks} with drop_last leaves no "
                f"batch of {self._num_samples} samples"
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

    def __getitem__(self, planned: tuple[bytes, _BatchSpec]) -> tuple[int, int, Any]:
        entropy, (epoch, batch, indices) = planned
        with randomness.seeded(entropy):
            return epoch, batch, self._collate_fn(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            return list(fetch_many(indices))
        return [self._dataset[index] for index in indices]


def _begin_worker(worker: int) -> None:
    _outlive_signals()
    threading.Thread(target=_end_with_training, name="holdfast-watch", daemon=True).start()


def _end_with_training() -> None:
    """End this worker when the training process has ended, in whatever way.

    torch's workers watch their parent, which with a fork server is another process, and only
    between two fetches.
    """
    training = multiprocessing.parent_process()
    assert training is not None, "a worker is a process of multiprocessing"
    multiprocessing.connection.wait([training.sentinel])
    os._exit(1)


def _outlive_signals() -> None:
    """Make this worker ignore signals that supervisors send to its whole process group.

    The signals are meant for the training process, which ends its workers itself. If a worker died
    of one, the training process would raise an error, at an arbitrary line.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)
    # A second signal comes from the training process, for a worker that hangs.
    signal.signal(signal.SIGTERM, _ignore_once)


def _end_workers() -> None:
    """Kill the workers of this process at its exit.

    multiprocessing would send each a single SIGTERM, which workers ignore (it may have been sent to
    the whole process group), and then wait for them forever.
    """
    ours = [batches for batches, pid in _iterators.items() if pid == os.getpid()]  # not a parent's
    workers = [worker for batches in ours for worker in getattr(batches, "_workers", ())]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for worker in workers:
        worker.kill()


# Runs before multiprocessing's own exit function, which its import above registered.
atexit.register(_end_workers)


def _ignore(number: int, frame: Any) -> None:
    """Ignore a signal, but not with SIG_IGN, which the worker's own children would inherit."""


def _ignore_once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)


def _identity(batch: Any) -> Any:
    return batch


def _num_batches(num_samples: int, batch_size: int, drop_last: bool) -> int:
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def _epoch_length(stored: Mapping[str, int]) -> int:
    num_batches = _num_batches(
        stored["num_samples"], stored["batch_size"], bool(stored["drop_last"])
    )
    return stored.get(_PER_EPOCH, num_batches) if num_batches else 0


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset has no position: give it state_dict and load_state_dict and put "
            "it into the state itself, or go forward with holdfast.data.skip"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"dataset={shown(dataset)} is a {type(dataset).__name__}: it must have __len__ and "
            "__getitem__"
        )


def _check_whole(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UsageError(f"{name}={value!r}: must be a whole number, {at_least} or above")


def _checked(state: Mapping[str, Any]) -> dict[str, int]:
    """Check types and ranges of the members of a stored position."""
    least = {"epoch": 0, "batch": 0, "seed": 0, "num_samples": 1, "batch_size": 1}
    if _PER_EPOCH in state:
        least[_PER_EPOCH] = 1
    if set(state) != {*least, *_SETTINGS}:
        raise UsageError(f"not the position of a Loader: it has {sorted(state)}")
    for name, at_least in least.items():
        _check_whole(f"stored {name}", state[name], at_least=at_least)
    for name in ("shuffle", "drop_last"):
        if not isinstance(state[name], bool):
            raise UsageError(f"stored {name}={state[name]!r}: must be true or false")
    num_batches = _epoch_length(state)
    if not 0 < num_batches >= state["batch"]:
        raise UsageError(f"stored batch={state['batch']}: its epoch has {num_batches} batches")
    return dict(state)
