"""What the machine itself can do with the same number of bytes: disk, memory, digest.

Nothing here knows a checkpoint; every figure is the best plain loop over 8 MiB blocks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
from blake3 import blake3

from bench.machine import drop_cache

BLOCK_NBYTES = 8 * 1024 * 1024
_PAGE = mmap.PAGESIZE
_LAST = "buffered_write_s-0"


def measure(
    nbytes: int, folder: Path, *, num_files: int, settle: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds for each limit on `nbytes` bytes; files go to `folder`.

    A way to write is measured as the saves are: `num_files` new files, the first not counted.
    `settle` is called before whatever takes new memory, anonymous or for pages of files.
    """
    source = _random_memory(nbytes)
    num_threads = len(os.sched_getaffinity(0))
    single = dict(_memory(source, num_threads, settle))
    single |= _digests(source, num_threads)
    writes = _writes(source, folder, num_files, num_threads, settle)
    single |= _reads(_random_memory(len(source)), folder / _LAST, num_threads, settle)
    return writes | {name: [value] for name, value in single.items()}


def _random_memory(nbytes: int) -> memoryview:
    """Private, page-aligned, touched memory; its length is rounded up to whole pages.

    In huge pages where there are some: direct writes from small ones take a third longer.
    """
    rounded = -(-nbytes // _PAGE) * _PAGE
    mapped = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapped)
    block = np.random.default_rng(0).bytes(min(rounded, BLOCK_NBYTES))
    for start, stop in _blocks(rounded):
        memory[start:stop] = block[: stop - start]
    return memory


def _memory(
    source: memoryview, num_threads: int, settle: Callable[[], None]
) -> Iterator[tuple[str, float]]:
    data = np.frombuffer(source, np.uint8)
    settle()
    target = np.empty_like(data)
    yield "copy_fresh_s", _timed(lambda: np.copyto(target, data))
    yield "copy_touched_s", _timed(lambda: np.copyto(target, data))

    def copy(span: tuple[int, int]) -> None:
        np.copyto(target[slice(*span)], data[slice(*span)])

    yield "copy_touched_all_s", _parallel(copy, len(source), num_threads)


def _digests(source: memoryview, num_threads: int) -> dict[str, float]:
    def digest(span: tuple[int, int]) -> None:
        blake3(source[slice(*span)]).digest()

    return {
        "blake3_1_s": _parallel(digest, len(source), 1),
        "blake3_all_s": _parallel(digest, len(source), num_threads),
    }


def _writes(
    source: memoryview,
    folder: Path,
    num_files: int,
    num_threads: int,
    settle: Callable[[], None],
) -> dict[str, list[float]]:
    """Leaves `folder/_LAST` alone."""
    ways = {
        "direct_write_s": (os.O_DIRECT, max(2, num_threads)),
        "buffered_write_all_s": (0, num_threads),
        "buffered_write_s": (0, 1),
    }
    figures = {}
    for name, (flags, threads) in ways.items():
        seconds = []
        for number in range(num_files):
            settle()
            seconds.append(_write(source, folder / f"{name}-{number}", flags, threads))
        figures[name] = seconds[1:]
        for number in range(num_files):
            if f"{name}-{number}" != _LAST:
                (folder / f"{name}-{number}").unlink()
    return figures


def _reads(
    target: memoryview, path: Path, num_threads: int, settle: Callable[[], None]
) -> dict[str, float]:
    figures = {"cold_share": drop_cache(path.parent)}
    settle()
    figures["cold_read_s"] = _read(target, path, 0, num_threads)
    figures["warm_read_s"] = _read(target, path, 0, num_threads)
    drop_cache(path.parent)
    figures["direct_read_s"] = _read(target, path, os.O_DIRECT, max(2, num_threads))
    return figures


def _write(source: memoryview, path: Path, flags: int, num_threads: int) -> float:
    """Seconds until the bytes and the name are on stable storage."""
    start = perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o600)
    if flags & os.O_DIRECT:
        os.posix_fallocate(fd, 0, len(source))

    def write(span: tuple[int, int]) -> None:
        if os.pwrite(fd, source[slice(*span)], span[0]) != span[1] - span[0]:
            raise OSError(f"short write to {path}")

    _parallel(write, len(source), num_threads)
    os.fsync(fd)
    os.close(fd)
    sync_folder(path.parent)
    return perf_counter() - start


def _read(target: memoryview, path: Path, flags: int, num_threads: int) -> float:
    fd = os.open(path, os.O_RDONLY | flags)

    def read(span: tuple[int, int]) -> None:
        if os.preadv(fd, [target[slice(*span)]], span[0]) != span[1] - span[0]:
            raise OSError(f"short read from {path}")

    seconds = _parallel(read, len(target), num_threads)
    os.close(fd)
    return seconds


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on stable storage."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def _parallel(work: Callable[[tuple[int, int]], None], nbytes: int, num_threads: int) -> float:
    with ThreadPoolExecutor(num_threads) as pool:
        return _timed(lambda: list(pool.map(work, _blocks(nbytes))))


def _blocks(nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(nbytes, at + BLOCK_NBYTES)) for at in range(0, nbytes, BLOCK_NBYTES)]


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
