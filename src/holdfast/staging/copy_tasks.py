"""Copy tasks that stage a state: bytes by address, whole tensors by torch, copies by devices.

This module defines how each copy is made, and which blocks it fills; `inmemory` decides when, and
by which thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from holdfast.format.layout import BLOCK_NBYTES
from holdfast.staging.arena import FileImage
from holdfast.staging.device import DeviceCopy, begin_copies
from holdfast.state.planning.copying import copy_runs, is_plain

AT_ONCE_NBYTES = 1 << 20
AT_ONCE = 1024
"""Most bytes and tensors that are copied in one call under the interpreter's lock: other Python
threads wait for it some tenths of a millisecond."""


class Work(Protocol):
    """Planned copies of one or several tensors of a file, as copy tasks."""

    image: FileImage

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks that each copy fills, in whole or in part, copy by copy."""
        ...

    def tasks(self) -> Iterable[CopyTask]:
        """Yield the copies, in order."""
        ...


class CopyTask(Protocol):
    """A single copy into an image, made by one thread."""

    image: FileImage
    blocks: Sequence[int]
    """Numbers of the blocks that the copy fills, in whole or in part."""

    def copy(self) -> None:
        """Make the copy."""
        ...


@dataclass(slots=True)
class Bytes:
    """Copy of a contiguous host tensor's bytes that lie in one block."""

    image: FileImage
    key: str
    blocks: Sequence[int]
    start: int
    source: int
    nbytes: int

    def copy(self) -> None:
        """Copy the bytes, unless the image holds the same ones already."""
        self.image.update_block(self.key, self.blocks[0], self.start, self.source, self.nbytes)


@dataclass(slots=True)
class Whole:
    """Copy of a whole tensor by torch: one that is not contiguous, or on a device."""

    image: FileImage
    position: int
    blocks: Sequence[int]
    source: Tensor

    def copy(self) -> None:
        """Copy the tensor, without comparing."""
        self.image.overwrite(self.position, self.source)

    def tasks(self) -> Iterable[CopyTask]:
        """Return this object, the only copy."""
        return (self,)


def copy_of(image: FileImage, position: int, tensor: Tensor) -> Work:
    """Plan the copy of one tensor; one that is copied by address must be kept alive."""
    if is_plain(tensor):
        # Read now, not at the copy: until then training may give the tensor other memory.
        return Runs(image, [(position, 0)], [tensor.data_ptr()])
    return Whole(image, position, image.blocks_of(position), tensor)


class Runs:
    """Copies, by address, of several contiguous host tensors of one file."""

    def __init__(
        self, image: FileImage, places: Sequence[tuple[int, int]], addresses: Sequence[int]
    ) -> None:
        """`places`: each tensor's number in the file, and its number in `addresses`."""
        # Nothing is done for each tensor here: there are many, and training waits.
        self.image = image
        self._places = places
        self._addresses = addresses

    @property
    def blocks(self) -> Sequence[int]:
        """Numbers of the blocks that the copies fill, one for each copy."""
        return [n for position, _ in self._places for n in self.image.blocks_of(position)]

    def tasks(self) -> Iterator[CopyTask]:
        """Yield the copies, one for each block of each tensor."""
        for position, number in self._places:
            yield from _block_copies(self.image, position, self._addresses[number])


class SmallRuns:
    """Small contiguous host tensors of one file, copied in one call.

    Kept from save to save with their addresses in the image, so that a save does nothing for each.
    """

    def __init__(self, image: FileImage, places: Sequence[tuple[int, int]]) -> None:
        """`places`: each tensor's number in the file, and its number in the component."""
        self.image = image
        self.blocks = sorted({n for position, _ in places for n in image.blocks_of(position)})
        """Numbers of the blocks that the tensors lie in."""
        self._targets = [image.address_of(position) for position, _ in places]
        self._sizes = [image.file.specs[position].nbytes for position, _ in places]
        self._numbers = [number for _, number in places]

    def copy_tensors(self, addresses: Sequence[int]) -> None:
        """Copy the tensors; `addresses`: the current ones of all tensors of the component."""
        sources = map(addresses.__getitem__, self._numbers)
        copy_runs(self._targets, sources, self._sizes)


def small_runs_of(image: FileImage, places: Sequence[tuple[int, int]]) -> Iterator[SmallRuns]:
    """Split small tensors into groups, each small enough to be copied in one call."""
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
    """The copy of one group of small tensors in one save."""

    def __init__(self, runs: SmallRuns, addresses: Sequence[int]) -> None:
        self.image = runs.image
        self.blocks: Sequence[int] = runs.blocks
        self._runs = runs
        self._addresses = addresses

    def copy(self) -> None:
        """Copy the group's tensors in one call."""
        self._runs.copy_tensors(self._addresses)

    def tasks(self) -> Iterable[CopyTask]:
        """Return this object, the only copy."""
        return (self,)


def _block_copies(image: FileImage, position: int, address: int) -> Iterator[CopyTask]:
    """Yield the copies of a contiguous host tensor, one for each block."""
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
    """Copy task that waits for the tensors that a device copies to host memory on its stream."""

    image: FileImage
    blocks: Sequence[int]
    device_copy: DeviceCopy

    def copy(self) -> None:
        """Wait until the device has ended the copy, which is already under way."""
        self.device_copy.arrive()
        self.device_copy.result()

    def tasks(self) -> Iterable[CopyTask]:
        """Return this object, the only copy."""
        return (self,)


def arrivals_of(image: FileImage, sources: Mapping[int, Tensor]) -> list[Arrival]:
    """Begin copies of tensors, by number in the file, from CUDA devices; a task per device."""
    blocks = sorted({number for position in sources for number in image.blocks_of(position)})
    begun = begin_copies(image.overwritten_by_device(*pair) for pair in sources.items())
    return [Arrival(image, blocks, device_copy) for device_copy in begun]
