"""Base class of `Loader` and `Stream`: epochs, one iterator at a time, torch's DataLoader.

The position counts batches that were taken. A wrapper that holds one in hand has taken it too soon,
and an evaluation takes batches on which nothing is trained: `Taking` detects both. The DataLoader's
workers ignore signals to the process group, and end with the training process.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from holdfast.data.position import STEPS, describe_dataset
from holdfast.data.ranks import ALONE, DataRanks, HasRank, check_group, data_ranks
from holdfast.data.samplers import check_whole
from holdfast.errors import UsageError
from holdfast.system import signals_of

_iterators: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""torch's iterators with workers -> id of the process that started them."""


def kill_at_exit(batches: Any) -> None:
    """Have the workers of torch's iterator killed at this process's exit."""
    _iterators[batches] = os.getpid()


def begin_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a worker, and call the user's `worker_init_fn`."""
    _outlive_signals()
    threading.Thread(target=_end_with_training, name="holdfast-watch", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _end_with_training() -> None:
    """End this worker when the training process, not only its own parent, has ended."""
    training = multiprocessing.parent_process()
    assert training is not None, "a worker is a process of multiprocessing"
    multiprocessing.connection.wait([training.sentinel])
    os._exit(1)


def _outlive_signals() -> None:
    """Make this worker ignore signals to the process group, which are for the training process."""
    for number in signals_of("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(number, _ignore)
    # A second signal comes from the training process, for a worker that hangs.
    signal.signal(signal.SIGTERM, _ignore_once)


def _end_workers() -> None:
    """Kill the workers of this process at its exit: they ignore the SIGTERM that they would get."""
    ours = [batches for batches, pid in _iterators.items() if pid == os.getpid()]  # not a parent's
    workers = [worker for batches in ours for worker in getattr(batches, "_workers", ())]
    for number in signals_of("SIGCHLD") if workers else ():
        signal.signal(number, signal.SIG_DFL)  # torch's handler would raise
    for worker in workers:
        worker.kill()


# Runs before multiprocessing's own exit function, which its import above registered.
atexit.register(_end_workers)


def _ignore(number: int, frame: Any) -> None:
    """Ignore a signal, but not with SIG_IGN, which the worker's own children would inherit."""


def _ignore_once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)


class Taking:
    """Counts the batches that were taken since the position was loaded, and records the caller."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.num_evaluated = 0
        """Batches taken with gradients switched off, after others with them."""
        self.is_interrupted = False
        """Whether an iterator was left before its end."""
        self.has_begun = False
        """Whether any batch was asked for."""
        self._is_open = False
        self._caller: tuple[int, object] | None = None
        """Id and code of the frame that has asked for the last batch."""
        self._thread: int | None = None
        """Thread of that frame."""

    def start_iteration(self) -> None:
        """Record that a new iterator starts."""
        self.has_begun = True
        self.is_interrupted = self.is_interrupted or self._is_open
        self._is_open = False

    def count_batch(self) -> None:
        """Count a batch and record its caller; call it from the generator that yields the batch."""
        self._is_open = True
        if torch.is_grad_enabled():
            self.num_taken += 1
        elif self.num_taken:
            self.num_evaluated += 1
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_of_data(frame):
            frame = frame.f_back
        self._caller, self._thread = (id(frame), frame.f_code), threading.get_ident()

    def finish_iteration(self) -> None:
        """Record that an iterator is exhausted."""
        self._is_open = False

    @property
    def is_by_other_thread(self) -> bool:
        """Whether the last batch was taken in another thread than the current one."""
        return self._thread not in (None, threading.get_ident())

    @property
    def is_by_loop(self) -> bool:
        """Whether the loop, on the current stack, took the last batch itself, and no wrapper."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if (id(frame), frame.f_code) == self._caller:
                return True
            frame = frame.f_back
        return False


def _is_of_data(frame: FrameType) -> bool:
    """Whether a frame runs code of `holdfast.data`; code run by `exec` may have no `__name__`."""
    return str(frame.f_globals.get("__name__", "")).startswith(__package__)


logger = logging.getLogger("holdfast")
T = TypeVar("T")


class Reached(NamedTuple):
    """A position, after a batch."""

    epoch: int
    batch: int
    num_steps: int | None
    num_own: int | None
    inner: tuple[Any, ...]
    """Further members, which a subclass adds."""


@dataclass(slots=True)
class _Ahead:
    """Batches that a prefetcher has taken and not yielded."""

    begun: int
    """Number of the iterator that was alive before the prefetcher's."""
    yielded: Reached
    """Position after the last batch that it has yielded."""
    held: deque[Reached] = field(default_factory=deque)
    is_early: bool = False
    """Whether it took batches from an iterator that is older than this record."""
    thread: int = field(default_factory=threading.get_ident)
    is_threaded: bool = False

    def hold_batch(self, reached: Reached, generation: int) -> None:
        """Record a batch that was taken; may run in a thread of the prefetcher."""
        self.is_early = self.is_early or generation == self.begun
        self.is_threaded = self.is_threaded or threading.get_ident() != self.thread
        self.held.append(reached)


def _option(name: str) -> Any:
    """Make the read-only attribute of an option that torch's DataLoader keeps."""
    return property(lambda feed: getattr(feed._batches, name), doc=f"The argument `{name}`.")


class Feed(ABC):
    """Batches by epochs, whose position is two numbers and what a subclass adds to them.

    Has the attributes of torch's DataLoader that loops read.
    """

    _name: str
    """What messages call it."""
    _batches: DataLoader[Any]
    _collate_fn: Callable[[list[Any]], Any]
    _worker_init_fn: Callable[[int], None] | None

    num_workers = _option("num_workers")
    pin_memory = _option("pin_memory")
    timeout = _option("timeout")
    multiprocessing_context = _option("multiprocessing_context")
    prefetch_factor = _option("prefetch_factor")
    persistent_workers = _option("persistent_workers")
    generator = None

    def __init__(
        self,
        data: Any,
        *,
        seed: int,
        ranks: Literal["group"] | HasRank | None,
        fingerprint: str | None,
    ) -> None:
        given = data_ranks(ranks)
        self._ranks, self._is_alone = given or ALONE, given is None
        self._follows_group, self._has_warned = ranks == "group", False
        self._has_warned_of_thread = False
        self._given = data
        self._data, self._fingerprint = describe_dataset(data), fingerprint
        self._seed, self._epoch, self._batch = seed, 0, 0
        self._num_own: int | None = None
        self._num_steps: int | None = 0
        """Batches taken in all epochs; None if the position was saved by a loop without numbers."""
        self._is_numbered = False
        self._taking = Taking()
        self._ahead: _Ahead | None = None
        self._generation = 0
        """Number of the iterator that is alive."""
        self._begun_epoch = -1
        """Epoch that an iterator was made for since the position was loaded."""

    @property
    def dataset(self) -> Any:
        """The dataset or source."""
        return self._given

    @property
    def description(self) -> str:
        """Type of the data, with the hash or the names of files that it has."""
        return self._data

    @description.setter
    def description(self, text: str) -> None:
        """Set it to that of the first rank, as a hash of datasets may differ by process."""
        self._data = text

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """Samples of a batch, of each rank; None if a batch sampler decides."""

    @property
    @abstractmethod
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""

    @property
    def sampler(self) -> Any:
        """None, as a source has an order of its own."""
        return None

    @property
    def batch_sampler(self) -> Any:
        """None, too."""
        return None

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch of samples."""
        return self._collate_fn

    @property
    def worker_init_fn(self) -> Callable[[int], None] | None:
        """The function that is called in each worker at its start."""
        return self._worker_init_fn

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self._now.epoch

    @property
    def batch(self) -> int:
        """Number of batches, of all ranks, that the loop has taken of this epoch."""
        return self._now.batch

    @property
    def step(self) -> int | None:
        """Number of batches taken in all epochs, as `steps` counts; None if that is unknown."""
        return self._now.num_steps

    @property
    def own_samples(self) -> int | None:
        """Number of this rank's own samples in the last batch taken; None before the first one.

        0: fewer samples than ranks were left, and the batch is a neighbor's sample. Means and
        counts over all ranks must leave it out.
        """
        return self._now.num_own

    @property
    @abstractmethod
    def at_epoch_end(self) -> bool:
        """Whether the loop has taken the epoch's last batch and has not requested another."""

    @property
    def batches_taken(self) -> Taking:
        """Counts of the batches that were taken since the position was loaded."""
        return self._taking

    @property
    def ranks(self) -> DataRanks:
        """Rank of this process among those that share the data, and their number."""
        return self._ranks

    @property
    def seed(self) -> int:
        """The seed in use; after `load_state_dict`, the stored one."""
        return self._seed

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
        """
        check_whole("step", step, at_least=0)
        check_whole("start", start, at_least=0)
        check_whole("batches_per_step", batches_per_step, at_least=1)
        if start and self._epoch == self._batch == 0:
            logger.warning(
                "until(start=%d): the %s is at its very first batch; was it in the state "
                "that was resumed?",
                start,
                self._name,
            )
        return self._across(max(0, step - start) * batches_per_step)

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the numbers of the epochs that are left of `count`.

        The loop's body takes the rest of the epoch, as from `steps`. After a resume the first
        number is that of the epoch in which the position is.
        """
        check_whole("count", count, at_least=0)
        while True:
            if self.at_epoch_end and self._begun_epoch == self._epoch:
                self._end_epoch()
            if self._epoch >= count:
                return
            before = self._epoch, self._batch
            yield self._epoch
            if before == (self._epoch, self._batch):
                raise UsageError(
                    f"epochs({count}): the loop has read no batch in epoch {self._epoch}: iterate "
                    f"over the {self._name}, or over its steps(), inside it"
                )

    def steps(
        self, *, start: int | None = None, prefetcher: Iterable[Any] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Iterate over the rest of this epoch, as (step, batch); the run's first step is 1.

        Args:
            start: steps that are done already. None: those of the position.
            prefetcher: takes the batches and yields them later, as for `iterate_through`.

        Raises:
            UsageError: the position was saved by a loop without `steps`, and cannot tell.
        """
        if start is not None:
            check_whole("start", start, at_least=0)
            self._num_steps = start
        if self._num_steps is None:
            raise UsageError(
                f"steps(): the {self._name}'s position was saved by a loop without steps(), so "
                "the number of completed steps is unknown: use steps(start=found.step)"
            )
        self._is_numbered = True
        batches = self if prefetcher is None else self.iterate_through(prefetcher)
        return ((self.step or 0, batch) for batch in batches)

    def iterate_through(self, prefetcher: Iterable[T]) -> Iterator[T]:
        """Iterate over a prefetcher of this loader; the position counts the yielded batches.

        Batches that it has taken and not yielded are not lost at a resume or after a `break`. It
        must yield one item per batch, in order, and take none before it is iterated over.

        Raises:
            UsageError: it took batches earlier, or yielded more items than it took batches.
        """
        self._return_ahead()
        ahead = self._ahead = _Ahead(self._generation, self._now)
        is_done = False
        try:
            for item in prefetcher:
                if ahead is not self._ahead or ahead.is_early or not ahead.held:
                    raise UsageError(
                        f"iterate_through: the {self._name}'s position is unknown: this prefetcher "
                        "took batches before it was iterated over, yielded more items than it took "
                        "batches, or another iteration has started. Make it a generator function, "
                        "and pass a new generator"
                    )
                ahead.yielded = ahead.held.popleft()
                self._warn_of_thread(ahead)
                self._taking.count_batch()
                yield item
            is_done = ahead is self._ahead
        finally:
            if is_done:
                self._ahead = None
                self._taking.finish_iteration()
                if len(ahead.held) > 1:
                    logger.warning(
                        "iterate_through: the prefetcher took %d batches that it did not yield. It "
                        "must yield one item per batch, or a resume repeats some",
                        len(ahead.held),
                    )
            elif ahead is self._ahead:
                self._return_ahead()

    def _warn_of_thread(self, ahead: _Ahead) -> None:
        if ahead.is_threaded and not self.num_workers and not self._has_warned_of_thread:
            self._has_warned_of_thread = True
            logger.warning(
                "a prefetcher reads the %s in a thread, which seeds the global random generators "
                "for each batch. A resume is then not exact: pass num_workers=1 to the loader",
                self._name,
            )

    def _return_ahead(self) -> None:
        """Return to the position after the last yielded batch, if a prefetcher holds others."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._generation += 1
            self._begun_epoch = ahead.yielded.epoch
            self._set_reached(ahead.yielded)

    @property
    def _now(self) -> Reached:
        """The position after the last batch that the loop got."""
        return self._reached() if self._ahead is None else self._ahead.yielded

    def _reached(self) -> Reached:
        """Return the position after the last batch that was taken."""
        return Reached(self._epoch, self._batch, self._num_steps, self._num_own, ())

    def _set_reached(self, reached: Reached) -> None:
        self._epoch, self._batch, self._num_steps, self._num_own, _ = reached

    @abstractmethod
    def _across(self, count: int) -> Iterator[Any]:
        """Yield so many batches, across epochs."""

    @abstractmethod
    def _of_epoch(self) -> Iterator[Any]:
        """Yield the rest of the epoch."""

    def _rest(self) -> Iterator[Any]:
        epoch = self._begun_epoch = self._epoch
        yield from self._of_epoch()
        if self._epoch == epoch:  # otherwise a later iterator has ended it
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._epoch, self._batch = self._epoch + 1, 0

    def _count_batch(self) -> None:
        """Count a batch; call it from the generator that yields the batch."""
        if self._num_steps is not None:
            self._num_steps += 1
        if self._ahead is None:
            self._taking.count_batch()
        else:
            self._ahead.hold_batch(self._reached(), self._generation)

    def _infer_steps(self) -> int | None:
        """Return the number of batches taken in all epochs, if the position tells it."""
        return None if self._epoch else self._batch

    def _start_iterator(self) -> int:
        """End the iterator that is alive; return the number of the one that begins."""
        self._generation += 1
        self._taking.start_iteration()
        return self._generation

    def _expect_alive(self, generation: int) -> None:
        if generation != self._generation:
            raise UsageError(
                f"this iterator of the {self._name} has ended: another one was started, a loop "
                f"over iterate_through ended, or a position was loaded; iterate over it again"
            )

    def _check_group(self) -> None:
        if self._follows_group:
            self._has_warned = check_group(self._ranks, self._has_warned)

    def _move(self, stored: Mapping[str, Any], batch: int, notes: list[str]) -> None:
        """Go to a batch of the stored epoch, and end the iterator that is alive."""
        for note in notes:
            logger.warning("the %s's position: %s", self._name, note)
        if stored["seed"] != self._seed:
            logger.warning(
                "the %s's seed is %d, the stored one %d: the stored one is used",
                self._name,
                self._seed,
                stored["seed"],
            )
        self._seed, self._epoch, self._batch = stored["seed"], stored["epoch"], batch
        self._num_steps = stored.get(STEPS, self._infer_steps())
        self._is_numbered = STEPS in stored
        self._taking, self._ahead = Taking(), None
        self._generation += 1
        self._begun_epoch = -1

    def _position(self, now: Reached) -> dict[str, Any]:
        numbered = {STEPS: now.num_steps} if self._is_numbered else {}
        return {"epoch": now.epoch, "batch": now.batch, "seed": self._seed, **numbered}

    def _identity(self) -> dict[str, str]:
        named = {} if self._fingerprint is None else {"fingerprint": self._fingerprint}
        return {"data": self._data, **named}


def torch_loader(
    dataset: Any, worker_init_fn: Callable[[int], None] | None, **options: Any
) -> DataLoader[Any]:
    """Make torch's DataLoader of a dataset whose items are batches."""
    if options["timeout"] < 0:
        raise UsageError(f"timeout={options['timeout']}: must be zero or above, in seconds")
    try:
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            # A separate generator, because the start of an iteration draws from it.
            generator=torch.Generator(),
            worker_init_fn=partial(begin_worker, worker_init_fn),
            **options,
        )
    except (TypeError, ValueError) as error:  # its message names the option
        raise UsageError(f"torch's DataLoader: {error}") from error


def _as_it_is(batch: Any) -> Any:
    return batch
