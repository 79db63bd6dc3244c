"""SIGKILL at random moments of a process that saves to a real server (tests/crash/storm.py), or
that saves to a folder and sends what it saved there (tests/crash/tiers_storm.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from servers.client import broken_uploads
from servers.fixtures import on
from servers.program import Service
from storms import harmless, storm

SMALL = 4096
"""Elements of each of eight tensors: files of one request."""
LARGE = 640 * 1024
"""20 MiB a save: a multipart upload."""


def check_saves(service: Service, root: str, *, kills: int, size: int, seed: int = 0) -> None:
    """Nothing acknowledged is lost, nothing is torn, and gc leaves neither junk nor uploads."""
    options = ("--kills", str(kills), "--size", str(size), "--seed", str(seed))
    counts = harmless(storm("storm", root, *options))
    assert counts["killed"] >= kills
    assert counts["last_step"] >= max(4, kills / 4)
    assert broken_uploads(service, root) == []


def check_tiers(
    service: Service, root: str, local: Path, *, kills: int, size: int, machines: str, seed: int = 0
) -> None:
    """The same of both tiers, and what the ledger says was sent is there."""
    options = ("--kills", str(kills), "--size", str(size), "--machines", machines)
    local_ones = ("--local", str(local), "--seed", str(seed))
    counts = harmless(storm("tiers_storm", root, *local_ones, *options))
    assert counts["killed"] >= kills
    assert counts["uploaded"] >= max(4, kills / 8)
    assert broken_uploads(service, root) == []


@pytest.mark.full
@on("moto", "gcs", "azurite")
def test_kills_of_a_saving_process_lose_nothing(service: Service, root: str) -> None:
    """R1, R9, R26: and the next process goes on from the newest checkpoint."""
    check_saves(service, root, kills=5, size=SMALL)


@on("localstack")
def test_kills_in_multipart_uploads_leave_no_uploads(service: Service, root: str) -> None:
    """R1, R9, R26."""
    check_saves(service, root, kills=5, size=LARGE)


@on("azurite")
def test_kills_of_a_process_with_two_tiers_lose_nothing(
    service: Service, root: str, tmp_path: Path
) -> None:
    """R1, R9, R23, D19: kills strike uploads and the retention of the remote tier, too."""
    check_tiers(service, root, tmp_path, kills=6, size=SMALL, machines="same")


@on("gcs")
def test_kills_in_multipart_uploads_between_tiers_leave_no_uploads(
    service: Service, root: str, tmp_path: Path
) -> None:
    """R1, R9, R26: on a new machine each time, which nobody but the remote tier helps."""
    check_tiers(service, root, tmp_path, kills=5, size=LARGE, machines="new")


ALL = on("localstack", "moto", "gcs", "azurite", "ceph")


@pytest.mark.stores
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("size", "kills", "seed"), [(SMALL, 100, 0), (SMALL, 100, 1), (LARGE, 50, 2)]
)
@ALL
def test_hundreds_of_kills_lose_nothing(
    service: Service, root: str, size: int, kills: int, seed: int
) -> None:
    """R1, R9, R26."""
    check_saves(service, root, kills=kills, size=size, seed=seed)


@pytest.mark.stores
@pytest.mark.timeout(3600)
# In fifties: each life reads all the milestones that those before it have left.
@pytest.mark.parametrize(
    ("machines", "size", "kills", "seed"),
    [
        ("same", SMALL, 50, 0),
        ("same", SMALL, 50, 1),
        ("new", SMALL, 50, 2),
        ("new", SMALL, 50, 3),
        ("same", LARGE, 25, 4),
        ("new", LARGE, 25, 5),
    ],
)
@ALL
def test_hundreds_of_kills_with_two_tiers_lose_nothing(
    service: Service, root: str, tmp_path: Path, machines: str, size: int, kills: int, seed: int
) -> None:
    """R1, R9, R23, R26, D19."""
    check_tiers(service, root, tmp_path, kills=kills, size=size, machines=machines, seed=seed)


@on("gcs")
def test_the_storm_catches_a_manifest_that_comes_first(service: Service, root: str) -> None:
    """R1: our own code with its order broken does not pass."""
    options = ("--kills", "12", "--size", str(SMALL), "--mutant", "manifest_first")
    assert storm("storm", root, *options)["bad"] > 0


@on("gcs")
def test_the_storm_catches_a_local_copy_that_goes_too_early(
    service: Service, root: str, tmp_path: Path
) -> None:
    """R1, D19."""
    options = ("--local", str(tmp_path), "--kills", "12", "--size", str(SMALL))
    assert storm("tiers_storm", root, *options, "--mutant", "holds_nothing")["bad"] > 0
