"""SIGKILL at moments that are swept over the life of a saving process (tests/crash/storm.py), also
of one that saves with overlap, in waves, or links what has not changed (ways_storm.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marks import full
from storms import harmless, storm
from ways import takes_direct


@pytest.mark.parametrize("num_kills", [5, *full(50)])
def test_kills_lose_nothing(tmp_path: Path, num_kills: int) -> None:
    """R1, R9, D8, D24, D26: nothing torn, nothing acknowledged lost, no junk after gc."""
    counts = harmless(storm("storm", tmp_path / "run", "--kills", str(num_kills)))
    assert counts["killed"] >= num_kills
    assert counts["last_step"] >= 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    """R1: five storms of a hundred kills, with larger states."""
    options = ("--kills", "100", "--seed", str(seed), "--size", str(4096 * 4**seed))
    assert harmless(storm("storm", tmp_path / "run", *options))["killed"] >= 100


@pytest.mark.full
@pytest.mark.parametrize("way", ["overlap", "waves", "links"])
def test_nor_do_kills_of_one_that_saves_otherwise(tmp_path: Path, way: str) -> None:
    """R1, R9, R14; invariants 1, 2, 4, 10: while training goes on, and past the page cache where
    the file system does that."""
    counts = harmless(storm("ways_storm", tmp_path / "run", "--way", way, "--kills", "15"))
    assert counts["killed"] >= 15
    assert counts["last_step"] >= 5
    assert counts["told"][way] >= 10
    assert (counts["told"].get("direct", 0) >= 10) is takes_direct(tmp_path)


@pytest.mark.full
def test_the_storm_of_other_ways_catches(tmp_path: Path) -> None:
    """R1: a manifest that comes before its files."""
    options = ("--way", "overlap", "--kills", "20", "--mutant", "manifest_first")
    counts = storm("ways_storm", tmp_path / "run", *options)
    assert counts["bad"] > 0, counts


@pytest.mark.parametrize("mutant", full("manifest_first", "forgets_the_newest"))
def test_the_storm_catches(tmp_path: Path, mutant: str) -> None:
    """R1: our own code with its order broken does not pass."""
    counts = storm("storm", tmp_path / "run", "--kills", "30", "--mutant", mutant)
    assert counts["bad"] > 0, counts


def _check_evaluations(folder: Path, *options: str) -> dict[str, Any]:
    """Rule 12: once each, none deleted without a value, and `best` is the best of all."""
    counts = harmless(storm("evaluations_storm", folder / "run", *options))
    assert counts["saved"] >= counts["killed"]
    return counts


@pytest.mark.full
def test_killed_evaluators_measure_each_checkpoint_once(tmp_path: Path) -> None:
    """Two evaluators beside a training."""
    _check_evaluations(tmp_path, "--kills", "3", "--only-evaluators")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_fifty_kills_of_evaluators_and_their_training(tmp_path: Path, seed: int) -> None:
    counts = _check_evaluations(tmp_path, "--kills", "50", "--seed", str(seed))
    assert counts["again"] >= 5  # they were killed within evaluations
