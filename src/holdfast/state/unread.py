"""Stored tensors that are not read yet.

A load that copies into live tensors need not hold all stored ones at once: it plans with their
specs, and reads the bytes straight into their destination.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from holdfast.errors import OutOfMemory
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import TORCH_DTYPES


class TensorSource(Protocol):
    """Reader of the bytes of unread tensors."""

    def copy(self, pairs: Sequence[tuple[Tensor, Unread]]) -> None:
        """Read the second of each pair into the first, which has its shape and dtype.

        Raises:
            FormatError, StoreError: a tensor cannot be read; the first ones are undefined then.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unread:
    """A stored tensor that is not read yet."""

    source: TensorSource = field(repr=False)
    spec: TensorSpec
    file: str
    """The tensor file that holds it."""
    start: int
    """Offset of its first byte in the file before compression and encryption."""
    nbytes: int

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Allocate a tensor of its dtype and shape, with undefined values.

        Raises:
            OutOfMemory: the host lacks the memory for it.
        """
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

    def read(self) -> Tensor:
        """Read the tensor into new memory on the CPU.

        Raises:
            FormatError, StoreError: the tensor cannot be read.
        """
        values = self.empty()
        self.source.copy([(values, self)])
        return values


Stored: TypeAlias = Tensor | Unread
"""A stored tensor, in memory or not."""


def fetched(stored: Stored) -> Tensor:
    """Return a stored tensor in memory; reads it if it is unread.

    Raises:
        FormatError, StoreError: the tensor cannot be read.
    """
    return stored.read() if isinstance(stored, Unread) else stored


S_co = TypeVar("S_co", bound="Tensor | Unread", covariant=True)


class LazyTensors(Mapping[str, S_co]):
    """Stored tensors by key, whose objects are made on access."""

    @abstractmethod
    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, S_co]]:
        """Copy tensors in bulk into plain live ones; returns the pairs that are left to copy.

        The live tensors (see `copying.are_plain`) have the shapes and dtypes of the stored ones.
        `is_all`: no other tensors are copied in this load.

        Raises:
            FormatError, StoreError: a tensor cannot be read; the live ones are undefined then.
        """
        ...


class Fetching(Mapping[str, Tensor]):
    """Stored tensors by key, each of which is read on access."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        """Return the values of one tensor."""
        return fetched(self._tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
