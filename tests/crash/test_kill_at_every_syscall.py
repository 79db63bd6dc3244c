"""SIGKILL at the system calls of a save, a deletion, gc and a resume (tests/crash/syscalls.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from children import environment
from marks import full
from ways import Way

SYSCALLS = Path(__file__).with_name("syscalls.py")
NO_PTRACE = 77

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ptrace of Linux")
every_scenario = pytest.mark.parametrize("scenario", ["first_save", "later_save", "gc", "resume"])


def sweep(folder: Path, *options: str) -> dict[str, Any]:
    """Kill at each chosen point; what was counted."""
    done = subprocess.run(
        [sys.executable, str(SYSCALLS), str(folder), *options],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env=environment(),
    )
    if done.returncode == NO_PTRACE:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no ptrace here: {done.stderr}")
    assert done.stdout, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    counts["said"] = done.stderr
    return counts


def assert_all_were_killed_and_nothing_was_lost(counts: dict[str, Any]) -> None:
    assert (counts["bad"], counts["stuck"], counts["missed"]) == (0, 0, 0), counts
    assert counts["killed"] == counts["tried"] > 0


@pytest.mark.parametrize("scenario", ["later_save", *full("first_save", "gc", "resume")])
@pytest.mark.parametrize("stride", [24, *full(6)])
def test_a_kill_at_every_few_changing_calls_loses_nothing(
    ram_path: Path, scenario: str, stride: int
) -> None:
    """R2, R9, R23: calls that only read or wait leave the same bytes behind as the next one."""
    options = ("--calls", "changing", "--stride", str(stride))
    counts = sweep(ram_path, "--scenario", scenario, *options)
    assert_all_were_killed_and_nothing_was_lost(counts)
    assert counts["points"] * stride >= 150


@pytest.mark.full
@pytest.mark.parametrize("command", ["cp", "rm", "rm_latest", "thin"])
def test_a_killed_command_can_be_repeated(ram_path: Path, command: str) -> None:
    """`cp`, `rm` and `thin`: every checkpoint left is whole, and the same command ends the work."""
    options = ("--calls", "changing", "--stride", "17" if command == "cp" else "3")
    counts = sweep(ram_path, "--scenario", command, *options)
    assert_all_were_killed_and_nothing_was_lost(counts)
    assert counts["points"] >= 20


@pytest.mark.parametrize(
    ("scenario", "stride"),
    [
        pytest.param("import", 24, marks=pytest.mark.full),
        pytest.param("export", 1, marks=pytest.mark.full),
        pytest.param("import", 1, marks=pytest.mark.full),
    ],
)
def test_nor_does_one_in_an_import_or_an_export(ram_path: Path, scenario: str, stride: int) -> None:
    """R2; invariants 1, 2: the root verifies, no output is half there, and both can be repeated."""
    options = ("--calls", "changing", "--stride", str(stride))
    counts = sweep(ram_path, "--scenario", scenario, *options)
    assert_all_were_killed_and_nothing_was_lost(counts)
    assert counts["points"] >= {"export": 15, "import": 80}[scenario]


STRIDES = {"overlap": 23, "waves": 37, "links": 17, "direct": 23}


@pytest.mark.full
def test_nor_does_one_in_a_save_made_otherwise(way_path: Path, way: Way) -> None:
    """R2, R9, R14; invariants 1, 2, 4, 10: while training goes on, a few blocks at a time, with
    files of the checkpoint before, and past the page cache."""
    options = ("--calls", "changing", "--stride", str(STRIDES[way.name]))
    counts = sweep(way_path, "--scenario", way.name, *options)
    assert_all_were_killed_and_nothing_was_lost(counts)
    assert counts["went"] > 0, counts
    assert counts["points"] >= 25


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nor_does_one_at_any_changing_call_of_it(way_path: Path, way: Way) -> None:
    """R2, R9, R14."""
    counts = sweep(way_path, "--scenario", way.name, "--calls", "changing")
    assert_all_were_killed_and_nothing_was_lost(counts)
    assert counts["went"] > 0, counts


@pytest.mark.long
@pytest.mark.timeout(3600)
@every_scenario
def test_a_kill_at_every_changing_call_loses_nothing(ram_path: Path, scenario: str) -> None:
    """R2, R9, R23."""
    counts = sweep(ram_path, "--scenario", scenario, "--calls", "changing")
    assert_all_were_killed_and_nothing_was_lost(counts)


@pytest.mark.long
@pytest.mark.timeout(3600)
@every_scenario
def test_a_kill_at_every_call_loses_nothing(ram_path: Path, scenario: str) -> None:
    """R2, R9, R23: every single call of every thread, up to waits that not every life has."""
    counts = sweep(ram_path, "--scenario", scenario, "--calls", "all")
    assert (counts["bad"], counts["stuck"]) == (0, 0), counts
    assert counts["killed"] >= 0.9 * counts["points"] >= 200


@pytest.mark.full
@pytest.mark.parametrize(("mutant", "stride"), [("manifest_first", 14), ("files_first", 7)])
def test_the_sweep_catches(ram_path: Path, mutant: str, stride: int) -> None:
    """R2: our own code with its order broken does not pass."""
    options = ("--scenario", "later_save", "--calls", "changing", "--stride", str(stride))
    counts = sweep(ram_path, *options, "--mutant", mutant)
    assert counts["bad"] > 0, counts
    assert None not in counts["bad_points"], "without a kill"
