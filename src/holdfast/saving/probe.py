"""Preflight results of all ranks: rights in the root, and whether a save fits on each disk."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from holdfast.errors import StoreError
from holdfast.ranks.coordinator import LEADER
from holdfast.root.catalog import Catalog
from holdfast.store.base import FreeSpace, Store


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
    held: tuple[int, int] | None = None
    """Bytes and files that its host's own disk has of the run; None: it shares the leader's."""


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


# A file takes whole blocks of the file system, and a save has small records beside its files.
_ROUNDING_NBYTES = 4096
_RECORDS_PER_SAVE = 4


def lack_of_room(
    store: Store, size: SaveSize, kept: int, looks: Sequence[ProbeResult]
) -> Iterator[str]:
    """Check that a save of all ranks fits into the root, and each host's part into what it sees."""
    try:
        rooms = _rooms(store.free_space(), looks)
        whole = _Room(
            nbytes=_most(room.nbytes for room in rooms.values()),
            inodes=_most(room.inodes for room in rooms.values()),
        )
        if (whole.nbytes, whole.inodes) == (None, None):
            return
        held = measure_usage(store)
    except StoreError as error:
        yield f"room: {error}"
        return
    files = size.num_files + _RECORDS_PER_SAVE
    one = (size.nbytes + files * _ROUNDING_NBYTES, files)
    room_for = f"and {kept} older checkpoints"
    saves = f"a save of {size.nbytes} bytes in {size.num_files} files, {room_for}"
    if len(rooms) == 1 or all(found.held is None for found in looks):
        yield from _lacking(store.url, whole, one, kept, held, saves)
    if len(rooms) == 1 or not size.of_ranks:
        return
    for (host, file_system), room in rooms.items():
        nbytes = sum(size.of_ranks[rank][0] for rank in room.ranks)
        files = sum(size.of_ranks[rank][1] for rank in room.ranks)
        there = f"file system {file_system} of {host}" if file_system else host
        part = (nbytes + files * _ROUNDING_NBYTES, files)
        # What retention will free there of the checkpoints that exist: of each an equal part.
        freed: Sequence[int] = [
            had * of_part // max(of_one, 1)
            for had, of_part, of_one in zip(held, part, one, strict=True)
        ]
        if any(found.held is not None for found in looks):
            freed = held if room.held is None else room.held
        ranks = _format_ranks(room.ranks)
        what = f"{nbytes} bytes in {files} files of {ranks}, {room_for}"
        yield from _lacking(f"{store.url} on {there}", room, part, kept, freed, what)


@dataclass(slots=True)
class _Room:
    """Free space of one file system as one host sees it, and the ranks that write there."""

    ranks: list[int] = field(default_factory=list)
    nbytes: int | None = None
    inodes: int | None = None
    held: tuple[int, int] | None = None

    def add_rank(self, rank: int, nbytes: int | None, inodes: int | None) -> None:
        """Add a rank; of several numbers for one file system the least counts."""
        self.ranks.append(rank)
        self.nbytes = _least([self.nbytes, nbytes])
        self.inodes = _least([self.inodes, inodes])


def _rooms(own: FreeSpace, looks: Sequence[ProbeResult]) -> dict[tuple[str, str], _Room]:
    """Group the ranks by host and file system."""
    rooms = {(socket.gethostname(), own.file_system): _Room([LEADER], own.nbytes, own.inodes)}
    for rank, found in enumerate(looks, start=1):
        room = rooms.setdefault((found.host, found.file_system), _Room())
        room.add_rank(rank, found.free_nbytes, found.free_inodes)
        room.held = found.held
    return rooms


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _lacking(
    where: str, room: _Room, one: Sequence[int], kept: int, held: Sequence[int], saves: str
) -> Iterator[str]:
    """Compare the bytes and files of saves with a room; `one` and `held` are (bytes, files)."""
    for unit, of_one, of_held, left in zip(
        ("bytes", "inodes"), one, held, (room.nbytes, room.inodes), strict=True
    ):
        needed = of_one + max(kept * of_one - of_held, 0)
        if left is not None and left < needed:
            yield f"room: {where} needs {needed} more {unit} ({saves}); {left} are free"


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" * (len(ranks) > 10))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def measure_usage(store: Store) -> tuple[int, int]:
    """Count bytes and files of present checkpoints and saves, which retention will free."""
    nbytes = num_files = 0
    for name in Catalog(store).open_attempts():
        with suppress(StoreError):  # a symbolic link: retention frees nothing there
            for info in store.list(f"{name}/"):
                nbytes += info.nbytes
                num_files += 1
    return nbytes, num_files
