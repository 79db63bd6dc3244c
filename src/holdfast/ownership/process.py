"""Identity of processes, whether another one still lives (docs/decisions/0003), and the time."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timezone
from typing import Literal, NamedTuple

from holdfast.format.records import Process
from holdfast.system import PROC, boot_id, find_process, has_proc

Liveness = Literal["ours", "alive", "dead", "unknown"]


def this_process() -> Process:
    """Return the identity of the calling process."""
    pid = os.getpid()
    try:
        start = (_stat(f"{PROC}/{pid}") if has_proc() else find_process(pid)).start
    except OSError:
        start = ""
    return Process(
        host=socket.gethostname(),
        pid=pid,
        start=start,
        boot_id=boot_id(),
        pid_namespace=_pid_namespace(),
    )


def liveness(process: Process) -> Liveness:
    """Say whether `process` lives, as far as this host can tell.

    "dead" is proof: the same boot and process namespace, and no such process, or all of its threads
    have ended. "unknown" means that it ran elsewhere, that it is just ending, or that the process
    with its pid cannot be inspected.
    """
    here = this_process()
    if not here.boot_id or not here.start:
        return "unknown"
    if (process.boot_id, process.pid_namespace) != (here.boot_id, here.pid_namespace):
        return "unknown"
    if (process.pid, process.start) == (here.pid, here.start):
        return "ours"
    return _by_proc(process) if has_proc() else _by_psutil(process)


def _by_psutil(process: Process) -> Liveness:
    try:
        found = find_process(process.pid)
    except ProcessLookupError:
        return "dead"
    except OSError:
        return "unknown"
    return "dead" if found.has_ended or found.start != process.start else "alive"


def _by_proc(process: Process) -> Liveness:
    folder = f"{PROC}/{process.pid}"
    try:
        leader = _stat(folder)
        if leader.start != process.start:
            return "dead"
        if not leader.has_ended:
            return "alive"
        return "dead" if _have_ended(f"{folder}/task") else "unknown"
    except OSError:
        # It may be hidden (hidepid), or be another process: only the kernel's "no" is proof.
        return "unknown" if _exists(process.pid) else "dead"


def _have_ended(folder: str) -> bool:
    """Whether all threads of a process have ended; after a kill some may still be in the kernel."""
    threads = os.listdir(folder)
    if not all(_thread_has_ended(f"{folder}/{thread}") for thread in threads):
        return False
    # Without a kill, a thread may have started another one before it ended.
    return {*threads}.issuperset(os.listdir(folder))


def _thread_has_ended(folder: str) -> bool:
    try:
        return _stat(folder).has_ended
    except (FileNotFoundError, ProcessLookupError):
        return True


class _Stat(NamedTuple):
    """Start time and state of a process or thread, as the kernel reports them."""

    start: str
    """Start time in clock ticks since boot."""
    has_ended: bool
    """Whether it is a zombie. For a process, this is about its first thread alone."""


def _stat(folder: str) -> _Stat:
    """Read `stat` of a process or thread, as in proc(5): fields 3 and 22."""
    with open(f"{folder}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    if len(fields) < 20:
        raise OSError(f"{folder}/stat: not understood: {fields}")
    start = int(fields[19]) - _clock_offset_ticks()
    return _Stat(start=f"{start}", has_ended=fields[0] in {"Z", "X", "x"})


def _clock_offset_ticks() -> int:
    """Return by how much this time namespace moves start times in /proc: time_namespaces(7)."""
    try:
        with open(f"{PROC}/self/timens_offsets", encoding="ascii") as file:
            fields = next(line.split() for line in file if line.startswith("boottime"))
    except (OSError, StopIteration):
        return 0  # a kernel without time namespaces
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[1]) * ticks + int(fields[2]) * ticks // 1_000_000_000


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _pid_namespace() -> str:
    try:
        return os.readlink(f"{PROC}/self/ns/pid")
    except OSError:
        return ""


def is_this_process(process: Process) -> bool:
    """Whether a record names the calling process."""
    return liveness(process) == "ours"


def utc_text() -> str:
    """Return the current UTC time as ISO 8601 text, in seconds; only calendar rules parse it."""
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()
