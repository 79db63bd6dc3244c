"""Tests that no hostile file of another library runs anything, reads elsewhere or costs much.

Each is opened, its trees are walked and its tensors read, in a fork that may take 256 MiB and 20 s
of processor time more. What it holds is refused by an error of ours, or left out by name.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.hostile.sandbox import assert_noticed, bad, run_child
from tests.interop.hostile.child import MUTANTS

CHILD = "tests.interop.hostile.child"
LEAST = {"pickle": 150, "tensor": 15, "legacy": 8, "zip": 20, "tar": 25, "folder": 7}
LEAST |= {"header": 45, "protobuf": 35, "index": 20, "hdf5": 40}


def test_nothing_runs_and_nothing_outside_is_read() -> None:
    """D65, invariant 5: pickles, zip files, tars, folders and weights of others are only data."""
    found = run_child(CHILD, "cases")
    assert bad(found) == ""
    counts = Counter(one["name"].partition(":")[0] for one in found)
    assert {kind: counts[kind] for kind, least in LEAST.items() if counts[kind] < least} == {}


@pytest.mark.full
def test_no_file_costs_more_than_its_limits() -> None:
    """Invariant 5: files that claim to be large, or are long, end within their bounds."""
    found = run_child(CHILD, "bombs")
    assert len(found) >= 20
    assert bad(found) == ""


@pytest.mark.full
def test_the_harness_notices_code_that_runs_and_files_that_are_read() -> None:
    """D65, invariant 5: a reader with one more global or one limit less is caught."""
    assert_noticed(run_child(CHILD, "mutants"), MUTANTS)
