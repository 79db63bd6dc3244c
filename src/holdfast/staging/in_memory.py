"""Copying of a state, by several threads, into host memory that later saves reuse (images).

Copies are made in order, and the writing thread waits for each block: so blocks are written while
later ones are still being copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import TypeAlias, cast

from typing_extensions import override

from holdfast.errors import DeadlineExceeded, time_limit
from holdfast.staging.arena import FileImage
from holdfast.staging.copy_tasks import Arrival, CopyTask, Work
from holdfast.staging.interfaces import KnownFile, StagedContent, StagingTransfer
from holdfast.state.planning.copying import Shared
from holdfast.threads.workers import Workers

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
