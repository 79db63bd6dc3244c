"""What plain loops take for the same bytes and tensors; others' rows are shares of it.

Nothing here knows a checkpoint; what it writes nobody could load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from time import perf_counter

from blake3 import blake3
from torch import Tensor

from bench.limits import NUM_COPIES, StateCopy, blocks_of
from bench.machine import files_under, sync_folder
from bench.peers import Begun, Saver
from bench.results import Figures
from bench.states import State

_ASKED: Sequence[Callable[[Tensor], object]] = (
    Tensor.data_ptr,
    attrgetter("_version"),
    attrgetter("shape"),
    Tensor.stride,
    attrgetter("dtype"),
)


def state_walks(state: State, *, change: Callable[[], object]) -> Figures:
    """Seconds for a walk over the live state, in Python, that asks each tensor where it lies, how
    often it was changed, and for shape, strides and type, of which whoever copies it later has to
    know most.

    Each after all of the state was changed, which fills the processor's cache with other memory, as
    a training does.
    """
    took = []
    for _ in range(NUM_COPIES):
        change()
        os.sync()
        took.append(walk_s(state))
    return {"ask_state_s": took}


def walk_s(state: State) -> float:
    """Seconds for one such walk."""
    start = perf_counter()
    tensors = state.live()
    for asked in _ASKED:
        list(map(asked, tensors))
    return perf_counter() - start


def write_s(like: Path, into: Path) -> float:
    """Seconds until new files with the bytes of those in a folder, and their names, are durable,
    one written and synced after the other."""
    contents = {path.name: path.read_bytes() for path in files_under(like)}
    start = perf_counter()
    into.mkdir()
    for name, data in contents.items():
        fd = os.open(into / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)
    sync_folder(into)
    sync_folder(into.parent)
    return perf_counter() - start


def read_s(paths: Iterable[Path]) -> float:
    """Seconds for reading files and digesting what is in them, one after the other."""
    start = perf_counter()
    for path in paths:
        blake3(path.read_bytes()).digest()
    return perf_counter() - start


class PlainSave(Saver):
    """A copy of the state by all threads; then each block is digested, by as many, and written
    directly, by others."""

    def __init__(self, state: State, folder: Path) -> None:
        self._copy = StateCopy([*state.flat().values()])
        self._folder = folder
        num_threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(num_threads)
        self._writers = ThreadPoolExecutor(max(2, num_threads))
        self._background = ThreadPoolExecutor(1)

    def begin(self, number: int) -> Begun:
        """Copy; the rest is done beside the training."""
        list(self._pool.map(self._copy.make, self._copy.pieces))
        writing = self._background.submit(self._write, self._folder / f"plain-{number}")
        return Begun(wait=writing.result, done=writing.done)

    def close(self) -> None:
        """End the threads."""
        self._background.shutdown()
        self._writers.shutdown()
        self._pool.shutdown()

    def _write(self, path: Path) -> None:
        memory = self._copy.memory
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, len(memory))

        def write(span: tuple[int, int]) -> None:
            if os.pwrite(fd, memory[slice(*span)], span[0]) != span[1] - span[0]:
                raise OSError(f"short write to {path}")

        def digest(span: tuple[int, int]) -> Future[None]:
            blake3(memory[slice(*span)]).digest()
            return self._writers.submit(write, span)

        for written in list(self._pool.map(digest, blocks_of(len(memory)))):
            written.result()
        os.fsync(fd)
        os.close(fd)
        sync_folder(path.parent)
        for old in self._folder.glob("plain-*"):
            if old != path:
                old.unlink()
