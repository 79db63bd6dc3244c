"""Copying of a state, by several threads, into host memory that later saves reuse (images).

A copy task copies bytes by address, or a tensor by torch, or waits for a device. Tasks run in
order, and blocks are written while later ones are still being copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias, cast

from torch import Tensor
from typing_extensions import override

from holdfast.errors import DeadlineExceeded, time_limit
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.staging.arena import FileImage
from holdfast.staging.device import DeviceCopy, begin_copies
from holdfast.staging.interfaces import KnownFile, StagedContent, StagingTransfer
from holdfast.state.planning.copying import Shared, copy_runs, is_plain
from holdfast.threads.workers import Workers

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
    """Small contiguous host tensors of a file, copied in one call; kept from save to save."""

    def __init__(self, image: FileImage, places: Sequence[tuple[int, int]]) -> None:
        """`places`: each tensor's number in the file, and its number in the component."""
        self.image = image
        self.blocks = sorted({n for position, _ in places for n in image.blocks_of(position)})
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


_Block: TypeAlias = tuple[str, int]
"""Name of a file and number of a block in it."""


class ImageTransfer(StagingTransfer):
    """Copies a state into images; training waits for the `now` copies, not for the `later` ones.

    The caller keeps the tensors of the later copies alive until they are made.
    """

    def __init__(
        self,
        now: Sequence[Work],
        later: Sequence[Work],
        *,
        held: Sequence[object] = (),
        is_early: bool = False,
    ) -> None:
        """`held`: objects to keep alive: memory that `now` reads, and tensors on devices."""
        # Released when all are made, but kept after a failure: a thread may still be copying.
        self._held = held
        tasks = list(_chain_tasks(now))
        self._num_now = len(tasks)
        # A list iterator gives each item to one thread, under the lock of the interpreter.
        self._now: Iterator[CopyTask] = iter(tasks)
        # Planned and counted by the threads that copy: there are many, and training waits for
        # this constructor.
        self._later: Iterator[CopyTask] = Shared(_chain_tasks(later))
        self._works: Sequence[Work] = (*now, *later)
        self._num_missing: dict[_Block, int] | None = None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_staged = threading.Event()
        self._helpers: list[Future[None]] = []
        """Futures of the threads that help in `copy`."""
        self.on_device = tuple(work.device_copy for work in later if isinstance(work, Arrival))
        """Those of the later copies that devices make."""
        self.is_early = is_early
        self.waited_s = 0.0

    @override
    def run_copies(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        for _ in range(min(num_helpers, self._num_now - 1)):
            self._helpers.append(workers.submit(self.help_now))
        self.run_now(timeout_s)

    @override
    def content(self, known: KnownFile) -> ImageContent:
        return ImageContent(cast(FileImage, known), self)

    @override
    def wait_for_threads(self, timeout_s: float) -> None:
        if wait(self._helpers, timeout=timeout_s).not_done:
            raise DeadlineExceeded(f"staging: a thread still copies after {time_limit(timeout_s)}")

    @override
    def release_waiters(self) -> None:
        """No-op: each copy is counted when it is made."""

    def run_now(self, timeout_s: float) -> None:
        """Make the copies that training waits for, except those that other threads make."""
        began = time.perf_counter()
        self._run_copy_tasks(self._now)
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._num_now, timeout_s)
            if self._error is not None:
                raise self._error
        if self._num_now:
            late = DeadlineExceeded(f"staging: not done after {time_limit(timeout_s)}")
            self.cancel_copying(late)
            raise late
        self._held = ()
        self.waited_s = time.perf_counter() - began
        self._is_staged.set()

    def help_now(self) -> None:
        """Help, from another thread, to make the copies that training waits for."""
        self._run_copy_tasks(self._now)

    def wait_staged(self, timeout_s: float) -> None:
        """Block until the copies that training waits for are made, or a copy has failed."""
        if not self._is_staged.wait(timeout_s):
            raise DeadlineExceeded(f"staging: not done after {time_limit(timeout_s)}")

    def run_later(self) -> None:
        """Make the `later` copies, during training, except those that other threads make."""
        self._run_copy_tasks(self._later, is_later=True)

    @override
    def cancel_copying(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._is_staged.set()
            self._changed.notify_all()

    def wait_for_block(self, image: FileImage, number: int, timeout_s: float) -> None:
        """Wait until all copies into a block of an image are made."""
        place = (image.file.name, number)
        with self._changed:
            is_known = self._changed.wait_for(
                lambda: self._error is not None or not self._tasks_left().get(place), timeout_s
            )
            if self._error is not None:
                raise self._error
        if not is_known:
            raise DeadlineExceeded(
                f"staging block {number} of {image.file.name}: not done after "
                f"{time_limit(timeout_s)}"
            )

    def _run_copy_tasks(self, tasks: Iterator[CopyTask], *, is_later: bool = False) -> None:
        try:
            for task in tasks:
                if self._error is not None:
                    raise self._error
                task.copy()
                self._count_copy(task, is_later=is_later)
        except BaseException as error:
            self.cancel_copying(error)
            raise

    def _count_copy(self, task: CopyTask, *, is_later: bool) -> None:
        name = task.image.file.name
        with self._changed:
            left = self._tasks_left()
            for number in task.blocks:
                left[name, number] -= 1
            self._num_now -= not is_later
            # Woken only for a whole block, or for all: many threads wait, and each that wakes up
            # for nothing takes the lock from those that copy.
            if not self._num_now or not all(left[name, number] for number in task.blocks):
                self._changed.notify_all()

    def _tasks_left(self) -> dict[_Block, int]:
        """Return the number of copies missing from each block. The caller holds the lock."""
        if self._num_missing is None:
            self._num_missing = {}
            for work in self._works:
                for number in work.blocks:
                    block = (work.image.file.name, number)
                    self._num_missing[block] = self._num_missing.get(block, 0) + 1
            self._works = ()
        return self._num_missing


class ImageContent(StagedContent):
    """Content of a tensor file, written from its image while the image is being filled."""

    def __init__(self, image: FileImage, transfer: ImageTransfer) -> None:
        self._image = image
        self._transfer = transfer

    @property
    @override
    def nbytes(self) -> int:
        return self._image.file.nbytes

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        # Writing and hashing take memory bandwidth and cores, so they come after the copy that
        # training waits for. They do not where training waits for the commit too, nor where most of
        # the copy is a comparison and there is little to write.
        if not self._transfer.is_early:
            self._transfer.wait_staged(timeout_s)
        self._transfer.wait_for_block(self._image, number, timeout_s)
        return self._image.get_block_memory(number)

    @override
    def digest(self, number: int) -> bytes:
        return self._image.digest_block(number)

    @override
    def written(self, number: int) -> None:
        """No-op: the memory is not reused."""

    @override
    def is_unchanged(self, timeout_s: float) -> bool:
        # Without `wait_staged`: one block that differs is enough.
        for number in range(len(self._image.digests)):
            self._transfer.wait_for_block(self._image, number, timeout_s)
            if self._image.differs:
                return False
        return True


def _chain_tasks(works: Sequence[Work]) -> Iterator[CopyTask]:
    return chain.from_iterable(work.tasks() for work in works)
