"""What the machine is, how much memory this process took, and which files its page cache holds."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("holdfast-torch", "torch", "numpy", "safetensors", "torch_checkpointing", "blake3")
_PIECE_NBYTES = 64 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def heading(module: str, folder: Path) -> list[str]:
    """Markdown lines: how this process was started, on what, when, and with what installed."""
    return [
        f"Command: `{shlex.join(['python', '-m', module, *sys.argv[1:]])}`  ",
        f"Machine: {describe(folder)}  ",
        f"Date: {datetime.now(timezone.utc):%Y-%m-%d}; "
        + ", ".join(f"{name} {number}" for name, number in versions().items()),
    ]


def describe(folder: Path) -> str:
    """One line: processor, cores this process may use, memory, kernel, file system."""
    return (
        f"{_cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
        f"{_memory_nbytes() / 1024**3:.0f} GiB memory, Linux {platform.release()}, "
        f"{_file_system(folder)}"
    )


def versions() -> dict[str, str]:
    """Package → installed version, or `absent`."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


class PeakMemory:
    """Highest resident memory of this process inside `watch`, above what it had at `__init__`.

    Mapped file pages count while they are mapped in, as the kernel counts them (VmHWM).
    """

    def __init__(self) -> None:
        self._base_nbytes = _status("VmRSS")
        self.extra_nbytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take part in the peak what happens inside."""
        Path("/proc/self/clear_refs").write_text("5")
        yield
        self.extra_nbytes = max(self.extra_nbytes, _status("VmHWM") - self._base_nbytes)


def processor_s(pids: Iterable[int]) -> float:
    """Seconds that these processes have computed, with all their threads; of those that have ended
    meanwhile nothing."""
    ticks = 0
    for pid in pids:
        with suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def threads_s(threads: Iterable[int]) -> float:
    """Seconds that these threads of this process have computed."""
    texts = (Path(f"/proc/self/task/{number}/schedstat").read_text() for number in threads)
    return sum(int(text.split()[0]) for text in texts) / 1e9


def own_threads() -> frozenset[int]:
    """The threads of this process."""
    return frozenset(int(path.name) for path in Path("/proc/self/task").iterdir())


def own_children() -> frozenset[int]:
    """Processes that this one has started, and those that they have."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return frozenset(found - {os.getpid()})


def back_memory(nbytes: int) -> None:
    """Touch and free memory, so that the next to ask for it gets pages that exist.

    A virtual machine whose balloon reports free pages gives them back to its host within seconds
    and faults them in again at 0.5 GB/s; then every copy into new memory, and every page of a
    file that is written or read, measures that (`limits` shows it) and not the library.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pieces = range(0, nbytes, _PIECE_NBYTES)

        def touch(start: int) -> None:
            ctypes.memset(address + start, 1, min(_PIECE_NBYTES, nbytes - start))

        with ThreadPoolExecutor() as pool:
            list(pool.map(touch, pieces))


def files_under(folder: Path) -> list[Path]:
    """Every regular file below `folder`."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def newest_under(folder: Path) -> Path:
    """The folder below `folder` in which the newest large file lies: the newest checkpoint."""
    sizes = {path: path.stat().st_size for path in files_under(folder)}
    large = [path for path, nbytes in sizes.items() if 2 * nbytes > max(sizes.values())]
    return max(large, key=lambda path: path.stat().st_mtime_ns).parent


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on stable storage."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def disk_nbytes(folder: Path) -> int:
    """Bytes of the blocks that the files below `folder` take; a file with two names counts once."""
    found = (path.stat() for path in files_under(folder))
    return sum({(s.st_dev, s.st_ino): s.st_blocks * 512 for s in found}.values())


def written_nbytes() -> int:
    """Bytes that this process has sent to block devices, or made dirty in the page cache."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no write_bytes")


def drop_cache(folder: Path) -> float:
    """Drop these files from the page cache; returns the share that is still in it (0 is cold)."""
    resident = total = 0
    for path in files_under(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = _resident_pages(fd)
        finally:
            os.close(fd)
        resident += sum(pages)
        total += len(pages)
    return resident / max(1, total)


def fill_cache(folder: Path) -> None:
    """Read these files, so that the page cache has them; direct reads leave nothing there."""
    buffer = bytearray(_PIECE_NBYTES)
    for path in files_under(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _resident_pages(fd: int) -> bytes:
    """One byte a page: 1 where the page cache holds it."""
    nbytes = os.fstat(fd).st_size
    if nbytes == 0:
        return b""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    flags = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    failed = _libc.mincore(address, nbytes, flags)
    errno = ctypes.get_errno()
    _libc.munmap(address, nbytes)
    if failed:
        raise OSError(errno, "mincore")
    return bytes(flag & 1 for flag in flags)


def peak_nbytes() -> int:
    """Highest resident memory of this process; `ru_maxrss` begins with what its parent had."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    best, answer = "", "unknown file system"
    real = str(folder.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        device, where, kind, *_ = line.split()
        if real.startswith(where) and len(where) >= len(best):
            best, answer = where, f"{kind} on {device}"
    return answer
