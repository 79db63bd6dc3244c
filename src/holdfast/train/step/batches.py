"""Batches of steps: of consecutive epochs, and shorter runs for trials.

A checkpoint after an epoch's last step must record that the epoch is over, so its end must be
detected as soon as its last batch was taken (tests/train/test_epochs.py).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.arguments import check_arguments
from holdfast.data import Loader, Stream
from holdfast.data.randomness import derive, preserved, seeded
from holdfast.errors import UsageError
from holdfast.saving.script_warnings import READ_AHEAD, TakenBatches, loaders
from holdfast.state.probing import digest_sample, hides_epochs, shows_content
from holdfast.train.argument_checks import check_range
from holdfast.train.step.undo import Boundary

logger = logging.getLogger("holdfast")

_END = object()


class Batches:
    """Takes the batches of steps from data whose iteration gives the rest of an epoch."""

    def __init__(self, data: Any, seed: int = 0, rank: int = 0) -> None:
        self._data, self._seed, self._rank = data, seed, rank
        self._epoch = 0
        self._num_windows = 0
        """Number of windows of the present iteration."""
        self._first_batch: tuple[int, str] | None = None
        """Epoch and digest of the first batch of an epoch."""
        self._compares_epochs = not isinstance(data, Loader | Stream | Overfit)
        self._rest: Iterator[Any] = iter(())
        self.own: list[Any] = []
        """Batches of the last window without those that are a neighbor's (`Loader.own_samples`),
        which count for that rank alone."""
        self._is_trusted = True
        self._is_warned = False
        self._loader = next((loader for _, loader in loaders({"data": data})), None)
        self._num_used, self._held = 0, [0, 0]
        """Batches that windows got, and those that a wrapper held after an epoch's first windows"""

    def start_iterating(self, epoch: int, *, is_new: bool = False) -> None:
        """Begin an iteration of the rest of an epoch, or of a new one."""
        if is_new and self._num_windows < 2:
            self._first_batch = None  # an epoch of one batch has no order
        self._epoch, self._num_windows = epoch, 0 if is_new else 2
        if self._loader is not None:
            self._num_used, self._held = self._loader.batches_taken.num_taken, []
        # Starting an iteration of torch's own loaders draws from the global generator: with workers
        # also the order, which must differ between epochs, and not between two of one epoch.
        with seeded(derive(self._seed, "iteration", epoch, self._rank)):
            self._rest = iter(self._data)

    def drop_iteration(self) -> None:
        """Drop the iteration and its data workers, which may take long to end."""
        self._rest = iter(())

    def take_window(self, size: int) -> list[Any]:
        """Take the next `size` batches at once, so that data is at a step's end between steps."""
        taken, self.own = [], []
        for batch in islice(self._rest, size):
            taken.append(batch)
            if getattr(self._data, "own_samples", None) != 0:
                self.own.append(batch)
        if self._compares_epochs and taken and not self._num_windows:
            self._compare_epochs(taken[0])
        self._num_windows += 1
        if self._loader is not None and len(self._held) < 2:
            self._warn_if_held(self._loader.batches_taken, len(taken))
        return taken

    def _compare_epochs(self, batch: Any) -> None:
        """Warn if the second epoch begins as the first, and a set number would change that."""
        before, self._first_batch = self._first_batch, (self._epoch, digest_sample(batch))
        if before is None or before[0] + 1 != self._epoch:
            return
        self._compares_epochs = False
        is_same = before[1] == self._first_batch[1] and shows_content(batch)
        if is_same and hides_epochs(self._data, self._epoch):
            logger.warning(
                "data: epochs %d and %d of this %s begin with the same batch: its set_epoch, or "
                "that of a sampler or dataset in it, is not called, or does not reach it. Use a "
                "holdfast.data.Loader, or a Stream of the source, which set the epoch themselves",
                before[0],
                self._epoch,
                type(self._data).__name__,
            )

    def _warn_if_held(self, taking: TakenBatches, num_taken: int) -> None:
        """Warn if a wrapper holds batches after two windows: it may drop later ones."""
        self._num_used += num_taken
        self._held.append(taking.num_taken - self._num_used)
        is_constant = len({*self._held}) == 1 or taking.is_by_other_thread
        if len(self._held) == 2 and min(self._held) > 0 and is_constant:
            self._loader = None
            logger.warning(
                "data: %d more batches were taken from the loader than were trained on%s",
                self._held[1],
                READ_AHEAD,
            )

    def is_epoch_over(self, num_taken: int) -> bool:
        """Whether the last batch of the epoch was taken.

        Judged by `at_epoch_end` of the data, or else by its length and the `num_taken` batches that
        were taken. If so, another batch is requested, so that the data ends the epoch. If there is
        one after all, the data's position is restored, a warning is logged, and neither sign is
        trusted again.
        """
        if not self._is_trusted or not self._says_end(num_taken):
            return False
        kept = Boundary(data=self._data, components={})
        if next(self._rest, _END) is _END:
            return True
        kept.restore_snapshot()
        self.start_iterating(self._epoch)
        self._is_trusted = False
        logger.warning(
            "data: the epoch did not end after %d batches, the length of the %s. What is "
            "counted in epochs may come a step late: len() must give the batches of a whole epoch",
            num_taken,
            type(self._data).__name__,
        )
        return False

    def warn_of_late_end(self, num_taken: int, step: int) -> None:
        """Warn, once, if an epoch's end is detected only after its last step."""
        if self._is_warned or not self._is_trusted:
            return
        if not hasattr(self._data, "at_epoch_end") and length_of(self._data) != num_taken:
            self._is_warned = True
            logger.warning(
                "data: the end of the epoch at step %d was noticed late, so what is counted in "
                "epochs (saves, validations) comes a step late: %s has neither at_epoch_end nor "
                "the length of an epoch in batches (docs/trainer.md)",
                step,
                type(self._data).__name__,
            )

    def _says_end(self, num_taken: int) -> bool:
        declared = getattr(self._data, "at_epoch_end", None)
        return bool(num_taken == length_of(self._data) if declared is None else declared)


@check_arguments(but=("train", "val"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a trial run. Lightning's names for them are in brackets.

    Trainer(…, limits=Limits(fast_dev_run=True))
    """

    train: int | float | None = None
    """Batches of an epoch, or a part of them such as 0.1 (`limit_train_batches`). The next epoch
    continues in the data where this one ended."""
    val: int | float | None = None
    """Batches of each validation loader, or a part of them (`limit_val_batches`); not of `test`."""
    overfit: int | None = None
    """Train on the first so many batches again and again (`overfit_batches`): a model that can
    learn brings their loss to about zero. They are kept in memory."""
    sanity: int = 0
    """Batches of each validation loader on which a validation is tried before a new run trains
    (`num_sanity_val_steps`). Leaves no trace: its metrics are dropped, callbacks are not called."""
    fast_dev_run: bool | int = False
    """Train on one batch (or so many), validate on as many, and save and log nothing; `start_from`
    and `load_best` of `fit` are ignored."""

    def __post_init__(self) -> None:
        for name in ("train", "val"):
            _check_part(name, getattr(self, name))
        if self.overfit is not None:
            check_range("limits: overfit", self.overfit, 1, 2**31)
        check_range("limits: sanity", self.sanity, 0, 2**31)
        if self.fast_dev_run is not False and self.fast_dev_run is not True:
            check_range("limits: fast_dev_run", self.fast_dev_run, 1, 2**31)
        given = [name for name in ("train", "val", "overfit", "sanity") if getattr(self, name)]
        if self.fast_dev_run and given:
            raise UsageError(
                f"limits: fast_dev_run={self.fast_dev_run} and {', '.join(given)}: it limits all "
                "of them itself"
            )
        if self.overfit is not None and self.train is not None:
            raise UsageError(
                f"limits: overfit={self.overfit} and train={self.train}: give only one"
            )

    @property
    def num_steps(self) -> int | None:
        """Steps of a `fast_dev_run`; None where the run goes to its goal."""
        return int(self.fast_dev_run) or None

    def of_data(self, data: Any) -> Any:
        """Return data that ends its epochs by these limits; it has its position, too."""
        if data is None:
            return None
        if self.overfit is not None:
            return Overfit(data, self.overfit)
        if self.train is None:
            return data
        return Limited(data, _count_batches("train", self.train, data))

    def of_validation(self, data: Any, size: int | None = None) -> Any:
        """Return validation loaders that give so many batches, or as many as these limits say."""
        if isinstance(data, Mapping):
            return {name: self.of_validation(loader, size) for name, loader in data.items()}
        limit = size or self.num_steps or self.val
        return data if limit is None else FirstBatches(data, _count_batches("val", limit, data))


class _ShortEpochs:
    """Data whose epochs have a given number of batches."""

    def __init__(self, data: Any, size: int) -> None:
        self._data = data
        self._size = size
        self._batch = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._size

    @property
    def at_epoch_end(self) -> bool:
        """Whether the epoch's last batch was taken, and no further one was requested."""
        return self._batch == self._size


class Limited(_ShortEpochs):
    """Data whose epochs have so many batches; each continues where the one before ended."""

    def __init__(self, data: Any, size: int) -> None:
        length = length_of(data)
        super().__init__(data, size if length is None else min(size, length))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch."""
        rest, is_new = iter(self._data), False
        while self._batch < self._size:
            batch = next(rest, _END)
            if batch is not _END:
                is_new = False
                self._batch += 1
                yield batch
            elif is_new:
                break  # no batch in a whole pass: the Trainer raises an error
            else:
                rest, is_new = iter(self._data), True
        self._batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: in the limited epoch, and in the data."""
        return {"limited": self._size, "batch": self._batch, "data": self._data.state_dict()}

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Check a position before anything is loaded; returns the notes of the data on it."""
        _check_saved(state, "limited", "train", self._size)
        check = getattr(self._data, "check_state_dict", None)
        return [] if check is None else check(state["data"]) or []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position."""
        _check_saved(state, "limited", "train", self._size)
        self._data.load_state_dict(state["data"])
        self._batch = state["batch"]


class FirstBatches:
    """The first batches of a loader; all other attributes are the loader's."""

    def __init__(self, loader: Any, size: int) -> None:
        self._loader = loader
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first batches."""
        return islice(iter(self._loader), self._size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class Overfit(_ShortEpochs):
    """The first batches of data, again and again in the same order."""

    def __init__(self, data: Any, size: int) -> None:
        super().__init__(data, size)
        self._start = data.state_dict()
        self._batches: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the batches."""
        if self._batches is None:
            with preserved():
                self._data.load_state_dict(self._start)
                self._batches = list(islice(iter(self._data), self._size))
            if len(self._batches) < self._size:
                raise UsageError(
                    f"limits: overfit={self._size}: an epoch of the data has only "
                    f"{len(self._batches)} batches"
                )
        while self._batch < self._size:
            self._batch += 1
            # A loss that changes a batch must not change it for the next epoch.
            yield copy.deepcopy(self._batches[self._batch - 1])
        self._batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position among the batches, and that in the data at which they begin."""
        return {"overfit": self._size, "batch": self._batch, "data": self._start}

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Check a position before anything is loaded; returns no notes."""
        _check_saved(state, "overfit", "overfit", self._size)
        return []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position."""
        _check_saved(state, "overfit", "overfit", self._size)
        if state["data"] != self._start:
            self._start, self._batches = state["data"], None
        self._batch = state["batch"]


def _check_saved(state: Mapping[str, Any], key: str, argument: str, size: int) -> None:
    if state.get(key) != size:
        found = f"{argument}={state[key]}" if key in state else "other limits, or none"
        raise UsageError(
            f"limits: {argument}={size}: the checkpoint was made with {found}; its position means "
            "something else. Give a trial a root of its own"
        )


def _check_part(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise UsageError(f"limits: {name}={value!r}: a part must be in (0, 1]")
        return
    check_range(f"limits: {name}", value, 1, 2**63)


def _count_batches(name: str, value: int | float, loader: Any) -> int:
    if isinstance(value, int):
        return value
    length = length_of(loader)
    if length is None:
        raise UsageError(
            f"limits: {name}={value!r}: a fraction needs a loader with a length; give a number "
            "of batches"
        )
    return max(1, math.floor(value * length))


def length_of(loader: Any) -> int | None:
    """Return the batches of a loader's epoch; None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
