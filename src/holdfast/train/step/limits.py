"""Shorter runs for trials: a part of each epoch, the same few batches, or one batch of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.arguments import check_arguments
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.train.argument_checks import check_range

_END = object()


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
                f"limits: overfit={self.overfit} and train={self.train}: give one of the two"
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
        return data if limit is None else Head(data, _count_batches("val", limit, data))


class Limited:
    """Data whose epochs have so many batches; each continues where the one before ended."""

    def __init__(self, data: Any, size: int) -> None:
        self._data = data
        length = length_of(data)
        self._size = size if length is None else min(size, length)
        self._batch = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._size

    @property
    def at_epoch_end(self) -> bool:
        """Whether the epoch's last batch was taken, and no further one was requested."""
        return self._batch == self._size

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


class Head:
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


class Overfit:
    """The first batches of data, again and again in the same order."""

    def __init__(self, data: Any, size: int) -> None:
        self._data = data
        self._size = size
        self._start = data.state_dict()
        self._batch = 0
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._size

    @property
    def at_epoch_end(self) -> bool:
        """Whether the epoch's last batch was taken, and no further one was requested."""
        return self._batch == self._size

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
            f"limits: {name}={value!r}: a part of a loader without a length; give a number of "
            "batches"
        )
    return max(1, math.floor(value * length))


def length_of(loader: Any) -> int | None:
    """Return the batches of a loader's epoch; None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
