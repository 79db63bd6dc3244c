"""Choice of the ranks that a manager works with."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from holdfast.events import Emitter
from holdfast.launched import has_group, present_ranks
from holdfast.ranks.alone import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.ranks.waiting import Processes


def coordinator_of(
    ranks: Coordinator | Literal["group"] | None,
    emit: Emitter,
    processes: Processes | None = None,
) -> Coordinator:
    """Return a coordinator: that of torch's default process group for "group", if there is one.

    All ranks of the group make theirs at the same point of the program. Warns where a launcher has
    started several processes, and there is no group yet. `processes` is as for `C10d`.
    """
    if isinstance(ranks, Coordinator):
        return ranks
    # Looked up, not imported: a build of torch may lack it.
    group = getattr(torch, "distributed", None)
    if ranks is None or group is None or not group.is_available():
        return SingleProcess()
    if not has_group():
        started = present_ranks().world_size
        if started > 1:
            emit(
                "warning",
                f"WORLD_SIZE is {started}, and torch.distributed has no process group yet, so this "
                "manager saves alone. Make it after init_process_group; where each process has a "
                "root of its own, pass ranks=None",
            )
        return SingleProcess()
    if group.get_world_size() == 1:
        return SingleProcess()
    from holdfast.ranks.c10d import C10d

    return C10d.of_default_group(processes=processes, warn=partial(emit, "warning"))


class GroupAlarm:
    """Warns once if a process group has come after a manager that saves alone was made."""

    def __init__(self, ranks: Coordinator | Literal["group"] | None, emit: Emitter) -> None:
        """Look out for a group, unless there is one, or a warning was logged already."""
        self._emit = emit
        self._looks = ranks == "group" and not has_group() and present_ranks().world_size == 1

    def warn_if_grouped(self) -> None:
        """Warn if there is a group of several ranks now."""
        if not self._looks or not has_group():
            return
        self._looks = False
        if (num := present_ranks().world_size) > 1:
            self._emit(
                "warning",
                f"there is a process group of {num} ranks, and this manager was made before it, so "
                "it saves alone: only what this process holds. Make it after init_process_group, "
                "on all ranks; if each process has a root of its own, pass ranks=None",
            )
