"""The copies of one staging: of runs of bytes, of tensors in other forms, and by devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, UntypedStorage

from holdfast.engine.staging.device import DeviceCopy, begin_copies
from holdfast.engine.staging.image import Image
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.state.copying import copy_runs, is_plain

AT_ONCE_NBYTES = 1 << 20
AT_ONCE = 1024
"""So many bytes and so many tensors are copied while other threads of Python wait; it takes some
tenths of a millisecond."""


class Work(Protocol):
    """Copies that are to be made, each block's in one of them."""

    image: Image

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks that they fill, or parts of them."""
        ...

    def pieces(self) -> Iterable[Piece]:
        """The copies."""
        ...


class Piece(Protocol):
    """A copy that is to be made."""

    image: Image
    blocks: Sequence[int]
    """Numbers of the blocks that it fills, or a part of them."""

    def copy(self) -> None:
        """Make it."""
        ...


@dataclass(slots=True)
class Bytes:
    """Bytes of a contiguous tensor in host memory, inside one block."""

    image: Image
    key: str
    blocks: Sequence[int]
    start: int
    source: int
    nbytes: int

    def copy(self) -> None:
        """See `Piece.copy`; bytes that are there already are left alone."""
        self.image.update(self.key, self.blocks[0], self.start, self.source, self.nbytes)


@dataclass(slots=True)
class Whole:
    """A tensor whose bytes have to be gathered, from strides or from a device."""

    image: Image
    position: int
    blocks: Sequence[int]
    source: Tensor

    def copy(self) -> None:
        """See `Piece.copy`."""
        self.image.overwrite(self.position, self.source)


class Source:
    """A tensor that is to be copied. Where it is, is settled when this is made."""

    __slots__ = ("_address", "_position", "_tensor", "image")

    def __init__(self, image: Image, position: int, tensor: Tensor) -> None:
        self.image = image
        self._position = position
        self._tensor = tensor
        self._address = tensor.data_ptr() if is_plain(tensor) else None

    @property
    def storage(self) -> UntypedStorage | None:
        """The memory that is copied from by address; None where it is not."""
        return None if self._address is None else self._tensor.untyped_storage()

    @property
    def blocks(self) -> Sequence[int]:
        """See `Work.blocks`."""
        return self.image.blocks_of(self._position)

    def pieces(self) -> Iterator[Piece]:
        """See `Work.pieces`; a run of bytes is copied block by block."""
        image, position = self.image, self._position
        if self._address is None:
            return iter((Whole(image, position, self.blocks, self._tensor),))
        return _bytes_of(image, position, self._address)


class Runs:
    """Tensors of one file that are runs of bytes in host memory, known by their addresses.

    Nothing is done for each of them by who makes this: there are many.
    """

    def __init__(
        self, image: Image, places: Sequence[tuple[int, int]], addresses: Sequence[int]
    ) -> None:
        """`places` has for each its position in the file, and that of its address."""
        self.image = image
        self._places = places
        self._addresses = addresses

    @property
    def blocks(self) -> Sequence[int]:
        """See `Work.blocks`."""
        return [n for position, _ in self._places for n in self.image.blocks_of(position)]

    def pieces(self) -> Iterator[Piece]:
        """See `Work.pieces`."""
        for position, number in self._places:
            yield from _bytes_of(self.image, position, self._addresses[number])


class SmallRuns:
    """Small tensors of one file that are runs of bytes in host memory: they are copied at once.

    What follows from where they go is kept, so that who makes a save does nothing for each.
    """

    def __init__(self, image: Image, places: Sequence[tuple[int, int]]) -> None:
        """`places` has for each its position in the file, and that of its address."""
        self.image = image
        self.blocks = sorted({n for position, _ in places for n in image.blocks_of(position)})
        """Numbers of the blocks in which they are."""
        self._targets = [image.address_of(position) for position, _ in places]
        self._sizes = [image.file.specs[position].nbytes for position, _ in places]
        self._numbers = [number for _, number in places]

    def copy(self, addresses: Sequence[int]) -> None:
        """Copy them from where they are now."""
        sources = map(addresses.__getitem__, self._numbers)
        copy_runs(self._targets, sources, self._sizes)


def small_runs_of(image: Image, places: Sequence[tuple[int, int]]) -> Iterator[SmallRuns]:
    """The small tensors at these places, in parts that may be copied at once."""
    specs, part, nbytes = image.file.specs, list[tuple[int, int]](), 0
    for place in places:
        part.append(place)
        nbytes += specs[place[0]].nbytes
        if nbytes >= AT_ONCE_NBYTES or len(part) == AT_ONCE:
            yield SmallRuns(image, part)
            part, nbytes = [], 0
    if part:
        yield SmallRuns(image, part)


class SmallCopy:
    """The copy of some small tensors of one save."""

    def __init__(self, runs: SmallRuns, addresses: Sequence[int]) -> None:
        self.image = runs.image
        self.blocks: Sequence[int] = runs.blocks
        self._runs = runs
        self._addresses = addresses

    def copy(self) -> None:
        """See `Piece.copy`."""
        self._runs.copy(self._addresses)

    def pieces(self) -> Iterable[Piece]:
        """See `Work.pieces`."""
        return (self,)


def _bytes_of(image: Image, position: int, address: int) -> Iterator[Piece]:
    """The copy of a run of bytes, block by block."""
    spec, start = image.file.specs[position], image.file.starts[position]
    offset, stop = address - start, start + spec.nbytes
    while start < stop:
        number = start // BLOCK_NBYTES
        until = min(stop, (number + 1) * BLOCK_NBYTES)
        blocks = range(number, number + 1)
        yield Bytes(image, spec.key, blocks, start, offset + start, until - start)
        start = until


@dataclass(slots=True)
class Arrival:
    """Tensors that a device copies, all at once."""

    image: Image
    blocks: Sequence[int]
    device_copy: DeviceCopy

    def copy(self) -> None:
        """See `Piece.copy`; it was begun before, and is waited for."""
        self.device_copy.arrive()
        self.device_copy.result()

    def pieces(self) -> Iterable[Piece]:
        """See `Work.pieces`."""
        return (self,)


def arrivals_of(image: Image, sources: Mapping[int, Tensor]) -> list[Arrival]:
    """Begin the copies that bring tensors, by position, from CUDA devices to their places."""
    blocks = sorted({number for position in sources for number in image.blocks_of(position)})
    begun = begin_copies(image.overwritten_by_device(*pair) for pair in sources.items())
    return [Arrival(image, blocks, device_copy) for device_copy in begun]
