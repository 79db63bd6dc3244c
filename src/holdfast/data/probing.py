"""Fresh copies of a source, to find out what its state leaves out and whether epochs reach it.

A copy shares nothing with the source but classes and functions, so reading it moves nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from holdfast.data import identity
from holdfast.data.foreign import set_epoch

_MAX_NBYTES = 64 * 2**20
"""Size above which a source is not copied: the check must cost little."""
_MAX_DEPTH = 5
_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType)


class FreshCopies:
    """A source before anything was read from it, from which copies are made."""

    def __init__(self, pickled: bytes, shared: list[Any]) -> None:
        self._pickled, self._shared = pickled, shared

    @classmethod
    def keep_source(cls, source: Any) -> FreshCopies | None:
        """Keep a source; None if it is large or cannot be copied, as one with an open socket."""
        file, shared = _Bounded(), list[Any]()
        try:
            _Pickler(file, shared).dump(source)
        except Exception:  # noqa: BLE001 - code of the source runs
            return None
        return cls(file.getvalue(), shared)

    def make_copy(self) -> Any:
        """Make a copy."""
        return _Unpickler(io.BytesIO(self._pickled), self._shared).load()


class Findings(NamedTuple):
    """Result of a check of a source."""

    is_inexact: bool
    """Whether its state has led to other samples than came next."""
    is_unreached: bool
    """Whether the number of the epoch matters inside of it, and does not get there."""


SetEpoch = Callable[[Any, int], None]


class Probe:
    """Check of a source by copies of it, while its first two blocks are read."""

    def __init__(
        self,
        read_first: Callable[[Any, Any, SetEpoch, int], list[Any]],
        epoch: int,
        fresh: FreshCopies,
        start: Any,
    ) -> None:
        """Begin at the place `start` of an epoch.

        `read_first` reads the first batch at a place from a copy, in an epoch that it is set to.
        """
        self._read_first, self._epoch = read_first, epoch
        self._fresh, self._start = fresh, start
        self._first = ""

    def compare_first_batch(self, block: int, place: Any, batch: list[Any]) -> Findings | None:
        """Compare the first batch of a block with that of a copy; None: nothing was found out."""
        if block > 1:
            return None
        try:
            found = identity.digest_sample(batch)
            if block == 0:
                self._first = found
                return None
            again = self._digest_first_sample(
                self._fresh.make_copy(), place, set_epoch, self._epoch
            )
            return Findings(found != again, self._is_unreached())
        except Exception:  # noqa: BLE001 - a copy need not work: code of the source runs
            return None

    def _is_unreached(self) -> bool:
        source, following = self._fresh.make_copy(), self._epoch + 1
        if not any(True for _ in _with_set_epoch(source)):
            return False
        if self._digest_first_sample(source, self._start, set_epoch, following) != self._first:
            return False
        inside = self._digest_first_sample(
            self._fresh.make_copy(), self._start, _set_inside, following
        )
        return inside != self._first

    def _digest_first_sample(self, source: Any, place: Any, setter: SetEpoch, epoch: int) -> str:
        return identity.digest_sample(self._read_first(source, place, setter, epoch))


def _set_inside(source: Any, epoch: int) -> None:
    for each in _with_set_epoch(source):
        each.set_epoch(epoch)


def _with_set_epoch(source: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the outermost objects inside of a source that have `set_epoch`."""
    inside = source.values() if isinstance(source, dict) else source
    if not isinstance(source, dict | list | tuple):
        inside = getattr(source, "__dict__", {}).values()
    for each in inside if depth < _MAX_DEPTH else ():
        if callable(getattr(each, "set_epoch", None)):
            yield each
        elif not isinstance(each, (*_SHARED, torch.Tensor, torch.nn.Module)):
            yield from _with_set_epoch(each, depth + 1)


class _Bounded(io.BytesIO):
    """File that takes `_MAX_NBYTES` at most."""

    @override
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MAX_NBYTES:
            raise ValueError("the source is large")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Keeps classes and functions, such as lambdas and those of a notebook, by reference."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self._shared = shared

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor | np.ndarray) and obj.nbytes > _MAX_NBYTES:
            raise ValueError("the source is large")
        if not isinstance(obj, _SHARED):
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]
