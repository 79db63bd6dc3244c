"""Tests that no hostile file of another library runs anything, reads elsewhere or costs much.

Each is opened, its trees are walked and its tensors read, in a fork that may take 256 MiB and 10 s
of processor time more. What it holds is refused by an error of ours, or left out by name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.interop.hostile.cases import cases
from tests.interop.hostile.child import MUTANTS

ROOT = Path(__file__).parents[3]


def run_child(choice: str) -> list[dict[str, Any]]:
    """Run the child process, and return the objects that it prints, one a line."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.hostile.child", choice],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def bad(found: list[dict[str, Any]]) -> str:
    """Format a line for each case that had a problem."""
    return "\n".join(f"{one['name']}: {one['problems'][:3]}" for one in found if one["problems"])


def test_nothing_runs_and_nothing_outside_is_read() -> None:
    """D65, invariant 5: pickles, zip files, tars and folders of others are only data."""
    found = run_child("cases")
    assert len(found) >= 300
    assert bad(found) == ""


@pytest.mark.full
def test_no_file_costs_more_than_its_limits() -> None:
    """Invariant 5: files that claim to be large, or are long, end within their bounds."""
    found = run_child("bombs")
    assert len(found) >= 20
    assert bad(found) == ""


def test_the_harness_notices_code_that_runs_and_files_that_are_read() -> None:
    """D65, invariant 5: a reader with one more global or one limit less is caught."""
    found = {one["name"]: " ".join(one["problems"]) for one in run_child("mutants")}
    assert [*found] == [*MUTANTS]
    missed = {name: told for name, told in found.items() if not re.search(MUTANTS[name][1], told)}
    assert missed == {}


def test_each_kind_of_file_has_its_cases() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len({*names})
    for kind, count in (("pickle", 150), ("tensor", 15), ("legacy", 8), ("zip", 20), ("tar", 25)):
        assert sum(name.startswith(kind) for name in names) >= count, kind
