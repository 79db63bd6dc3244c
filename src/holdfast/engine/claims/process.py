"""Who a process is, whether another one still lives (docs/decisions/0003), and what time it is."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from typing import Literal

from holdfast.format.records import Process

Liveness = Literal["ours", "alive", "dead", "unknown"]


def this_process() -> Process:
    """The identity of the calling process."""
    pid = os.getpid()
    return Process(
        host=socket.gethostname(),
        pid=pid,
        start=_start_time(pid) or "",
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
    )


def liveness(process: Process) -> Liveness:
    """Whether `process` lives, as far as this host can tell.

    "dead" is proof: the same boot and process namespace, and no such process. "unknown" means
    that it ran elsewhere.
    """
    here = this_process()
    if not here.boot_id or not here.start:
        return "unknown"
    if (process.boot_id, process.pid_namespace) != (here.boot_id, here.pid_namespace):
        return "unknown"
    if (process.pid, process.start) == (here.pid, here.start):
        return "ours"
    start = _start_time(process.pid)
    if start is None:
        # The record may be hidden (hidepid) or not readable: only the kernel's "no" is proof.
        return "alive" if _exists(process.pid) else "dead"
    return "alive" if start == process.start else "dead"


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; "" of a zombie, None when not readable.

    Source: proc(5), fields 3 and 22 of /proc/<pid>/stat; the name may hold blanks and brackets.
    """
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return "" if fields[0] in {"Z", "X", "x"} else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_this_process(process: Process) -> bool:
    """Whether a record names the calling process."""
    return liveness(process) == "ours"


def utc_now() -> str:
    """The time for people: ISO 8601, UTC, seconds. Only calendar rules read it."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()
