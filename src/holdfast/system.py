"""Differences between Linux, macOS and Windows: processes, memory, reads of files, durability.

Every module that needs one of these calls asks here, so that each of them can be imported, and
can read, on all three. Saving needs what `OPENS_FOLDERS` says, which Windows lacks.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import OutOfMemory

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PROC = "/proc"
"""Folder in which Linux shows processes; missing elsewhere."""
CGROUPS = "/sys/fs/cgroup"
"""Folder in which Linux shows control groups, by which containers limit memory."""
OPENS_FOLDERS = os.open in os.supports_dir_fd
"""Whether names can be used inside an open folder, on which all writing rests; not on Windows."""
CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every `os.open`: not inherited by programs, and bytes as they are, also on Windows."""
IS_LINUX = sys.platform.startswith("linux")
C_LIBRARY = "msvcrt" if sys.platform == "win32" else None
"""What `ctypes.CDLL` and `ctypes.PyDLL` load for memcmp, memcpy and memmove."""

_COPY_NBYTES = 1 << 20
"""Most bytes of one read where reads return new memory, which is then copied."""
_CALL_NBYTES = 1 << 30
"""Most bytes of one read or write: macOS refuses 2 GiB and more."""
_NO_FULL_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS})
"""Errors by which a file system of macOS, such as a network's, says that it lacks F_FULLFSYNC."""
_RESERVED_NBYTES = 4 << 20
"""Bytes of shared memory that are reserved in one call, within about a millisecond."""
_WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, for which Python has no name."""
_seeking = threading.Lock()
"""Held between a seek and its read, on systems without positional reads."""


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """Register functions that are called around each fork; no-op where nothing forks."""
    if hasattr(os, "register_at_fork"):
        given = {
            "before": before,
            "after_in_parent": after_in_parent,
            "after_in_child": after_in_child,
        }
        os.register_at_fork(**{name: call for name, call in given.items() if call})


def user_number() -> int:
    """Return the number of the effective user; 0 on Windows, which numbers none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def most_open_files() -> int:
    """Return how many files this process may open; a large number if that is not limited."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= limit < sys.maxsize:
            return limit
    return sys.maxsize


def private_memory(nbytes: int, *, is_wiped_on_fork: bool = False) -> mmap.mmap:
    """Allocate page-aligned private memory, at least one byte, in huge pages where possible.

    With `is_wiped_on_fork`, forked children see zeros on Linux, which costs them no copy.
    """
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            found = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        else:
            found = mmap.mmap(-1, max(nbytes, 1))
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"{nbytes} bytes of memory cannot be allocated: {error}") from error
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        for advice in (mmap.MADV_HUGEPAGE, *([_WIPE_ON_FORK] if is_wiped_on_fork else [])):
            # Only advice: a kernel that lacks it keeps ordinary pages, and copies on fork.
            with suppress(OSError):
                found.madvise(advice)
    return found


def map_reserved(fd: int, nbytes: int) -> mmap.mmap:
    """Reserve the memory of a file in shared memory, and map it. Not on macOS and Windows."""
    try:
        # A write to a page that the kernel cannot provide would kill the process. In pieces, as
        # before Linux 6.11 a signal undoes the whole call: with a timer it would never end.
        for start in range(0, nbytes, _RESERVED_NBYTES):
            piece = min(nbytes - start, _RESERVED_NBYTES)
            os.posix_fallocate(fd, start, piece)  # type: ignore[attr-defined, unused-ignore]
        return mmap.mmap(fd, nbytes)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(f"{nbytes} bytes of shared memory cannot be reserved: {error}") from error


def free_shared(path: Path) -> None:
    """Free the memory of a file in shared memory, also if forks of this process have it mapped."""
    if sys.platform == "linux":
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
            pages.madvise(mmap.MADV_REMOVE)  # reads as zeros from now on


def read_at(fd: int, memory: memoryview, start: int) -> int:
    """Read bytes of an open file from `start` on into `memory`; return how many were read.

    They may be fewer than wanted; 0 at the end of the file. Any number of threads may read.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [memory[:_CALL_NBYTES]], start)
    data = bytes_at(fd, min(memory.nbytes, _COPY_NBYTES), start)
    memory[: len(data)] = data
    return len(data)


def bytes_at(fd: int, nbytes: int, start: int) -> bytes:
    """Read at most `nbytes` of an open file from `start` on; fewer at the end of the file."""
    if hasattr(os, "pread"):
        return os.pread(fd, min(nbytes, _CALL_NBYTES), start)
    with _seeking:
        os.lseek(fd, start, os.SEEK_SET)
        return os.read(fd, min(nbytes, _CALL_NBYTES))


def write_at(fd: int, data: memoryview, start: int) -> int:
    """Write bytes to an open file at `start`; return how many were written. Not on Windows."""
    assert sys.platform != "win32", "nothing is saved on Windows"
    return os.pwrite(fd, data[:_CALL_NBYTES], start)


def sync(fd: int) -> None:
    """Put the bytes of a file, or the names in a folder, on stable storage.

    macOS's fsync(2) leaves them in the disk's own cache; F_FULLFSYNC does not (its fcntl(2)).
    """
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(fd)


def replace_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a durable file, which replaces that at `path` as a whole."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        sync(file.fileno())
    aside.replace(path)


def sync_folder_path(path: str | os.PathLike[str]) -> None:
    """Put the names in a folder on stable storage; no-op on Windows, which cannot be asked to."""
    if OPENS_FOLDERS:
        fd = os.open(path, os.O_RDONLY | CLOSED_ON_EXEC)
        try:
            sync(fd)
        finally:
            os.close(fd)


def signals_of(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the named signals that this system has."""
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def signal_name(number: int) -> str:
    """Return the name of a signal, as `SIGTERM` for 15; `signal 35` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def try_lock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock an open file, unless another descriptor has the lock; return whether it is locked."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no flock(2)")
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock of an open file."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)


@functools.cache
def boot_id() -> str:
    """Return a text that no other boot of any machine has; empty if there is none.

    Without /proc it is the time of the boot with the number of the network card. Kept, since the
    time of the boot moves on macOS when the clock is set.
    """
    if has_proc():
        with suppress(OSError), open(f"{PROC}/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
        return ""
    with suppress(ImportError, OSError, RuntimeError):
        import uuid

        import psutil

        return f"{psutil.boot_time():.0f}-{uuid.getnode():012x}"
    return ""


@functools.cache
def has_proc() -> bool:
    """Whether this system shows its processes in /proc, as Linux does."""
    return os.path.exists(f"{PROC}/self/stat")


def resident_nbytes() -> int | None:
    """Return the memory of this process, in bytes; None where the system does not say."""
    return _memory_nbytes("VmRSS", "rss")


def peak_nbytes() -> int | None:
    """Return the most memory that this process has had so far; None where the system hides it.

    Not `ru_maxrss` on Linux: that begins with what the parent had at the fork (its getrusage(2)).
    """
    if not has_proc():
        with suppress(ImportError, OSError):
            import resource

            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most if sys.platform == "darwin" else most * 1024
    return _memory_nbytes("VmHWM", "peak_wset")


def _memory_nbytes(line: str, name: str) -> int | None:
    """Read a size of this process: a line of its status on Linux, a field of psutil elsewhere."""
    if has_proc():
        with open(f"{PROC}/self/status", encoding="ascii", errors="replace") as file:
            found = next((text for text in file if text.startswith(f"{line}:")), None)
        return None if found is None else 1024 * int(found.split()[1])
    with suppress(ImportError):
        import psutil

        size: int | None = getattr(psutil.Process().memory_info(), name, None)
        return size
    return None


def memory_limit() -> int | None:
    """Return the memory limit of this process's cgroups, in bytes; None if there is none."""
    limits: list[int] = []
    with suppress(OSError, ValueError):  # no Linux, or cgroups are hidden
        for line in Path(f"{PROC}/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                # Version 2 has one tree of all controllers, version 1 one for each.
                root = Path(CGROUPS) / controllers
                file = "memory.limit_in_bytes" if controllers else "memory.max"
                group = root / name.lstrip("/")
                for folder in (group, *group.parents):
                    with suppress(OSError, ValueError):  # "max": no limit
                        limits.append(int((folder / file).read_text()))
    return min((limit for limit in limits if limit < 1 << 62), default=None)  # else: no limit


class Found(NamedTuple):
    """Start and state of a process, as psutil tells them."""

    start: str
    """Start time in seconds of the clock, which stays as it was noted at the start."""
    has_ended: bool


def find_process(pid: int) -> Found:
    """Look for a process by psutil, on systems without /proc.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: it cannot be inspected.
    """
    try:
        import psutil
    except ImportError as error:
        raise OSError(errno.ENOSYS, "psutil is not installed") from error
    try:
        process = psutil.Process(pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return Found(start=f"{process.create_time():.6f}", has_ended=ended)
    except psutil.NoSuchProcess as error:  # a zombie, too: none of its threads runs
        raise ProcessLookupError(errno.ESRCH, str(error)) from error
    except psutil.Error as error:
        raise OSError(errno.EPERM, str(error)) from error
