"""R38: room for a save is compared by host and file system, and shared storage is counted once."""

from __future__ import annotations

import socket

import pytest
from typing_extensions import override

from holdfast.saving.probe import ProbeResult, SaveSize, lack_of_room
from holdfast.store.base import FreeSpace
from holdfast.store.memory import MemoryStore

HERE = socket.gethostname()
MB = 10**6
SIZE = SaveSize(nbytes=40 * MB, num_files=8, of_ranks=[(10 * MB, 2)] * 4)
"""Of four ranks, each of which writes a quarter."""


class Seen(MemoryStore):
    """A store whose free space the leader sees as given."""

    def __init__(self, free: FreeSpace) -> None:
        super().__init__()
        self._free = free

    @override
    def free_space(self) -> FreeSpace:
        return self._free


def lacking(*mb: tuple[str, str, int | None], kept: int = 0, size: SaveSize = SIZE) -> list[str]:
    """What is said where each rank, the leader first, sees (host, file system, free megabytes)."""
    free = [None if of_rank is None else of_rank * MB for _, _, of_rank in mb]
    looks = [
        ProbeResult(host=host, file_system=file_system, free_nbytes=nbytes)
        for (host, file_system, _), nbytes in zip(mb[1:], free[1:], strict=True)
    ]
    return [*lack_of_room(Seen(FreeSpace(free[0], None, mb[0][1])), size, kept, looks)]


def test_a_file_system_that_several_hosts_see_is_counted_once() -> None:
    seen = [(HERE, "7", 30), (HERE, "7", 30), ("b", "9", 30), ("b", "9", 30)]
    (said,) = lacking(*seen)
    assert "a save of 40000000 bytes" in said
    assert "30000000 are free" in said
    assert not lacking(*((host, disk, 41) for host, disk, _ in seen))


def test_what_all_ranks_of_a_host_write_must_fit_into_what_it_sees() -> None:
    here = [(HERE, "7", 900), (HERE, "7", 900)]
    (said,) = lacking(*here, ("b", "9", 15), ("b", "9", 15))
    assert "on file system 9 of b needs" in said
    assert "20000000 bytes in 4 files of ranks 2, 3" in said
    assert "15000000 are free" in said
    assert not lacking(*here, ("b", "9", 21), ("b", "9", 21))


def test_two_file_systems_of_a_host_are_compared_apart() -> None:
    here = [(HERE, "7", 900), (HERE, "7", 900)]
    assert not lacking(*here, (HERE, "8", 11), (HERE, "9", 11))
    said = lacking(*here, (HERE, "8", 9), (HERE, "9", 9))
    assert ["of rank 2" in said[0], "of rank 3" in said[1]] == [True, True]


@pytest.mark.parametrize("odd", range(4))
def test_of_ranks_that_share_a_file_system_the_least_counts(odd: int) -> None:
    (said,) = lacking(*((HERE, "7", 5 if rank == odd else 900) for rank in range(4)))
    assert "5000000 are free" in said


def test_checkpoints_kept_beside_are_counted_for_each_host_too() -> None:
    seen = [(HERE, "7", 900), (HERE, "7", 900), ("b", "9", 50), ("b", "9", 50)]
    assert not lacking(*seen, kept=1)
    (said,) = lacking(*seen, kept=2)
    assert "of ranks 2, 3, and 2 older checkpoints" in said


def test_a_host_that_knows_nothing_of_its_room_does_not_matter() -> None:
    assert not lacking((HERE, "7", 900), (HERE, "7", None), ("b", "", None), ("b", "", None))
    assert not lacking(*[(HERE, "", None)] * 4)
    (said,) = lacking((HERE, "", None), ("b", "9", 39), ("b", "9", 39), ("b", "9", 39))
    assert "39000000 are free" in said


def test_of_one_rank_only_the_whole_is_compared() -> None:
    alone = SaveSize(nbytes=40 * MB, num_files=8)
    assert len(lacking((HERE, "7", 39), size=alone)) == 1
    assert not lacking((HERE, "7", 41), size=alone)
