"""Stored tensors whose bytes are still where they were saved.

A load that copies into live tensors need not hold them all at once: it works with what is known of
them, and the bytes come when there is a place for them.
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


class Source(Protocol):
    """Where the bytes of unread tensors come from."""

    def copy(self, pairs: Sequence[tuple[Tensor, Unread]]) -> None:
        """Read the second of each pair into the first, which has its shape and dtype.

        Raises:
            FormatError, StoreError: it cannot be read; the first ones are undefined then.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unread:
    """A stored tensor that is yet to be read."""

    source: Source = field(repr=False)
    spec: TensorSpec
    file: str
    """The tensor file in which it lies."""
    start: int
    """Its first byte there, as if the file were stored plainly."""
    nbytes: int

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """A tensor of its dtype and shape; what is in it is undefined.

        Raises:
            OutOfMemory: the host has not the memory for it.
        """
        dtype = TORCH_DTYPES[self.spec.dtype]
        try:
            with torch.inference_mode(False):
                return torch.empty(self.spec.shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if torch.device(device).type != "cpu":
                raise  # torch.OutOfMemoryError, which training loops know
            raise OutOfMemory(
                f"{self.file}: {self.nbytes} bytes of memory for one tensor are not to be had: "
                f"{error}"
            ) from error

    def read(self) -> Tensor:
        """Its values, in memory of their own on the CPU.

        Raises:
            FormatError, StoreError: they cannot be read.
        """
        values = self.empty()
        self.source.copy([(values, self)])
        return values


Stored: TypeAlias = Tensor | Unread
"""A stored tensor, in memory or not."""


def fetched(stored: Stored) -> Tensor:
    """The values of a stored tensor, read now where they were not.

    Raises:
        FormatError, StoreError: they cannot be read.
    """
    return stored.read() if isinstance(stored, Unread) else stored


S_co = TypeVar("S_co", bound="Tensor | Unread", covariant=True)


class Table(Mapping[str, S_co]):
    """Many stored tensors by key, of which none is made before it is asked for."""

    @abstractmethod
    def copy_into(
        self, live: Sequence[Tensor], keys: Sequence[str], *, is_all: bool
    ) -> list[tuple[Tensor, S_co]]:
        """Copy those of these keys into plain live tensors (see `copying.are_plain`), which have
        their shapes and dtypes, as far as that is done best for many at once; what is left.

        `is_all` says that no others of the table are copied besides.

        Raises:
            FormatError, StoreError: one cannot be read; the live ones are undefined then.
        """
        ...


class Fetching(Mapping[str, Tensor]):
    """Stored tensors by key; each is read when it is asked for."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> Tensor:
        """The values of one."""
        return fetched(self._tensors[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
