"""Checks of a data source by reading copies: does its state resume it, does `set_epoch` reach it?

A copy shares nothing with the source but classes and functions, so reading it moves nothing.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import io
import logging
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from holdfast.state.foreign import set_epoch
from holdfast.state.generators import (
    global_generators,
    is_global,
    kind_of,
    read_generator_state,
    write_generator_state,
)

logger = logging.getLogger("holdfast")

_MAX_NBYTES = 64 * 2**20
"""Size above which a source is not copied: the check must cost little."""
MAX_FIRST_S = 2.0
"""Time for the first sample, in seconds, above which a copy is not read on: a save waits for it."""
_MAX_DEPTH = 5
_MAX_PARTS = 1000
"""Length above which a list or dict has samples, among which no `set_epoch` is looked for."""
_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType)
_PLAIN = (type, ModuleType, int, float, complex, str, bytes, type(None))
_FIXED = frozenset({bool, int, float, complex, str, bytes, tuple, type(None)})
"""Types of objects that nothing can move; most of a large source are of these."""
_END = object()


class FreshCopies:
    """A source before anything was read from it, from which copies are made."""

    def __init__(self, pickled: bytes, shared: list[Any]) -> None:
        self._pickled, self._shared = pickled, shared

    @classmethod
    def keep_source(cls, source: Any, others: Collection[int] = ()) -> FreshCopies | None:
        """Keep a source; None if it is large, cannot be copied, or has an object of `others`."""
        file, shared = _Bounded(), list[Any]()
        try:
            _Pickler(file, shared, others).dump(source)
        except Exception as error:  # noqa: BLE001 - code of the source runs
            logger.debug("the %s is not checked: %s", type(source).__name__, error)
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
            found = digest_sample(batch)
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
        return digest_sample(self._read_first(source, place, setter, epoch))


def _set_all(source: Any, epoch: int) -> None:
    set_epoch(source, epoch)
    _set_inside(source, epoch)


def _set_inside(source: Any, epoch: int) -> None:
    for each in _with_set_epoch(source):
        each.set_epoch(epoch)


def _with_set_epoch(source: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the outermost objects inside of a source that have `set_epoch`."""
    inside = source.values() if isinstance(source, dict) else source
    if not isinstance(source, dict | list | tuple):
        inside = getattr(source, "__dict__", {}).values()
    if depth == _MAX_DEPTH or len(inside) > _MAX_PARTS:
        return
    for each in inside:
        if callable(getattr(each, "set_epoch", None)):
            yield each
        elif not isinstance(each, (*_SHARED, torch.Tensor, torch.nn.Module)):
            yield from _with_set_epoch(each, depth + 1)


class SourceCheck:
    """Check of a component that gives data, by copies that are read and resumed."""

    def __init__(self, name: str, source: Any, others: Collection[int]) -> None:
        """Keep a source before it is read."""
        self._name, self._source = name, source
        self._fresh = FreshCopies.keep_source(source, others)
        self._is_inexact = False

    def find_faults(self) -> Iterator[str]:
        """Yield warnings, each once."""
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            try:
                self._is_inexact = _loses_samples(fresh)
                if _swallows_epochs(fresh):
                    yield SWALLOWED.format(self._name, type(self._source).__name__)
            except Exception as error:  # noqa: BLE001 - a copy need not work
                logger.debug("%s is not checked: %s", self._name, error)
        if self._is_inexact and _may_be_read(self._source):
            self._is_inexact = False
            yield INCOMPLETE.format(self._name, type(self._source).__name__)


INCOMPLETE = (
    "{}: the state_dict of this {} is incomplete: a copy that loaded it gave another sample than "
    "came next, so a resume within an epoch loses, repeats or changes samples. Add what is "
    "missing, such as a buffer or a generator, or use a holdfast.data.Loader, or a Stream with "
    "shuffle="
)
SWALLOWED = (
    "{}: set_epoch of this {} does not reach an object inside of it that has set_epoch, so each "
    "epoch has the same order. Let its set_epoch call that one"
)


def _loses_samples(fresh: FreshCopies) -> bool:
    """Whether a copy resumed after its first sample gives another one than came next."""
    with undisturbed_generators():
        began_s = time.monotonic()
        source = fresh.make_copy()
        samples = iter(source)
        first = digest_sample(next(samples))
        if time.monotonic() - began_s > MAX_FIRST_S:
            raise ValueError("its first sample takes long")
        state, before = deepcopy(source.state_dict()), _read_generators()
        second = _digest_next(samples)
        has_moved = digest_sample(source.state_dict()) != digest_sample(state)
        resumed = fresh.make_copy()
        resumed.load_state_dict(state)
        _write_generators(before)  # as a resume does
        found = _digest_next(iter(resumed))
    return bool(second) and found != second and (has_moved or found != first)


def _digest_next(samples: Iterator[Any]) -> str:
    sample = next(samples, _END)
    return "" if sample is _END else digest_sample(sample)


def _swallows_epochs(fresh: FreshCopies) -> bool:
    """Whether a source has set_epoch, and its order depends on that of an object inside only."""
    if not callable(getattr(fresh.make_copy(), "set_epoch", None)):
        return False
    orders = [
        _digest_order(fresh, setter, epoch)
        for setter, epoch in ((set_epoch, 0), (set_epoch, 1), (_set_inside, 1))
    ]
    return orders[0] == orders[1] != orders[2]


def hides_epochs(source: Any, epoch: int) -> bool:
    """Whether a source would give another order in the next epoch, if all in it had its number."""
    inside = [source, *_with_set_epoch(source)]
    found = [each for each in inside if callable(getattr(each, "set_epoch", None))]
    fresh = FreshCopies.keep_source(source) if found else None
    if fresh is None:
        return any(getattr(each, "shuffle", False) is True for each in found)
    try:
        orders = [_digest_order(fresh, _set_all, number) for number in (epoch, epoch + 1)]
    except Exception as error:  # noqa: BLE001 - a copy need not work
        logger.debug("the %s is not checked: %s", type(source).__name__, error)
        return False
    return orders[0] != orders[1]


def _digest_order(fresh: FreshCopies, setter: SetEpoch, epoch: int) -> str:
    """Digest the first samples of a copy, in an epoch that it is set to."""
    with undisturbed_generators():
        source = fresh.make_copy()
        setter(source, epoch)
        return digest_sample([*islice(iter(source), 2)])


@contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Restore the global generators after the block."""
    before = _read_generators()
    try:
        yield
    finally:
        _write_generators(before)


def _read_generators() -> list[tuple[Any, dict[str, Any]]]:
    known = global_generators()
    live = [known["python"], known["numpy"], known["torch"]]
    live += [one for several in known["devices"].values() for one in several]
    return [(one, read_generator_state(one)[1]) for one in live]


def _write_generators(states: list[tuple[Any, dict[str, Any]]]) -> None:
    for one, state in states:
        write_generator_state(one, state)


def _may_be_read(source: Any) -> bool:
    """Whether an iterator of a source may be under way; at an epoch's end, buffers are empty."""
    code = getattr(type(source).__iter__, "__code__", None)
    if code is None or not code.co_flags & inspect.CO_GENERATOR:
        return True
    referrers = gc.get_referrers(source)  # Python 3.10: its frame, later versions: the generator
    return any(getattr(one, "gi_code", getattr(one, "f_code", None)) is code for one in referrers)


def digest_sample(sample: Any) -> str:
    """Return a digest of a sample's numbers, texts and bytes; of other objects of their types."""
    found = hashlib.blake2b(digest_size=8)
    for part in _encode_parts(sample):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _encode_parts(value: Any) -> Iterator[bytes]:
    yield type(value).__qualname__.encode()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _encode_parts(key)
            yield from _encode_parts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _encode_parts(inner)
    elif isinstance(value, torch.Tensor):
        with suppress(RuntimeError):  # of the device meta, or nested without a layout of its own
            for part in _dense_parts(value.detach()):
                yield bytes(part.cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield value.tobytes()
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield value if isinstance(value, bytes) else repr(value).encode()


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.layout is torch.strided:
        yield tensor.resolve_conj()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor.coalesce().indices(), tensor.coalesce().values())
    else:  # compressed or jagged
        yield tensor.values()


def shows_content(sample: Any) -> bool:
    """Whether a digest of a sample depends on more than the types in it."""
    if isinstance(sample, Mapping):
        return any(map(shows_content, sample.values()))
    if isinstance(sample, list | tuple):
        return any(map(shows_content, sample))
    return isinstance(sample, torch.Tensor | np.ndarray | str | bytes | int | float | complex)


class _Bounded(io.BytesIO):
    """File that takes `_MAX_NBYTES` at most."""

    @override
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MAX_NBYTES:
            raise ValueError("the source is large")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Keeps classes and functions, such as lambdas and those of a notebook, by reference."""

    def __init__(self, file: io.BytesIO, shared: list[Any], others: Collection[int]) -> None:
        super().__init__(file, protocol=5)
        self._shared, self._others = shared, others

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, DataLoader) or not obj.num_workers:
            return NotImplemented
        # Copies start no processes.
        alone = {"num_workers": 0, "timeout": 0, "prefetch_factor": None, "_iterator": None}
        return _build, (type(obj), {**vars(obj), **alone})

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) in _FIXED:
            return None
        if isinstance(obj, torch.Tensor | np.ndarray) and obj.nbytes > _MAX_NBYTES:
            raise ValueError("the source is large")
        is_elsewhere = id(obj) in self._others and not isinstance(obj, (*_PLAIN, tuple))
        if is_elsewhere or (kind_of(obj) is not None and is_global(obj)):
            raise ValueError(f"it shares a {type(obj).__name__} with the rest of the state")
        if not isinstance(obj, _SHARED):
            return None
        if _holds_live(obj):
            raise ValueError(f"its function {obj.__qualname__} keeps objects")
        self._shared.append(obj)
        return len(self._shared) - 1


def _build(kind: type[Any], attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def _holds_live(function: Any) -> bool:
    """Whether a function may move objects that a copy of it would share."""
    if isinstance(function, BuiltinFunctionType):
        owner = function.__self__
        return not (isinstance(owner, _PLAIN) or is_global(owner))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return any(
        _holds_live(one) if isinstance(one, _SHARED) else not isinstance(one, _PLAIN)
        for one in cells
    )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]
