"""The transfer of a state into images that stay until the next save, by one or several threads.

Copies are made in order; whoever writes waits for blocks. Those that overlap with training are
written block by block while others are still being made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import TypeAlias, cast

from holdfast.engine.staging.copying import Arrival, Piece, Work
from holdfast.engine.staging.image import Image
from holdfast.engine.staging.known import KnownFile
from holdfast.engine.workers import Workers
from holdfast.errors import DeadlineExceeded
from holdfast.state.copying import Shared

_Block: TypeAlias = tuple[str, int]
"""Name of a file and number of the block in it."""


class ImageTransfer:
    """Copies to be made at once, and such that may be made `later`, beside the training.

    Whoever has the later ones made holds their tensors until then.
    """

    def __init__(
        self,
        now: Sequence[Work],
        later: Sequence[Work],
        *,
        held: Sequence[object] = (),
        is_early: bool = False,
    ) -> None:
        """`held` is the memory from which the first are made by address, and what a device copies.
        It is let go when they are made; when not all are, a thread may still be at one."""
        self._held = held
        pieces = list(_cut(now))
        self._num_now = len(pieces)
        self._now: Iterator[Piece] = iter(pieces)
        # Cut by those who copy, and counted by the first of them: there are many, and training
        # waits for whoever makes this.
        self._later: Iterator[Piece] = Shared(_cut(later))
        self._works: Sequence[Work] = (*now, *later)
        self._left: dict[_Block, int] | None = None
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_staged = threading.Event()
        self._helpers: list[Future[None]] = []
        """Threads that take part in `copy`."""
        self.on_device = tuple(work.device_copy for work in later if isinstance(work, Arrival))
        """Those of the later copies that a device makes."""
        self.is_early = is_early
        self.waited_s = 0.0

    def copy(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        """See `Transfer.copy`."""
        for _ in range(min(num_helpers, self._num_now - 1)):
            self._helpers.append(workers.submit(self.help_now))
        self.run_now(timeout_s)

    def content(self, known: KnownFile) -> ImageContent:
        """See `Transfer.content`."""
        return ImageContent(cast(Image, known), self)

    def settle(self, timeout_s: float) -> None:
        """See `Transfer.settle`."""
        if wait(self._helpers, timeout=timeout_s).not_done:
            raise DeadlineExceeded(f"staging: a thread still copies after {timeout_s:.0f} s")

    def finish(self) -> None:
        """No-op: the copies themselves say when they are done."""

    def run_now(self, timeout_s: float) -> None:
        """Make the copies that training waits for, or what nobody else has made of them.

        Raises:
            DeadlineExceeded: another thread is still copying. Otherwise what a copy failed with.
        """
        began = time.perf_counter()
        self._run(self._now)
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._num_now, timeout_s)
            if self._error is not None:
                raise self._error
        if self._num_now:
            late = DeadlineExceeded(f"staging: not done after {timeout_s:.0f} s")
            self.fail(late)
            raise late
        self._held = ()
        self.waited_s = time.perf_counter() - began
        self._is_staged.set()

    def help_now(self) -> None:
        """Take part in them from another thread."""
        self._run(self._now)

    def wait_staged(self, timeout_s: float) -> None:
        """Block until training goes on.

        Raises:
            DeadlineExceeded: it was not in time.
        """
        if not self._is_staged.wait(timeout_s):
            raise DeadlineExceeded(f"staging: not done after {timeout_s:.0f} s")

    def run_later(self) -> None:
        """Take part in the others."""
        self._run(self._later, is_later=True)

    def fail(self, error: BaseException) -> None:
        """See `Transfer.fail`; whoever waits for a block gets the error."""
        with self._changed:
            self._error = self._error or error
            self._is_staged.set()
            self._changed.notify_all()

    def wait(self, image: Image, number: int, timeout_s: float) -> None:
        """Block until a block is staged.

        Raises:
            DeadlineExceeded: it was not in time. Otherwise what a copy failed with.
        """
        place = (image.file.name, number)
        with self._changed:
            is_known = self._changed.wait_for(
                lambda: self._error is not None or not self._pieces_left().get(place), timeout_s
            )
            if self._error is not None:
                raise self._error
        if not is_known:
            raise DeadlineExceeded(
                f"staging block {number} of {image.file.name}: not done after {timeout_s:.0f} s"
            )

    def _run(self, pieces: Iterator[Piece], *, is_later: bool = False) -> None:
        try:
            for piece in pieces:
                if self._error is not None:
                    raise self._error
                piece.copy()
                self._made(piece, is_later=is_later)
        except BaseException as error:
            self.fail(error)
            raise

    def _made(self, piece: Piece, *, is_later: bool) -> None:
        name = piece.image.file.name
        with self._changed:
            left = self._pieces_left()
            for number in piece.blocks:
                left[name, number] -= 1
            self._num_now -= not is_later
            # Many wait, and each wants a whole block, or all of them.
            if not self._num_now or not all(left[name, number] for number in piece.blocks):
                self._changed.notify_all()

    def _pieces_left(self) -> dict[_Block, int]:
        """How many pieces each block still waits for; for who holds the lock."""
        if self._left is None:
            self._left = {}
            for work in self._works:
                for number in work.blocks:
                    block = (work.image.file.name, number)
                    self._left[block] = self._left.get(block, 0) + 1
            self._works = ()
        return self._left


class ImageContent:
    """An image as the content of a file that is written while it is staged.

    Writing and hashing take memory and cores, so they come after the copy that training waits
    for; beside a copy that overlaps with training they take the blocks as they come, and so do they
    where the transfer is early: where training waits for the commit too, or where most of the copy
    is a comparison and there is little to write.
    """

    def __init__(self, image: Image, transfer: ImageTransfer) -> None:
        self._image = image
        self._transfer = transfer

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return self._image.file.nbytes

    def block(self, number: int, timeout_s: float) -> memoryview:
        """See `Content.block`."""
        if not self._transfer.is_early:
            self._transfer.wait_staged(timeout_s)
        self._transfer.wait(self._image, number, timeout_s)
        return self._image.block(number)

    def digest(self, number: int) -> bytes:
        """See `Content.digest`."""
        return self._image.digest(number)

    def written(self, number: int) -> None:
        """No-op: the memory stays."""

    def is_unchanged(self, timeout_s: float) -> bool:
        """See `StagedContent.is_unchanged`; the answer may come before the copy is done."""
        for number in range(len(self._image.digests)):
            self._transfer.wait(self._image, number, timeout_s)
            if self._image.differs:
                return False
        return True


def _cut(works: Sequence[Work]) -> Iterator[Piece]:
    return chain.from_iterable(work.pieces() for work in works)
