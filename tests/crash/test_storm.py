"""SIGKILL at moments that are swept over the life of a saving process (tests/crash/storm.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORM = Path(__file__).with_name("storm.py")


def storm(root: Path, *options: str) -> dict[str, Any]:
    """Run a storm; its counts, after checking that it killed enough to mean something."""
    done = subprocess.run(
        [sys.executable, str(STORM), str(root), *options],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.stdout, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    counts["said"] = done.stderr
    return counts


def test_fifty_kills_lose_nothing(tmp_path: Path) -> None:
    """R1, R9, D8, D24, D26: nothing torn, nothing acknowledged lost, no junk after gc."""
    counts = storm(tmp_path / "run", "--trials", "50")
    assert (counts["bad"], counts["stuck"]) == (0, 0), counts
    assert counts["killed"] >= 30
    assert counts["last_step"] >= 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_five_hundred_kills_lose_nothing(tmp_path: Path, seed: int) -> None:
    """R1: five storms of a hundred kills, with larger states."""
    size = str(4096 * 4**seed)
    counts = storm(tmp_path / "run", "--trials", "100", "--seed", str(seed), "--size", size)
    assert (counts["bad"], counts["stuck"]) == (0, 0), counts
    assert counts["killed"] >= 60


@pytest.mark.parametrize("mutant", ["manifest_first", "forgets_the_newest"])
def test_the_storm_catches(tmp_path: Path, mutant: str) -> None:
    """R1: our own code with its order broken does not pass."""
    counts = storm(tmp_path / "run", "--trials", "30", "--mutant", mutant)
    assert counts["bad"] > 0, counts
