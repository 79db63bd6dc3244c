"""Batches of an iterable source with an exact position, for sources that cannot be read by index.

A source is read in blocks, each under global generators seeded from (seed, epoch, worker, block):
one batch, or as many as are shuffled among each other. The position has the source's state from
before the present block, and how much of the block was taken. A resume reads the block again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from typing_extensions import override

from holdfast.arguments import check_arguments, shown
from holdfast.data import position, randomness
from holdfast.data.feed import Feed, Reached, kill_at_exit, torch_loader
from holdfast.data.position import changes_of_identity
from holdfast.data.ranks import DataRanks, HasRank
from holdfast.errors import UsageError, listing
from holdfast.state.foreign import describe_inexact, set_epoch, unrepeatable
from holdfast.state.probing import Findings, FreshCopies, Probe, digest_sample

logger = logging.getLogger("holdfast")


_INEXACT = (
    "the state_dict of the stream's source, a %s, is incomplete: a copy that loaded it returned "
    "different samples from those that came next, so a resume loses or repeats samples. Add what "
    'is missing, such as a buffer, or give the Stream resume="replay"; in place of a shuffle '
    "buffer give it shuffle="
)
_UNREACHED = (
    "the stream's source, a %s, gives the same samples in the same order in each epoch: the "
    "epoch's number does not reach an object inside of it that has set_epoch. Add a set_epoch to "
    "the source that calls that one"
)


class Stream(Feed):
    """Loader of an iterable source, whose position resumes exactly.

    Exact for a source whose `state_dict` and `load_state_dict` are exact for the samples that it
    gives, and for what it, or `collate_fn`, draws from the global generators of Python, NumPy and
    torch (CPU). The generators of the process are left as they were.

    Each epoch begins with the state that the source had when the Stream was made; of a source with
    `set_epoch`, it is called with the epoch's number first. An epoch ends where the source does.
    Loops, `until` and positions at the end of an epoch are as for a `Loader`.

    With several ranks each rank reads the whole stream, and takes its part of each batch. So the
    position is the same on all ranks, and any number of them can go on from it.
    """

    _name = "stream"

    @check_arguments()
    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: int = 0,
        drop_last: bool = False,
        resume: Literal["state", "replay"] = "state",
        ranks: Literal["group"] | HasRank | None = "group",
        fingerprint: str | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """Make a stream; options from `num_workers` on are those of torch's DataLoader.

        Args:
            source: gives samples each time it is iterated over. With workers it must divide itself
                among them, as datasets' IterableDataset does.
            batch_size: samples a batch, of each rank.
            seed: of the shuffle and of what a fetch draws, the same on all ranks; zero or above.
            shuffle: samples that are shuffled among each other, rounded up to whole batches; they
                are in memory, and a resume reads them again. 0: the source's own order.
            drop_last: leave out an epoch's last batch (of each worker) when it is not full.
            resume: "state": with the source's `state_dict` and `load_state_dict`; "replay": read
                the epoch again from its start, for sources without them. It takes that time, and
                is exact where the source gives the same samples again.
            ranks: as for a `Loader`.
            fingerprint: name of this very data; a resume with another one is refused.
        """
        _check_source(source, resume)
        for name, value, at_least in (
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
            ("shuffle", shuffle, 0),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", 1 if prefetch_factor is None else prefetch_factor, 1),
        ):
            if value < at_least:
                raise UsageError(f"{name}={value}: must be {at_least} or above")
        super().__init__(source, seed=seed, ranks=ranks, fingerprint=fingerprint)
        self._own_batch_size = batch_size
        self._collate_fn = collate_fn or default_collate
        self._worker_init_fn = worker_init_fn
        self._workers: list[_Place | None] = [None] * max(1, num_workers)
        """Of each worker, where it stands in the epoch; None: at its start."""
        self._next_worker = 0
        self._at_end = False
        self._findings = Findings(is_inexact=False, is_unreached=False)
        self._reader = _Reader(
            source=source,
            initial=None if resume == "replay" else _state_of(source),
            batch_size=batch_size * self._ranks.world_size,
            num_shuffled=shuffle,
            drop_last=drop_last,
            ranks=self._ranks,
            collate_fn=self._collate_fn,
        )
        self._settings = {
            position.VERSION: position.PRESENT_VERSION,
            "batch_size": self._reader.batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "resume": resume,
            "num_workers": num_workers,
        }
        self._batches = torch_loader(
            self._reader,
            worker_init_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
        )

    @property
    @override
    def at_epoch_end(self) -> bool:
        return self._at_end

    @property
    @override
    def batch_size(self) -> int:
        return self._own_batch_size

    @property
    @override
    def drop_last(self) -> bool:
        return bool(self._settings["drop_last"])

    @property
    def source(self) -> Any:
        """The source."""
        return self._given

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with the states of the source and the settings they depend on."""
        now = self._now
        workers, next_worker, at_end = now.inner
        if self._findings.is_inexact and now.batch and not at_end:
            logger.warning(_INEXACT, type(self.source).__name__)
            self._findings = self._findings._replace(is_inexact=False)
        return {
            **self._position(now),
            "next_worker": next_worker,
            "at_end": at_end,
            "workers": [None if place is None else place.stored() for place in workers],
            **self._identity(),
            **self._settings,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Validate a position as `load_state_dict` does, without changes; resumes call it first.

        Returns:
            Notes for the resume: what has changed in the source.
        """
        return self._parse_position(state)[1]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a stored position. A different stored seed replaces this one, with a warning."""
        places, notes = self._parse_position(state)
        self._move(state, state["batch"], notes)
        self._workers, self._at_end = places, state["at_end"]
        self._next_worker = state["next_worker"] if state["batch"] and not self._at_end else 0

    def _parse_position(self, state: Mapping[str, Any]) -> tuple[list[_Place | None], list[str]]:
        least = {"epoch": 0, "batch": 0, "seed": 0, "next_worker": 0}
        least |= {position.STEPS: 0} if position.STEPS in state else {}
        known = {*least, *self._settings, "at_end", "workers", "data", "fingerprint"}
        state = {position.VERSION: 1, **state}
        is_good = {*state, "fingerprint"} == known and all(
            type(state[name]) is int and state[name] >= bound for name, bound in least.items()
        )
        if not is_good or not isinstance(state["at_end"], bool):
            raise UsageError(f"not the position of a Stream: it has {sorted(state)}")
        notes = []
        if state["epoch"] or state["batch"]:
            notes = position.changes_of_version(state)
            notes += changes_of_identity(state, self._data, self._fingerprint)
        differing = [name for name in self._settings if state[name] != self._settings[name]]
        fresh: list[_Place | None] = [None] * len(self._workers)
        if state["at_end"] or not state["batch"]:
            return fresh, notes
        if differing:
            raise UsageError(
                f"the position is batch {state['batch']} of epoch {state['epoch']}, and "
                "cannot be resumed with other settings (batch_size is the sum over ranks):\n"
                + listing(
                    f"{name}: stored {state[name]}, here {self._settings[name]}"
                    for name in differing
                )
                + position.advice_for_version(state)
            )
        return [None if part is None else _Place.of(part) for part in state["workers"]], notes

    def _warn_of_epochs(self) -> None:
        if self._findings.is_unreached and not self._batch:
            logger.warning(_UNREACHED, type(self.source).__name__)
            self._findings = self._findings._replace(is_unreached=False)

    def _endless(self) -> Iterator[Any]:
        while True:
            had_some, epoch = bool(self._batch), self._epoch
            for batch in self:
                had_some = True
                yield batch
            if not had_some:
                raise UsageError(f"the source returns no batch in epoch {epoch}")

    @override
    def _across(self, count: int) -> Iterator[Any]:
        return islice(self._endless(), count)

    @override
    def _of_epoch(self) -> Iterator[Any]:
        return iter(()) if self._at_end else self._iterate_epoch()

    @override
    def _reached(self) -> Reached:
        inner = (*self._workers,), self._next_worker, self._at_end
        return super()._reached()._replace(inner=inner)

    @override
    def _set_reached(self, reached: Reached) -> None:
        super()._set_reached(reached)
        workers, self._next_worker, self._at_end = reached.inner
        self._workers = [*workers]

    @override
    def _end_epoch(self) -> None:
        super()._end_epoch()
        self._at_end = False
        self._workers, self._next_worker = [None] * len(self._workers), 0

    def _items(self, batches: Iterator[_Item | None]) -> Iterator[_Item]:
        for item in batches:
            if item is not None:
                findings = item[-1]
                if findings is not None:
                    self._findings, self._reader.is_checked = findings, True
                yield item

    def _iterate_epoch(self) -> Iterator[Any]:
        """Yield the rest of the epoch, reading one batch ahead to detect the last one."""
        generation = self._start_iterator()
        self._check_group()
        self._warn_of_epochs()
        self._reader.begin(self._seed, self._epoch, self._workers, self._next_worker)
        with randomness.preserved():
            batches = iter(self._batches)
        kill_at_exit(batches)
        items = self._items(batches)
        item = next(items, None)
        while item is not None:
            worker, num_own, samples, place, _ = item
            following = next(items, None)
            self._expect_alive(generation)
            self._workers[worker] = place
            self._next_worker = (worker + 1) % len(self._workers)
            self._batch += 1
            self._num_own = num_own
            self._at_end = following is None
            self._count_batch()
            yield samples
            self._expect_alive(generation)
            item = following
        self._taking.finish_iteration()


@dataclass(frozen=True)
class _Place:
    """Position of a worker in its epoch."""

    source: Any
    """State of the source before the present block; None: replayed from the epoch's start."""
    block: int
    taken: int
    """Samples of the block that were taken."""
    batch: int
    digest: str = ""
    """When replayed: of the first samples of the blocks so far, to see that they are the same."""

    @classmethod
    def of(cls, stored: Any) -> _Place:
        try:
            return cls(**stored)
        except TypeError:
            raise UsageError(f"not the position of a Stream: {shown(stored)}") from None

    def stored(self) -> dict[str, Any]:
        return {
            "source": deepcopy(self.source),
            "block": self.block,
            "taken": self.taken,
            "batch": self.batch,
            "digest": self.digest,
        }


_Item = tuple[int, int, Any, _Place, Findings | None]
"""Worker, number of own samples, batch, place after it, and what a check has found."""


class _Reader(IterableDataset[Any]):
    """Reads batches from a source, in this process or in a worker. Pickled to workers.

    Gives (worker, number of own samples, batch, place after it). For workers before the one whose
    turn is next, torch's round begins with None, so that the turns go on as they were.
    """

    def __init__(
        self,
        *,
        source: Any,
        initial: Any,
        batch_size: int,
        num_shuffled: int,
        drop_last: bool,
        ranks: DataRanks,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.batch_size = batch_size
        self._source, self._initial = source, initial
        self._num_shuffled, self._drop_last = num_shuffled, drop_last
        self._block_size = batch_size * max(1, -(-num_shuffled // batch_size))
        self._ranks, self._collate_fn = ranks, collate_fn
        self._seed, self.epoch, self._next_worker = 0, 0, 0
        self.is_checked = False
        self._places: list[_Place | None] = []

    def begin(self, seed: int, epoch: int, places: list[_Place | None], next_worker: int) -> None:
        """Set the position at which the next iteration begins."""
        self._seed, self.epoch = seed, epoch
        self._places, self._next_worker = [*places], next_worker

    def __iter__(self) -> Iterator[_Item | None]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if worker < self._next_worker:
            yield None
        place = self._places[worker] or _Place(deepcopy(self._initial), 0, 0, 0)
        probe = self._probe(worker, place)
        samples = self._opened(self._source, worker, place)
        while read := self._read(samples, worker, place.block, self._block_size):
            findings = None
            if probe is not None:
                findings = probe.compare_first_batch(place.block, place, read[: self.batch_size])
            block = self._shuffled(read, worker, place.block)
            after = self._state(), self._digest(place.digest, block)
            for start in range(place.taken, len(block), self.batch_size):
                part = block[start : start + self.batch_size]
                if self._drop_last and len(part) < self.batch_size:
                    return
                entropy = self._entropy("collate", worker, place.batch, self._ranks.rank)
                with randomness.seeded(entropy):
                    batch = self._collate_fn([*self._ranks.part(part)])
                taken, number = start + len(part), place.batch + 1
                if taken == len(block):
                    place = _Place(after[0], place.block + 1, 0, number, after[1])
                else:
                    place = replace(place, taken=taken, batch=number)
                yield worker, self._ranks.num_own(len(part)), batch, place, findings
                findings = None

    def _probe(self, worker: int, place: _Place) -> Probe | None:
        """Begin the check of the source, at the first epoch that is read from its start."""
        if self.is_checked or worker or place.block or place.taken:
            return None
        self.is_checked = True
        fresh = None if self._initial is None else FreshCopies.keep_source(self._source)
        return None if fresh is None else Probe(self.read_first, self.epoch, fresh, place)

    def read_first(
        self, source: Any, place: _Place, set_epoch: Callable[[Any, int], None], epoch: int
    ) -> list[Any]:
        """Return the first batch of a block, read from a copy of the source."""
        samples = self._opened(source, 0, place, set_epoch, epoch)
        return self._read(samples, 0, place.block, self.batch_size)

    def _opened(
        self,
        source: Any,
        worker: int,
        place: _Place,
        set_epoch: Callable[[Any, int], None] = set_epoch,
        epoch: int | None = None,
    ) -> Iterator[Any]:
        """Open the source at the beginning of the block that `place` lies in."""
        with randomness.seeded(self._entropy("open", worker)):
            set_epoch(source, self.epoch if epoch is None else epoch)
            if self._initial is not None:
                source.load_state_dict(deepcopy(place.source))
            samples: Iterator[Any] = iter(source)
        if self._initial is None:
            self._replay(samples, worker, place)
        return samples

    def _replay(self, samples: Iterator[Any], worker: int, place: _Place) -> None:
        """Read the samples taken so far again, and check that they are the same."""
        found = ""
        for number in range(place.block):
            read = self._read(samples, worker, number, self._block_size)
            found = self._digest(found, self._shuffled(read, worker, number))
        if found != place.digest:
            raise UsageError(
                f"the source returned different samples when epoch {self.epoch} was read again, so "
                "the position is meaningless: is it shuffled without a seed, or is it other data?"
            )

    def _read(self, samples: Iterator[Any], worker: int, number: int, count: int) -> list[Any]:
        with randomness.seeded(self._entropy("read", worker, number)):
            return list(islice(samples, count))

    def _shuffled(self, block: list[Any], worker: int, number: int) -> list[Any]:
        if not self._num_shuffled:
            return block
        own = randomness.generator(self._entropy("order", worker, number))
        return [block[place] for place in torch.randperm(len(block), generator=own).tolist()]

    def _digest(self, before: str, block: list[Any]) -> str:
        """Add the first sample of a block to the digest of a replayed epoch."""
        if self._initial is not None or not block:
            return before
        return digest_sample((before, block[0]))

    def _state(self) -> Any:
        return None if self._initial is None else _state_of(self._source)

    def _entropy(self, purpose: str, *numbers: int) -> bytes:
        return randomness.derive(self._seed, f"stream {purpose}", self.epoch, *numbers)


def _state_of(source: Any) -> Any:
    with randomness.preserved():
        return deepcopy(source.state_dict())


def _check_source(source: Any, resume: str) -> None:
    if not hasattr(source, "__iter__") or hasattr(source, "__next__"):
        raise UsageError(
            f"source={shown(source)} is a {type(source).__name__}: must be an object that gives "
            "its samples each time it is iterated over"
        )
    if getattr(source, "_distributed", None) is not None:
        raise UsageError(
            "source: it was divided by split_dataset_by_node, and the Stream gives each rank its "
            "part itself (ranks=): omit that"
        )
    inexact = unrepeatable(source) or (None if resume == "replay" else describe_inexact(source))
    if inexact is not None:
        raise UsageError(f"source: {inexact}")
    if resume == "replay":
        return
    if not hasattr(source, "state_dict") or not hasattr(source, "load_state_dict"):
        raise UsageError(
            f"source={shown(source)}: a {type(source).__name__} has no state_dict and "
            'load_state_dict. If it returns the same samples each time, pass resume="replay", '
            "which reads the epoch again up to the position"
        )
    try:
        inspect.signature(source.state_dict).bind()
    except TypeError:
        raise UsageError(
            f"source: the state_dict of {type(source).__name__} needs arguments, as for "
            "MosaicML's StreamingDataset: read it by index, with a Loader (docs/data.md)"
        ) from None
