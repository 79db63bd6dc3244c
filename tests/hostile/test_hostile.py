"""Tests that no reader is harmed by a hostile checkpoint root; there are thousands of these.

Each is a small valid root with one change and right digests; see `cases`. Whatever it holds, a
reader raises an error of ours, passes the checkpoint over, or loads plain values from it. It runs
no code, opens nothing outside of the root, leaves live state as it was when it refuses, and stays
within bounds of memory and time.
"""

from __future__ import annotations

import pytest
from tests.hostile import mutants, payloads
from tests.hostile.cases import FIELDS, KINDS, PLACES, TREES, cases
from tests.hostile.sandbox import assert_noticed, bad, run_child

from marks import full

NUM_SHARES = 4
MAX_GROWTH = 256 * 2**20
"""Limit of the growth of resident memory on any root; the largest documents have 64 MiB."""


CHILD = "tests.hostile.child"


@pytest.mark.parametrize("share", [0, *full(*range(1, NUM_SHARES))])
def test_no_reader_is_hurt_by_a_sample(share: int) -> None:
    """R27, R28, R29, D65; invariants 5 and 6: every place and every kind of file."""
    assert bad(run_child(CHILD, share, NUM_SHARES, "sample"), max_growth=MAX_GROWTH) == ""


@pytest.mark.full
@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_no_reader_is_hurt(share: int) -> None:
    """R27, R28, R29, D65; invariants 5 and 6: a thousand and more."""
    assert bad(run_child(CHILD, share, NUM_SHARES, "some"), max_growth=MAX_GROWTH) == ""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(16))
def test_no_reader_is_hurt_by_any_of_them(share: int) -> None:
    """R27, R28, R29, D65: every text in every place, every node in every component."""
    found = run_child(CHILD, share, 16, "all", timeout_s=3500)
    assert bad(found, max_growth=MAX_GROWTH) == ""


@pytest.mark.full
def test_the_harness_notices() -> None:
    """R27, R28: every mutant of our readers is caught, and no case hides the fault of another.

    In a fork that several cases share, the one that fails runs again in a fork of its own.
    """
    found = run_child(CHILD, 0, 1, "mutants")
    together = [(one["problems"], one.get("before")) for one in found if one["name"] == "together"]
    crashed = (["ended by SIGSEGV"], None)
    assert together == [([], 0), crashed, ([], 0), (["bad"], 0), ([], 0), ([], 0), ([], 1)]
    assert_noticed(found[: -len(together)], mutants.MUTANTS)


def test_there_are_enough_of_them() -> None:
    """R28: a sample has every place and every kind of file; what the tiers add has every text."""
    sample, some, everything = ({c.name for c in cases(size)} for size in ("sample", "some", "all"))
    assert len(sample) >= 150
    assert len(some) >= 1000
    assert len(everything) >= 8000
    assert sample | some <= everything
    texts = range(len(payloads.PATHS))
    assert all(any(name.startswith(f"path {n} ") for name in some) for n in texts)
    places = [f" as {place}" for place in PLACES] + [f", as {place}" for place in TREES]
    kinds = [f"{kind} in place of " for kind in KINDS]
    documents = [f"\n{document} " for document in FIELDS]
    joined = "\n".join(["", *sample])
    assert [part for part in (*places, *kinds, *documents) if part not in joined] == []
