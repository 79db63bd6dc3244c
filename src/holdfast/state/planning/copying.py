"""Stored tensors, in memory or not read yet, and copying them into live tensors.

A load that copies into live tensors need not hold all stored ones at once: it plans with their
specs, and reads the bytes straight into their destination.

Large tensors on the CPU are copied by several threads, the rest by torch: its own parallel copy
waits at barriers, also for threads that a busy machine has descheduled. For small tensors, making
tensor objects would cost more than the copy: bytes that are in memory already are copied by
address.
"""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from holdfast.errors import OutOfMemory, UsageError
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.system import C_LIBRARY

T = TypeVar("T")
S_co = TypeVar("S_co", bound="Tensor | UnreadTensor", covariant=True)
LARGE_NBYTES = 1 << 20
"""Tensors of this size and more are copied in pieces."""
PIECE_NBYTES = 4 << 20
"""Size of the pieces that threads copy."""

_PART_LENGTH = 512
_TYPES = frozenset({Tensor, Parameter})
_kind = attrgetter("is_cpu", "is_nested", "layout")
_PLAIN = (True, False, torch.strided)
_ODD = (Tensor.is_neg, Tensor.is_conj, Tensor.is_inference, Tensor._is_zerotensor)
_nbytes = attrgetter("nbytes")
# Through `ctypes.memmove` each call would offer the interpreter to the other threads, one of which
# keeps it for 5 ms.
_memmove = ctypes.PyDLL(C_LIBRARY).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


class TensorSource(Protocol):
    """Reader of the bytes of unread tensors."""

    def read_pairs(self, pairs: Sequence[tuple[Tensor, UnreadTensor]]) -> None:
        """Read the second of each pair into the first, which has its shape and dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnreadTensor:
    """A stored tensor that is not read yet."""

    source: TensorSource = field(repr=False)
    spec: TensorSpec
    file: str
    """The tensor file that holds it."""
    start: int
    """Offset of its first byte in the file before compression and encryption."""
    nbytes: int

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a tensor of its dtype and shape, with undefined values."""
        dtype = TORCH_DTYPES[self.spec.dtype]
        try:
            with torch.inference_mode(False):
                return torch.empty(self.spec.shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if torch.device(device).type != "cpu":
                raise  # torch.OutOfMemoryError, which training loops may handle
            raise OutOfMemory(
                f"{self.file}: {self.nbytes} bytes for one tensor cannot be allocated: {error}"
            ) from error

    def read_tensor(self) -> Tensor:
        """Read the tensor into new memory on the CPU."""
        values = self.empty()
        self.source.read_pairs([(values, self)])
        return values


Stored: TypeAlias = Tensor | UnreadTensor
"""A stored tensor, in memory or not."""
Pair: TypeAlias = tuple[Tensor, Tensor]
"""A live tensor and the tensor to copy into it; shape and dtype are equal."""
StoredPair: TypeAlias = tuple[Tensor, Stored]
"""A live tensor and a stored one to copy into it, which may be unread."""


def fetched(stored: Stored) -> Tensor:
    """Return a stored tensor in memory; reads it if it is unread."""
    return stored.read_tensor() if isinstance(stored, UnreadTensor) else stored


class LazyTensors(Mapping[str, S_co]):
    """Mapping from keys to stored tensors, whose Python objects are made on access."""

    @abstractmethod
    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, S_co]]:
        """Copy tensors in bulk into plain live ones; return pairs that the caller must copy."""
        ...


class Fetching(Mapping[str, Tensor]):
    """Mapping from keys to tensors, which reads unread ones on each access."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        """Return one tensor in memory; reads it if it is unread."""
        return fetched(self._tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def copy_tensors(pairs: Sequence[StoredPair]) -> None:
    """Copy the second of each pair into the first, and wait for copies to accelerators."""
    in_memory: list[Pair] = []
    unread: dict[TensorSource, list[tuple[Tensor, UnreadTensor]]] = {}
    for live, stored in pairs:
        if isinstance(stored, UnreadTensor):
            unread.setdefault(stored.source, []).append((live, stored))
        else:
            in_memory.append((live, stored))
    _copy_from_memory(in_memory)
    for source, of_source in unread.items():
        source.read_pairs(of_source)


def read_all(tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Return stored tensors in memory; unread ones are read together."""
    values = {
        key: stored.empty() if isinstance(stored, UnreadTensor) else stored
        for key, stored in tensors.items()
    }
    copy_tensors(
        [(values[key], stored) for key, stored in tensors.items() if values[key] is not stored]
    )
    return values


def _copy_from_memory(pairs: Sequence[Pair]) -> None:
    if not pairs:
        return
    large, others = _split_large(pairs)
    pieces = (piece for pair in large for piece in _pieces(*pair))
    with torch.no_grad(), _copying_in_threads(Shared(pieces)):
        _copy_by_torch(others)
    for live, _ in large:
        # Writes through numpy do not show autograd that a tensor has changed.
        torch.autograd.graph.increment_version(live)
    _synchronize({live.device for live, _ in others})


class Shared(Iterator[T]):
    """An iterator that several threads may advance; each item is returned to one of them."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __next__(self) -> T:
        """Return the next item to the calling thread."""
        with self._lock:
            return next(self._items)


@contextmanager
def _copying_in_threads(pieces: Shared[tuple[Any, Any]]) -> Iterator[None]:
    """Copy pieces in threads while the block runs, if any can start, and the rest after it."""
    helpers: list[threading.Thread] = []
    with suppress(RuntimeError):
        for _ in range(torch.get_num_threads() - 1):
            helper = threading.Thread(
                target=_copy_all, args=(pieces,), name="holdfast-copy", daemon=True
            )
            helper.start()
            helpers.append(helper)
    try:
        yield
        _copy_all(pieces)
    finally:
        for helper in helpers:
            helper.join()


def _copy_all(pieces: Shared[tuple[Any, Any]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)


def _split_large(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    large: list[Pair] = []
    others: list[Pair] = []
    for pair in pairs:
        is_large = pair[0].nbytes >= LARGE_NBYTES and all(is_plain(tensor) for tensor in pair)
        (large if is_large else others).append(pair)
    return large, others


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values are the bytes at its address, in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor's values are the writable bytes at its address, perhaps shared."""
    return (
        {*map(type, tensors)} <= _TYPES
        and {*map(_kind, tensors)} <= {_PLAIN}
        and all(map(Tensor.is_contiguous, tensors))
        and not any(any(map(is_odd, tensors)) for is_odd in _ODD)
    )


def copy_bytes(live: Sequence[Tensor], addresses: list[int], nbytes: list[int]) -> None:
    """Copy bytes into a plain tensor of `nbytes` bytes from each address, with the GIL held."""
    for some in slices_for_cache(len(live)):
        targets, counts = live[some], nbytes[some]
        if [*map(_nbytes, targets)] != counts:
            raise UsageError("a live tensor has another size than the bytes for it")
        torch.autograd.graph.increment_version(targets)
        copy_runs(map(Tensor.data_ptr, targets), addresses[some], counts)


def copy_runs(targets: Iterable[int], sources: Iterable[int], nbytes: Iterable[int]) -> None:
    """Copy small runs of bytes, with the GIL held: releasing it takes longer than a copy."""
    deque(map(_memmove, targets, sources, nbytes), maxlen=0)


def slices_for_cache(length: int) -> Iterator[slice]:
    """Yield slices of a list of `length` tensors, each short enough for the processor's cache."""
    return (slice(start, start + _PART_LENGTH) for start in range(0, length, _PART_LENGTH))


def _pieces(live: Tensor, stored: Tensor) -> Iterator[tuple[Any, Any]]:
    target, source = bytes_of(live), bytes_of(stored)
    for start in range(0, len(target), PIECE_NBYTES):
        yield target[start : start + PIECE_NBYTES], source[start : start + PIECE_NBYTES]


def bytes_of(tensor: Tensor) -> Any:
    """View the memory of a plain tensor as a numpy array of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _copy_by_torch(pairs: Sequence[Pair]) -> None:
    # `_foreach_copy_` raises for a view that negates or conjugates, after it wrote others.
    odd = [pair for pair in pairs if pair[0].is_neg() or pair[0].is_conj()]
    plain = (
        [pair for pair in pairs if not (pair[0].is_neg() or pair[0].is_conj())] if odd else pairs
    )
    if plain:
        live, stored = zip(*plain, strict=True)
        torch._foreach_copy_(list(live), list(stored), non_blocking=True)
    for view, values in odd:
        view.copy_(values)


def _synchronize(devices: Collection[torch.device]) -> None:
    """Wait for copies to accelerators, so that their sources may be freed."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
