"""Make this Linux process lack what macOS or Windows lacks, before Holdfast is imported anew.

Which names are missing is read from typeshed: `mypy --platform darwin` and `win32` report them.
What the libraries are made of stays as it is: they are imported before.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import mmap
import os
import pkgutil
import select
import signal
import stat
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

LINUX_ALONE = {
    "os": (
        "sched_getaffinity posix_fadvise preadv pwritev waitid memfd_create copy_file_range "
        "posix_fallocate splice O_DIRECT O_TMPFILE RWF_NOWAIT POSIX_FADV_DONTNEED P_PID WEXITED"
    ),
    "mmap": "MADV_HUGEPAGE MADV_DONTFORK",
}
NOT_ON_WINDOWS = {
    "os": LINUX_ALONE["os"] + " "
    "register_at_fork fork forkpty pread pwrite readv writev geteuid getuid getgid getpgid killpg "
    "setsid setpgid statvfs fstatvfs fchmod fchown chown sysconf setpriority getpriority "
    "PRIO_PROCESS WNOHANG WNOWAIT CLD_EXITED set_blocking fdatasync mkfifo uname getloadavg "
    "O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY",
    "mmap": LINUX_ALONE["mmap"] + " MAP_PRIVATE MAP_SHARED MAP_ANON MAP_ANONYMOUS PROT_READ "
    "PROT_WRITE MADV_DONTNEED",
    "select": "poll epoll POLLIN",
    "signal": "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGCHLD SIGALRM SIGSTOP SIGQUIT alarm setitimer "
    "pthread_sigmask pthread_kill",
}
NO_MODULES_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios", "tty")
MODULES: dict[str, ModuleType] = {"os": os, "mmap": mmap, "select": select, "signal": signal}
MACOS_FULL_SYNC = 51


def modules() -> list[str]:
    """All modules but those that run when imported, or that import a trainer of others."""
    import holdfast

    found = pkgutil.walk_packages(holdfast.__path__, "holdfast.")
    names = [one.name for one in found if not one.name.endswith("__main__")]
    return [name for name in names if not name.startswith("holdfast.bridges.")]


def as_macos(*, has_full_sync: bool = True) -> list[str]:
    """Look like macOS; return what is synced from now on, as `full <kind>` or `plain <kind>`."""
    _forget_holdfast()
    _hide(LINUX_ALONE)
    sys.platform = "darwin"
    synced: list[str] = []
    plain, control = os.fsync, fcntl.fcntl

    def fsync(fd: int) -> None:
        synced.append(f"plain {_kind(fd)}")
        plain(fd)

    def fcntl_(fd: int, command: int, *given: Any) -> Any:
        if command != MACOS_FULL_SYNC:
            return control(fd, command, *given)
        if not has_full_sync:
            raise OSError(errno.ENOTSUP, "not supported")
        synced.append(f"full {_kind(fd)}")
        return plain(fd)

    os.fsync, fcntl.fcntl = fsync, fcntl_  # type: ignore[assignment]
    fcntl.F_FULLFSYNC = MACOS_FULL_SYNC  # type: ignore[attr-defined]
    _hide_proc()
    return synced


def as_windows() -> None:
    """Look like Windows."""
    _forget_holdfast()
    _hide(NOT_ON_WINDOWS)
    left = {
        one.name: one.value for one in signal.Signals if one.name not in NOT_ON_WINDOWS["signal"]
    }
    signal.Signals = IntEnum("Signals", left)  # type: ignore[misc,assignment]
    for name in NO_MODULES_ON_WINDOWS:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in ("open", "stat", "unlink", "link", "readlink", "mkdir", "rmdir", "rename"):
        _take_no_folder(name)
    for name in ("replace", "symlink", "listdir", "scandir"):
        _take_no_folder(name)
    os.supports_dir_fd = os.supports_fd = os.supports_follow_symlinks = set()
    os.O_BINARY = 0  # type: ignore[attr-defined]
    os.kill = _refuse  # type: ignore[assignment]  # there it ends the process, also with 0
    mmap.mmap = _WindowsMap  # type: ignore[misc]
    ctypes.CDLL = _only("msvcrt", ctypes.CDLL)  # type: ignore[misc,assignment]
    ctypes.PyDLL = _only("msvcrt", ctypes.PyDLL)  # type: ignore[misc,assignment]
    sys.platform = "win32"
    _hide_proc()


def _forget_holdfast() -> None:
    """Import everything once, with all libraries that it needs, and drop what is ours."""
    import psutil  # noqa: F401

    for name in modules():
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "holdfast"]:
        del sys.modules[name]


def _hide(missing: dict[str, str]) -> None:
    for module, names in missing.items():
        for name in names.split():
            if hasattr(MODULES[module], name):
                delattr(MODULES[module], name)


def _hide_proc() -> None:
    import holdfast.system

    holdfast.system.PROC = "/no-proc"


def _kind(fd: int) -> str:
    return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"


def _take_no_folder(name: str) -> None:
    """Make a function of `os` refuse open folders, and `open` folders at all, as Windows does."""
    real = getattr(os, name)

    def refusing(path: Any, *given: Any, **named: Any) -> Any:
        if isinstance(path, int) or any(one.endswith("dir_fd") for one in named):
            raise NotImplementedError(f"{name}: open folders are unavailable on this platform")
        if name == "open" and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *given, **named)

    setattr(os, name, refusing)


def _refuse(*_: object) -> None:
    raise AssertionError("this ends processes on Windows")


def _only(library: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def load(name: str | None, **given: Any) -> Any:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        return real(None if name == library else name, **given)

    return load


class _WindowsMap(mmap.mmap):
    """Mapped memory without flags, protection and advice."""

    def __new__(cls, fileno: int, length: int, tagname: None = None, **given: Any) -> _WindowsMap:
        assert not given.keys() & {"flags", "prot"}, given
        return super().__new__(cls, fileno, length, **given)

    def madvise(self, *_: object) -> None:
        raise AttributeError("madvise")
