"""Messages of a preflight by several ranks: each tells the leader what it found in the root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec


class ProbeNote(msgspec.Struct, frozen=True, tag="probe"):
    """Announcement: all ranks try the root, in this scratch folder, before they save."""

    folder: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one rank that tried the operations of the root."""

    host: str
    sees: bool = True
    """Whether it sees what the leader has written."""
    problems: tuple[str, ...] = ()
    free_nbytes: int | None = None
    """Free space as this rank sees it; None: unknown."""
    free_inodes: int | None = None
    file_system: str = ""
    """Identity, on its host, of the file system that has this space; empty: that of the root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSize:
    """About how many bytes and files a save will have."""

    nbytes: int
    num_files: int
    of_ranks: Sequence[tuple[int, int]] = ()
    """(bytes, files) of the tensors that each rank writes; empty for one rank."""


Ask: TypeAlias = Callable[[str], Sequence[ProbeResult]]
"""Callback of the leader: lets all other ranks try the root in a folder; returns their looks."""


def nobody(folder: str) -> Sequence[ProbeResult]:
    """Default callback where there is no other rank: returns no looks."""
    return ()
