"""Choice of the ranks that a manager works with."""

from __future__ import annotations

from typing import Literal

import torch

from holdfast.events import Emitter
from holdfast.launched import has_group, present_ranks
from holdfast.ranks.alone import Alone
from holdfast.ranks.coordinator import Coordinator


def coordinator_of(ranks: Coordinator | Literal["group"] | None, emit: Emitter) -> Coordinator:
    """Return a coordinator: that of torch's default process group for "group", if there is one.

    All ranks of the group make theirs at the same point of the program. Warns where a launcher has
    started several processes, and there is no group yet.

    Raises:
        RanksSilent: some ranks did not come.
        Disconnected: the group's store cannot be reached.
    """
    if isinstance(ranks, Coordinator):
        return ranks
    # Looked up, not imported: a build of torch may lack it.
    group = getattr(torch, "distributed", None)
    if ranks is None or group is None or not group.is_available():
        return Alone()
    if not has_group():
        started = present_ranks().world_size
        if started > 1:
            emit(
                "warning",
                f"WORLD_SIZE is {started}, and torch.distributed has no process group yet, so this "
                "manager saves alone. Make it after init_process_group; where each process has a "
                "root of its own, pass ranks=None",
            )
        return Alone()
    if group.get_world_size() == 1:
        return Alone()
    from holdfast.ranks.c10d import C10d

    return C10d.of_default_group()
