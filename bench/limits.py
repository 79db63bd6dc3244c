"""What the machine itself can do: memory, digest, cipher, disk: `python -m bench.limits`.

Nothing here knows a checkpoint; every figure is the best plain loop over 8 MiB blocks. From them
come the *ceilings*: the shortest time in which a save, a staging or a load of these bytes can be
done here. Every other benchmark prints its share of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from bench.child import in_child, settle
from bench.command import Bench
from bench.machine import drop_cache, files_under, sync_folder
from bench.report import number, seconds, table
from bench.results import Figures, Results

BLOCK_NBYTES = 8 * 1024 * 1024
NUM_LINKS = 1000
NUM_COPIES = 3
LIMITS: Mapping[str, str] = {
    "copy_touched_s": "copy into touched memory, 1 thread",
    "copy_touched_all_s": "copy into touched memory, all threads",
    "compare_all_s": "compare with an equal copy, all threads",
    "copy_state_s": "copy of the state's tensors as a save finds them, 1 thread",
    "copy_state_all_s": "copy of the state's tensors as a save finds them, all threads",
    "copy_fresh_s": "copy into fresh memory, 1 thread",
    "copy_fresh_all_s": "copy into fresh memory, all threads",
    "populate_all_s": "have fresh memory made ready (MADV_POPULATE_WRITE), all threads",
    "fault_huge_s": "touch fresh memory, huge pages",
    "fault_small_s": "touch fresh memory, small pages",
    "blake3_1_s": "BLAKE3 of blocks, 1 thread",
    "blake3_all_s": "BLAKE3 of blocks, all threads",
    "aes_gcm_1_s": "AES-256-GCM of blocks, 1 thread",
    "aes_gcm_all_s": "AES-256-GCM of blocks, all threads",
    "direct_write_s": "O_DIRECT write + fsync, all threads",
    "buffered_write_s": "buffered write + fsync, 1 thread",
    "buffered_write_all_s": "buffered write + fsync, all threads",
    "cold_read_s": "read from disk, all threads",
    "direct_read_s": "O_DIRECT read, all threads",
    "warm_read_s": "read from page cache, all threads",
}
"""Figures that are times for the same bytes, with what they mean."""
_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE, which Python has no name for."""
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LAST = "buffered_write_s-0"


def measure(nbytes: int, folder: Path, *, num_files: int, settle: Callable[[], None]) -> Figures:
    """Seconds for each limit on `nbytes` bytes, and the ceilings; files go to `folder`.

    A way to write is measured as the saves are: `num_files` new files, the first not counted.
    `settle` is called before whatever takes new memory, anonymous or for pages of files.
    """
    source = random_memory(nbytes)
    num_threads = len(os.sched_getaffinity(0))
    single = dict(_memory(source, num_threads, settle))
    single |= dict(_faults(len(source), num_threads, settle))
    single |= _ciphers(source, num_threads) | _digests(source, num_threads)
    writes = _writes(source, folder, num_files, num_threads, settle)
    single |= _reads(random_memory(len(source)), folder / _LAST, num_threads, settle)
    single |= {"hard_link_s": _link_s(folder)}
    found = {"nbytes": [float(nbytes)]} | writes | {name: [value] for name, value in single.items()}
    return found | ceilings(found)


class StateCopy:
    """Live tensors, and memory that is there, into which they are copied: whole, or in blocks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.memory = random_memory(sum(tensor.nbytes for tensor in tensors))
        """Where the copies lie one after the other, up to the end of a page."""
        target = np.frombuffer(self.memory, np.uint8)
        sources = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
        stops = np.cumsum([len(source) for source in sources]).tolist()
        pairs = zip(sources, stops, strict=True)
        self.wholes = [(target[stop - len(source) : stop], source) for source, stop in pairs]
        self.pieces = [
            (into[slice(*span)], source[slice(*span)])
            for into, source in self.wholes
            for span in blocks_of(len(source))
        ]

    @staticmethod
    def make(pair: tuple[Any, Any]) -> None:
        """Make one of the copies."""
        np.copyto(*pair)


def state_copies(tensors: Sequence[Tensor], *, change: Callable[[], object]) -> Figures:
    """Seconds for copies of live tensors, and nothing else, as the stall of a save is measured:
    into memory that is there, from tensors that have changed, after other work on other memory.
    By one thread, and in blocks by all.

    Memory that was left alone for a while takes longer than in `copy_touched_s`, which copies at
    once what it has just copied.
    """
    copy = StateCopy(tensors)
    one: list[float] = []
    every: list[float] = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(copy.make, copy.pieces))  # starts the threads
        for _ in range(NUM_COPIES):
            change()
            one.append(_timed(lambda: list(map(copy.make, copy.wholes))))
            change()
            every.append(_timed(lambda: list(pool.map(copy.make, copy.pieces))))
    return {"copy_state_s": one, "copy_state_all_s": every}


def ceilings(figures: Figures) -> dict[str, list[float]]:
    """The shortest possible times: a save is written, a staging copied, a load read, or copied
    from the page cache and digested."""
    best = {name: min(values) for name, values in figures.items()}
    copy_s = min(best["copy_touched_s"], best["copy_touched_all_s"])
    return {
        "ceiling_save_s": list(figures["direct_write_s"]),
        "ceiling_stage_s": [copy_s],
        "ceiling_cold_s": [min(best["cold_read_s"], best["direct_read_s"])],
        "ceiling_warm_s": [copy_s + best["blake3_all_s"]],
    }


def table_of(results: Results, case: str) -> list[str]:
    """Markdown lines: one row a limit."""
    nbytes = results.median(case, "nbytes")

    def row(figure: str) -> list[str]:
        value = results.median(case, figure)
        speed = nbytes / value / 1e9 if nbytes and value else None
        return [seconds(value), number(speed, "{:.2f}")]

    errors = dict.fromkeys(LIMITS, results.error(case))
    lines = table(["limit", "time", "GB/s"], LIMITS, row, errors)
    link_s = results.median(case, "hard_link_s")
    lines += ["", f"A hard link, synced with {NUM_LINKS - 1} others: {seconds(link_s)}."]
    ask_s = results.median(case, "ask_state_s")
    if ask_s is None:
        lines += ["No state was copied: `bench.local` does that."]
    else:
        lines += [f"A walk that asks each tensor where it lies and what it is: {seconds(ask_s)}."]
    if results.median(case, "aes_gcm_1_s") is None:
        lines += ["AES-256-GCM was not measured: the package `cryptography` is not installed."]
    return lines


def random_memory(nbytes: int) -> memoryview:
    """Private, page-aligned, touched memory; its length is rounded up to whole pages.

    In huge pages where there are some: direct writes from small ones take a third longer.
    """
    rounded = -(-nbytes // _PAGE) * _PAGE
    memory = memoryview(_fresh_memory(rounded))
    block = np.random.default_rng(0).bytes(min(rounded, BLOCK_NBYTES))
    for start, stop in blocks_of(rounded):
        memory[start:stop] = block[: stop - start]
    return memory


def _fresh_memory(nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _memory(
    source: memoryview, num_threads: int, settle: Callable[[], None]
) -> Iterator[tuple[str, float]]:
    data = np.frombuffer(source, np.uint8)
    target = np.frombuffer(random_memory(len(source)), np.uint8)

    def copy(span: tuple[int, int]) -> None:
        np.copyto(target[slice(*span)], data[slice(*span)])

    def compare(span: tuple[int, int]) -> None:
        start, stop = span
        if _memcmp(target.ctypes.data + start, data.ctypes.data + start, stop - start):
            raise RuntimeError("a copy in memory differs from what was copied")

    for name, work, threads in (
        ("copy_touched_s", copy, 1),
        ("copy_touched_all_s", copy, num_threads),
        ("compare_all_s", compare, num_threads),
    ):
        yield name, min(_parallel(work, len(source), threads) for _ in range(NUM_COPIES))
    for name, threads in (("copy_fresh_s", 1), ("copy_fresh_all_s", num_threads)):
        del target
        settle()
        target = np.frombuffer(_fresh_memory(len(source)), np.uint8)
        yield name, _parallel(copy, len(source), threads)


def _faults(
    nbytes: int, num_threads: int, settle: Callable[[], None]
) -> Iterator[tuple[str, float]]:
    for name, advice in (("huge", "MADV_HUGEPAGE"), ("small", "MADV_NOHUGEPAGE")):
        settle()
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            with contextlib.suppress(OSError):
                memory.madvise(getattr(mmap, advice))
            pages = np.frombuffer(memory, np.uint8)[::_PAGE]
            yield f"fault_{name}_s", _timed(partial(pages.fill, 1))
            del pages
    settle()
    memory = np.frombuffer(_fresh_memory(nbytes), np.uint8)

    def populate(span: tuple[int, int]) -> None:
        start, stop = span
        if _madvise(memory.ctypes.data + start, stop - start, _POPULATE_WRITE):
            raise OSError("this kernel has no MADV_POPULATE_WRITE")

    with contextlib.suppress(OSError):
        yield "populate_all_s", _parallel(populate, nbytes, num_threads)


def _ciphers(source: memoryview, num_threads: int) -> dict[str, float]:
    """Nothing where there is no library for it."""
    if importlib.util.find_spec("cryptography") is None:
        return {}
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(bytes(32))

    def encrypt(span: tuple[int, int]) -> None:
        cipher.encrypt(span[0].to_bytes(12, "big"), source[slice(*span)], None)

    return {
        "aes_gcm_1_s": _parallel(encrypt, len(source), 1),
        "aes_gcm_all_s": _parallel(encrypt, len(source), num_threads),
    }


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
        paths = [folder / f"{name}-{i}" for i in range(num_files)]
        took = []
        for path in paths:
            if not flags & os.O_DIRECT:
                settle()
            took.append(_write(source, path, flags, threads))
        figures[name] = took[1:]
        for path in paths:
            if path.name != _LAST:
                path.unlink()
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


def _link_s(folder: Path) -> float:
    """Seconds for one of many names of a file in a new folder, durable when all are there."""
    original, links = folder / "original", folder / "links"
    original.write_bytes(b"x")
    links.mkdir()

    def link() -> None:
        for name in range(NUM_LINKS):
            os.link(original, links / str(name))
        sync_folder(links)

    return _timed(link) / NUM_LINKS


class DiskProbe:
    """Writes as many bytes as a save does, the fastest way, right beside it.

    A disk that others use is another disk a minute later; the share that a save has of it is
    taken from this. Its memory is small and counts to nobody.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "probe"
        self._source = random_memory(8 * BLOCK_NBYTES)
        self._num_threads = max(2, len(os.sched_getaffinity(0)))

    def write_s(self, nbytes: int) -> float:
        """Seconds until a new file of `nbytes` is on stable storage; it is removed."""
        rounded = -(-nbytes // _PAGE) * _PAGE
        took = _write(self._source, self._path, os.O_DIRECT, self._num_threads, rounded)
        self._path.unlink()
        return took


class ReadProbe:
    """Reads a checkpoint as fast as the disk gives it, right beside a load of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._target = random_memory(8 * BLOCK_NBYTES)
        self._num_threads = 2 * len(os.sched_getaffinity(0))

    def read_s(self) -> float:
        """Seconds for direct reads of all its files, of which the page cache has nothing."""
        drop_cache(self._folder)
        with contextlib.ExitStack() as stack:
            reads = []
            for path in files_under(self._folder):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                stack.callback(os.close, fd)
                reads += [(fd, span) for span in blocks_of(path.stat().st_size)]

            def read(number: int) -> None:
                fd, (start, stop) = reads[number]
                at = number % 8 * BLOCK_NBYTES
                if os.preadv(fd, [self._target[at : at + BLOCK_NBYTES]], start) != stop - start:
                    raise OSError(f"short read from {self._folder}")

            with ThreadPoolExecutor(self._num_threads) as pool:
                return _timed(lambda: list(pool.map(read, range(len(reads)))))


def _write(
    source: memoryview, path: Path, flags: int, num_threads: int, nbytes: int | None = None
) -> float:
    """Seconds until the bytes and the name are on stable storage.

    `nbytes` may be more than the source has: its blocks are then written again.
    """
    length = len(source) if nbytes is None else nbytes
    start = perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o600)
    if flags & os.O_DIRECT:
        os.posix_fallocate(fd, 0, length)

    def write(span: tuple[int, int]) -> None:
        begin = span[0] % len(source)
        if os.pwrite(fd, source[begin : begin + span[1] - span[0]], span[0]) != span[1] - span[0]:
            raise OSError(f"short write to {path}")

    _parallel(write, length, num_threads)
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


def _parallel(work: Callable[[tuple[int, int]], None], nbytes: int, num_threads: int) -> float:
    with ThreadPoolExecutor(num_threads) as pool:
        return _timed(lambda: list(pool.map(work, blocks_of(nbytes))))


def blocks_of(nbytes: int) -> list[tuple[int, int]]:
    """Where the blocks of so many bytes begin and end."""
    return [(at, min(nbytes, at + BLOCK_NBYTES)) for at in range(0, nbytes, BLOCK_NBYTES)]


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="in 1e9 bytes (%(default)s)")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    nbytes = round(options.size_gb * 1e9)
    own = folder / "limits"
    own.mkdir()
    results.add("limits", in_child(_in_child, nbytes, own, options.settle))
    shutil.rmtree(own)


def _in_child(nbytes: int, folder: Path, settles: bool) -> Figures:
    settle_first = partial(settle, 2 * nbytes) if settles else _nothing
    return measure(nbytes, folder, num_files=3, settle=settle_first)


def _nothing() -> None:
    """Where measured calls are to find the machine as it is."""


BENCH = Bench(
    name="limits",
    about="What the machine itself can do with as many bytes as a state has.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=lambda results: table_of(results, "limits"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
