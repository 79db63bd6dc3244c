"""A root that somebody made to hurt: every reader, on a thousand of them.

Each is a small honest root with one change, sealed again; see `cases`. Whatever it holds, a reader
answers with an error of ours, passes the checkpoint over, or loads plain values from it. It runs
no code, opens nothing outside of the root, leaves live state as it was when it refuses, and stays
within bounds of memory and time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hostile import mutants, payloads
from tests.hostile.cases import PLACES, cases

ROOT = Path(__file__).parents[2]
NUM_SHARES = 4
MAX_GROWTH = 256 * 2**20
"""Of resident memory, for the worst root; the largest documents have 64 MiB."""


def run_child(*arguments: str, timeout_s: float = 280) -> list[dict[str, Any]]:
    """What the child prints, one object a line."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.child", *arguments],
        cwd=ROOT,
        # One malloc arena, because each reserves address space, which is what is limited.
        env={
            **os.environ,
            "PYTHONPATH": ".:tests:src",
            "MALLOC_ARENA_MAX": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def bad(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Case → what is wrong with it."""
    wrong = {one["name"]: one["problems"] for one in found if one["problems"]}
    greedy = {one["name"]: one["growth"] for one in found if one["growth"] > MAX_GROWTH}
    return {**greedy, **wrong}


@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_no_reader_is_hurt(share: int) -> None:
    """R27, R28, R29, D65; invariants 5 and 6."""
    found = run_child(str(share), str(NUM_SHARES))
    assert len(found) >= 200
    wrong = bad(found)
    assert wrong == {}, "\n".join(f"{name}: {problems}" for name, problems in wrong.items())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(16))
def test_no_reader_is_hurt_by_any_of_them(share: int) -> None:
    """R27, R28, R29, D65: every text in every place, every node in every component."""
    wrong = bad(run_child(str(share), "16", "--all", timeout_s=3500))
    assert wrong == {}, "\n".join(f"{name}: {problems}" for name, problems in wrong.items())


@functools.lru_cache(maxsize=1)
def broken() -> list[dict[str, Any]]:
    return run_child("0", "1", "--mutants")


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_harness_notices(name: str) -> None:
    """R27, R28: our own code, made careless, does not pass."""
    found = [one["problems"] for one in broken() if one["name"] == name]
    assert len(found) == len(mutants.MUTANTS[name].cases)
    for problems in found:
        assert mutants.MUTANTS[name].shows in " ".join(problems)


def test_there_are_enough_of_them() -> None:
    """R28: the short tier has hundreds of roots, and every text and place is in it."""
    thin, everything = (cases(is_thin) for is_thin in (True, False))
    assert len(thin) >= 1000
    assert len(everything) >= 8000
    assert {case.name for case in thin} <= {case.name for case in everything}
    names = " ".join(case.name for case in thin)
    assert all(f"path {number} " in names for number in range(len(payloads.PATHS)))
    assert all(f" as {place}" in names for place in PLACES)
