"""Waits for other ranks that last: who is late, and whose process has ended. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.format.records import Process

FIRST_S = 10.0
"""Seconds after which a wait warns of ranks that have not made the call; then at 3 times as many.
"""
ANSWER_S = 60.0
"""The same for ranks that have made it, and show that they live: they may read or write for long.
"""
GROWTH = 3
LOOK_S = 2.0
"""Seconds between two looks at processes in a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Own process, and how to look at others."""

    own: Process
    has_ended: Callable[[Process], bool]
    """Whether a process has certainly ended: False for one that this host cannot see."""


class Watch:
    """Watcher of one wait for other ranks; warns while it lasts."""

    def __init__(self, warn: Callable[[str], object], call: str, begins: str | None = None) -> None:
        """Set up.

        Args:
            warn: gets the text of a warning, in any thread.
            call: the call that waits, such as "save of step 5".
            begins: tag of the round in which every rank posts as soon as it makes the call; None:
                all ranks have made it.
        """
        self._warn = warn
        self._call = call
        self.begins = begins
        self.next_s = ANSWER_S if begins is None else FIRST_S
        """Seconds of waiting after which the next warning is due."""
        self._told: set[int] = set()

    def warn_of_late_ranks(self, waited_s: float, late: Mapping[int, str]) -> None:
        """Warn of ranks that are late, with their names; without any, only set the next time."""
        self.next_s = max(self.next_s, waited_s) * GROWTH
        if self.begins is None:
            self._warn_of(waited_s, late, ". Look whether it is stopped or busy")
        else:
            self._warn_of(
                waited_s,
                late,
                ", which has not made this call yet. It may be busy, wait in a collective of its "
                "own, such as the all-reduce of a backward pass, or never make the call. Every "
                "rank must call save, maybe_save, resume and load, at the same points of the "
                "program and with the same steps and arguments. To see the line at which each "
                "rank waits, run `py-spy dump --pid PID`; for collectives of NCCL, set "
                "TORCH_FR_BUFFER_SIZE (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)",
            )

    def tell_silent(self, waited_s: float, silent: Mapping[int, str]) -> None:
        """Warn once of ranks that show no sign of life, with their names."""
        fresh = {rank: name for rank, name in silent.items() if rank not in self._told}
        self._warn_of(waited_s, fresh, ". Look whether it is stopped or lost")

    def _warn_of(self, waited_s: float, late: Mapping[int, str], advice: str) -> None:
        self._told.update(late)
        if late:
            names = join_names([*late.values()])
            self._warn(
                f"{self._call}: waiting for {waited_s:.0f} s, as nothing has come from "
                f"{names}{advice}"
            )


def join_names(names: Sequence[str], limit: int = 10) -> str:
    """Join names, the first `limit` of them, and count the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def describe_rank(rank: int, process: Process | None, silent_s: float = 0.0) -> str:
    """Name a rank with its process, and with its silence if that is long.

    >>> process = Process(host="node7", pid=41, start="", boot_id="", pid_namespace="")
    >>> describe_rank(3, process, 12.0)
    'rank 3 (process 41 on node7, no sign of life for 12 s)'
    """
    if process is None:
        return f"rank {rank}"
    sign = f", no sign of life for {silent_s:.0f} s" if silent_s >= FIRST_S else ""
    return f"rank {rank} ({describe_process(process)}{sign})"


def describe_process(process: Process) -> str:
    """Name a process in words."""
    return f"process {process.pid} on {process.host}"
