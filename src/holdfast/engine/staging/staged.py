"""The host copy of one state, as those who write it see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from holdfast.engine.staging.content import Content
from holdfast.engine.staging.copying import Copying
from holdfast.engine.staging.device import DeviceCopy
from holdfast.engine.staging.image import Image
from holdfast.engine.staging.known import KnownFile
from holdfast.engine.workers import Workers, gather
from holdfast.errors import DeadlineExceeded
from holdfast.format.layout import tree_file


@dataclass(frozen=True, kw_only=True)
class Staged(ABC):
    """Tensor files whose blocks come to be while they are written, and the trees as bytes."""

    files: Mapping[str, tuple[KnownFile, ...]]
    """The tensor files of each component."""
    trees: Mapping[str, bytes]
    kinds: Mapping[str, str]
    is_early: bool
    """Whether blocks are written beside the copies that training waits for."""

    @property
    def all_files(self) -> list[KnownFile]:
        """The tensor files of all components; those that hardly change come last."""
        found = [known for files in self.files.values() for known in files]
        return sorted(found, key=lambda known: known.is_apart)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file but the index."""
        tensors = {known.file.name: known.file.nbytes for known in self.all_files}
        return tensors | {tree_file(name): len(tree) for name, tree in self.trees.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the index."""
        return sum(self.sizes.values())

    @property
    @abstractmethod
    def now_s(self) -> float:
        """Seconds that training waited for copies."""

    @abstractmethod
    def copy(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        """Return when training may go on.

        Raises:
            DeadlineExceeded: it was not in time. Otherwise what a copy failed with.
        """

    @abstractmethod
    def content(self, known: KnownFile, timeout_s: float) -> Content:
        """One of the files, to be written."""

    @abstractmethod
    def is_unchanged(self, known: KnownFile, timeout_s: float) -> bool:
        """Whether no block was seen to differ from what the last commit had."""

    @abstractmethod
    def digest(self, known: KnownFile, workers: Workers, timeout_s: float) -> bytes:
        """The digests of all blocks of a file, without writing it."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Training goes on although not everything was copied: nothing more is, and the save of it
        fails with `error`. What is being copied right now is waited for."""

    @abstractmethod
    def settle(self, timeout_s: float) -> None:
        """Wait until no thread copies for it any more.

        Raises:
            DeadlineExceeded: one still does after `timeout_s` seconds.
        """

    @abstractmethod
    def finish(self) -> None:
        """Whatever the save wanted of the live state was copied, or the save has ended."""


@dataclass(frozen=True, kw_only=True)
class StagedInMemory(Staged):
    """A whole copy, in images that stay until the next save."""

    copying: Copying
    on_device: tuple[DeviceCopy, ...] = ()
    """Those of the copies beside training that a device makes."""
    helpers: list[Future[None]] = field(default_factory=list)
    """Threads that take part in `copy`."""

    @property
    def now_s(self) -> float:
        """See `Staged.now_s`."""
        return self.copying.now_s

    def copy(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        """See `Staged.copy`."""
        for _ in range(min(num_helpers, self.copying.num_now - 1)):
            self.helpers.append(workers.submit(self.copying.help_now))
        self.copying.run_now(timeout_s)

    def content(self, known: KnownFile, timeout_s: float) -> Content:
        """See `Staged.content`."""
        return _ImageContent(_image(known), self.copying, is_early=self.is_early)

    def is_unchanged(self, known: KnownFile, timeout_s: float) -> bool:
        """See `Staged.is_unchanged`; the answer may come before the copy is done."""
        for number in range(len(known.digests)):
            self.copying.wait(_image(known), number, timeout_s)
            if known.differs:
                return False
        return True

    def digest(self, known: KnownFile, workers: Workers, timeout_s: float) -> bytes:
        """See `Staged.digest`."""
        content = self.content(known, timeout_s)
        for number in range(len(known.digests)):
            content.block(number, timeout_s)
        unknown = [number for number, digest in enumerate(known.digests) if digest is None]
        jobs = [workers.submit(partial(content.digest, number)) for number in unknown]
        gather(jobs, timeout_s=timeout_s, what=f"digest of {known.file.name}")
        return known.all_digests()

    def fail(self, error: BaseException) -> None:
        """See `Staged.fail`."""
        self.copying.fail(error)

    def settle(self, timeout_s: float) -> None:
        """See `Staged.settle`."""
        if wait(self.helpers, timeout=timeout_s).not_done:
            raise DeadlineExceeded(f"staging: a thread still copies after {timeout_s:.0f} s")

    def finish(self) -> None:
        """See `Staged.finish`; who copies knows best."""


class _ImageContent:
    """An image as the content of a file that is written while it is staged.

    Writing and hashing take memory and cores, so they come after the copy that training waits
    for; beside a copy that overlaps with training they take the blocks as they come, and so do they
    with `is_early`: where training waits for the commit too, or where most of the copy is a
    comparison and there is little to write.
    """

    def __init__(self, image: Image, copying: Copying, *, is_early: bool) -> None:
        self._image = image
        self._copying = copying
        self._is_early = is_early

    @property
    def nbytes(self) -> int:
        """See `Content.nbytes`."""
        return self._image.file.nbytes

    def block(self, number: int, timeout_s: float) -> memoryview:
        """See `Content.block`."""
        if not self._is_early:
            self._copying.wait_staged(timeout_s)
        self._copying.wait(self._image, number, timeout_s)
        return self._image.block(number)

    def digest(self, number: int) -> bytes:
        """See `Content.digest`."""
        return self._image.digest(number)

    def written(self, number: int) -> None:
        """See `Content.written`; the memory stays."""


def _image(known: KnownFile) -> Image:
    return cast(Image, known)
