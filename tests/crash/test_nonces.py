"""No nonce is used twice under a key, whatever is killed, forked or copied (nonces_storm.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from storms import storm


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_key_meets_a_nonce_twice_in_ten_million_segments(ram_path: Path) -> None:
    """R33: among processes that were killed, forked and given the same random bytes."""
    counts = storm("nonces_storm", ram_path, "--segments", str(10**7))
    print(counts)
    assert (counts["repeats"], counts["stuck"]) == (0, 0), counts
    assert counts["segments"] >= 10**7
    assert min(counts["killed"], counts["finished"]) >= 20


@pytest.mark.full
def test_nonces_that_meet_a_key_twice_are_found(ram_path: Path) -> None:
    """R33: where secrets are nothing but random bytes that were drawn before."""
    counts = storm("nonces_storm", ram_path, "--segments", "2000", "--mutant", "only_random")
    assert counts["repeats"] > 0, counts
