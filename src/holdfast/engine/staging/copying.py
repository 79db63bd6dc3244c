"""The copies of which a staging consists: runs of bytes, other tensors, and copies by devices.

Knows how each is made, and which blocks it fills; `inmemory` knows when, and by which thread.
"""

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
"""The most bytes and tensors that are copied at once under the interpreter's lock: other threads of
Python wait some tenths of a millisecond."""


class Work(Protocol):
    """The copies of one or several tensors of a file."""

    image: Image

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks that they fill, in whole or in part; one entry for each copy."""
        ...

    def tasks(self) -> Iterable[CopyTask]:
        """The copies, in order."""
        ...


class CopyTask(Protocol):
    """A copy that one thread makes."""

    image: Image
    blocks: Sequence[int]
    """Numbers of the blocks that it fills, in whole or in part."""

    def copy(self) -> None:
        """Make the copy."""
        ...


@dataclass(slots=True)
class Bytes:
    """The copy of bytes of a contiguous tensor in host memory, inside one block."""

    image: Image
    key: str
    blocks: Sequence[int]
    start: int
    source: int
    nbytes: int

    def copy(self) -> None:
        """Copy the bytes, unless the image holds the same ones already."""
        self.image.update(self.key, self.blocks[0], self.start, self.source, self.nbytes)


@dataclass(slots=True)
class Whole:
    """The copy of a whole tensor by torch, from strides or from a device."""

    image: Image
    position: int
    blocks: Sequence[int]
    source: Tensor

    def copy(self) -> None:
        """Copy the tensor, without comparing."""
        self.image.overwrite(self.position, self.source)


class TensorCopy:
    """The copies of one tensor, from the address that it has when this is made."""

    __slots__ = ("_address", "_position", "_tensor", "image")

    def __init__(self, image: Image, position: int, tensor: Tensor) -> None:
        self.image = image
        self._position = position
        self._tensor = tensor
        # Now, and not when it is copied: until then training may give the tensor other memory.
        self._address = tensor.data_ptr() if is_plain(tensor) else None

    @property
    def storage(self) -> UntypedStorage | None:
        """The memory that is copied by address, to be kept alive; None where torch copies."""
        return None if self._address is None else self._tensor.untyped_storage()

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks in which the tensor lies."""
        return self.image.blocks_of(self._position)

    def tasks(self) -> Iterator[CopyTask]:
        """The copies: block by block where the tensor is a run of bytes, else one."""
        image, position = self.image, self._position
        if self._address is None:
            return iter((Whole(image, position, self.blocks, self._tensor),))
        return _bytes_of(image, position, self._address)


class Runs:
    """The copies of tensors of one file that are runs of bytes in host memory, by address."""

    def __init__(
        self, image: Image, places: Sequence[tuple[int, int]], addresses: Sequence[int]
    ) -> None:
        """`places` has for each its position in the file, and that of its address."""
        # Nothing is done for each tensor here: there are many, and training waits.
        self.image = image
        self._places = places
        self._addresses = addresses

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks, one for each copy."""
        return [n for position, _ in self._places for n in self.image.blocks_of(position)]

    def tasks(self) -> Iterator[CopyTask]:
        """The copies, block by block."""
        for position, number in self._places:
            yield from _bytes_of(self.image, position, self._addresses[number])


class SmallRuns:
    """Small tensors of one file that are runs of bytes in host memory, copied in one call.

    Kept from save to save with the addresses in the image, so that a save does nothing for each.
    """

    def __init__(self, image: Image, places: Sequence[tuple[int, int]]) -> None:
        """`places` has for each its position in the file, and that of its address."""
        self.image = image
        self.blocks = sorted({n for position, _ in places for n in image.blocks_of(position)})
        """Numbers of the blocks in which they lie."""
        self._targets = [image.address_of(position) for position, _ in places]
        self._sizes = [image.file.specs[position].nbytes for position, _ in places]
        self._numbers = [number for _, number in places]

    def copy(self, addresses: Sequence[int]) -> None:
        """Copy the tensors from the addresses that those of the component have now."""
        sources = map(addresses.__getitem__, self._numbers)
        copy_runs(self._targets, sources, self._sizes)


def small_runs_of(image: Image, places: Sequence[tuple[int, int]]) -> Iterator[SmallRuns]:
    """The small tensors at these places, in parts that one call may copy."""
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
        """Copy the tensors."""
        self._runs.copy(self._addresses)

    def tasks(self) -> Iterable[CopyTask]:
        """The one copy."""
        return (self,)


def _bytes_of(image: Image, position: int, address: int) -> Iterator[CopyTask]:
    """The copies of a run of bytes, block by block."""
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
    """The arrival in host memory of the tensors that one device copies on its own stream."""

    image: Image
    blocks: Sequence[int]
    device_copy: DeviceCopy

    def copy(self) -> None:
        """Wait for the device, which began before."""
        self.device_copy.arrive()
        self.device_copy.result()

    def tasks(self) -> Iterable[CopyTask]:
        """The one copy."""
        return (self,)


def arrivals_of(image: Image, sources: Mapping[int, Tensor]) -> list[Arrival]:
    """Begin to copy tensors, by position in the file, from CUDA devices into an image."""
    blocks = sorted({number for position in sources for number in image.blocks_of(position)})
    begun = begin_copies(image.overwritten_by_device(*pair) for pair in sources.items())
    return [Arrival(image, blocks, device_copy) for device_copy in begun]
