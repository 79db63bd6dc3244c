"""What may be said about two tiers, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Last, Tiered, errors
from holdfast.format.manifest import Timestamp
from holdfast.ownership.tiered_options import Lag
from holdfast.policy.rules import Nothing
from tiers import unopened
from ways import Tiny


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"remote": 3}, "remote=3"),
        ({"keep_local": 3}, "keep_local=3"),
        ({"keep_local": False}, "keep_local=False"),
        ({"keep_remote": 0}, "keep_remote=0"),
        ({"max_lag": "3"}, "max_lag"),
        ({"max_lag": "40XB"}, "40XB"),
        ({"max_lag": 40}, "max_lag=40"),
        ({"on_upload_failure": "ignore"}, "ignore"),
        ({"tries": 0}, "tries=0"),
        ({"threads": True}, "threads=True"),
        ({"close_timeout_s": -1}, "close_timeout_s=-1"),
        ({"read_back": 1}, "read_back=1"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], said: str) -> None:
    """D47."""
    with pytest.raises(errors.UsageError, match=said):
        Tiered(**{"local": "a", "remote": "b", **given})


def test_a_rule_for_the_local_tier_is_said_once(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "a", tmp_path / "b", keep_local=Last(1))
    with pytest.raises(errors.UsageError, match="keep_local"):
        unopened(tiered, Tiny(), keep=Last(2))


def test_both_tiers_cannot_be_one_place(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="same place"):
        unopened(Tiered(tmp_path / "a", tmp_path / "a"), Tiny())


@pytest.mark.parametrize(
    ("text", "now", "then", "waiting", "exceeded"),
    [
        ("10step", 20, 10, 0, False),
        ("10step", 21, 10, 0, True),
        ("40kB", 99, 0, 40_000, False),
        ("40kB", 0, 0, 40_001, True),
    ],
)
def test_a_lag_is_exceeded_beyond_what_it_says(
    text: str, now: int, then: int, waiting: int, exceeded: bool
) -> None:
    at = [Timestamp(step=step, wall_s=0.0) for step in (now, then)]
    assert Lag.parse(text).is_exceeded(at[0], at[1], waiting) is exceeded


def test_time_is_time_of_training() -> None:
    now, then = Timestamp(step=9, wall_s=1801.0), Timestamp(step=0, wall_s=0.0)
    assert Lag.parse("30min").is_exceeded(now, then, 0)
    assert not Lag.parse("31min").is_exceeded(now, then, 0)


def test_a_lag_in_what_the_loop_does_not_count_is_an_error() -> None:
    """D47."""
    now = Timestamp(step=9, wall_s=1.0)
    with pytest.raises(errors.UsageError, match="does not count"):
        Lag.parse("1e9tok").is_exceeded(now, now, 0)


def test_keeping_nothing_keeps_the_newest() -> None:
    assert Nothing().quota() == 1
    assert str(Nothing()) == "only the newest"
