"""SIGKILL at moments that are swept over the life of a saving process (tests/crash/storm.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from storms import harmless, storm


def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    """R1, R9, D8, D24, D26: nothing torn, nothing acknowledged lost, no junk after gc."""
    counts = harmless(storm("storm", tmp_path / "run", "--kills", "50"))
    assert counts["killed"] >= 50
    assert counts["last_step"] >= 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    """R1: five storms of a hundred kills, with larger states."""
    options = ("--kills", "100", "--seed", str(seed), "--size", str(4096 * 4**seed))
    assert harmless(storm("storm", tmp_path / "run", *options))["killed"] >= 100


@pytest.mark.parametrize("mutant", ["manifest_first", "forgets_the_newest"])
def test_the_storm_catches(tmp_path: Path, mutant: str) -> None:
    """R1: our own code with its order broken does not pass."""
    counts = storm("storm", tmp_path / "run", "--kills", "30", "--mutant", mutant)
    assert counts["bad"] > 0, counts
