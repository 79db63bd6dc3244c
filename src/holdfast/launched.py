"""Rank and world size of this process, from torch's process group or the launcher's environment.

Only looks: starts nothing, and does not import torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from holdfast.errors import UsageError

MEMORY = "HOLDFAST_MEMORY"
"""Variable of the environment that names the folder of `memory_folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Ranks and world sizes of this process. The default is a run of one process."""

    rank: int = 0
    local_rank: int | None = 0
    """Rank among the processes of this host; None, like the next two: not known."""
    world_size: int = 1
    local_world_size: int | None = 1
    node_rank: int | None = 0

    def __post_init__(self) -> None:
        for name, size in (
            ("rank", self.world_size),
            ("local_rank", self.local_world_size),
            ("node_rank", self.world_size),
        ):
            value = getattr(self, name)
            if value is not None and size is not None and not 0 <= value < size:
                raise UsageError(f"{name}={value} must be from 0 to {size - 1}")


def present_ranks() -> Ranks:
    """Return the ranks of torch's default process group, or else those that a launcher has set.

    A launcher, such as torchrun, sets RANK and WORLD_SIZE in the environment; without both this is
    a run of one process. A group has no local ranks: they are the launcher's, if it has set the
    same rank.
    """
    launched = _launched()
    if not has_group():
        return launched
    dist = sys.modules["torch.distributed"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) == (launched.rank, launched.world_size):
        return launched
    return Ranks(
        rank=rank, world_size=world_size, local_rank=None, local_world_size=None, node_rank=None
    )


def ranks_on_host() -> int:
    """Return the number of ranks on this host; 1 if the launcher does not tell."""
    return present_ranks().local_world_size or 1


def has_group() -> bool:
    """Whether torch has a default process group."""
    # Who has a group has imported this.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def memory_folder() -> str | None:
    """Return the folder in shared memory of `holdfast run --memory`; None: not under it."""
    return os.environ.get(MEMORY) or None


def _launched() -> Ranks:
    rank, world_size = _read_environment("RANK"), _read_environment("WORLD_SIZE")
    if rank is None or world_size is None:
        return Ranks()
    if world_size == 1:
        return Ranks(rank=rank)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=_read_environment("LOCAL_RANK"),
        local_world_size=_read_environment("LOCAL_WORLD_SIZE"),
        node_rank=_read_environment("GROUP_RANK"),
    )


def _read_environment(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"the environment has {name}={text!r}, which is not a valid rank")
    return int(text)
