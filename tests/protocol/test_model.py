"""The commit protocol has no unsafe interleaving, and every one of its rules is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import pytest
from _pytest.mark import ParameterSet

from .configurations import CONFIGURATIONS, LONG_CONFIGURATIONS
from .explorer import Exploration, explore
from .rules import Rules

CAUGHT = {
    "abort_marker_first": ("takeover", "V1"),
    "marker_stays": ("takeover", "V1"),
    "tombstone": ("takeover", "V2"),
    "tombstone_stays": ("takeover", "V1"),
    "listed_when_final": ("takeover", "V15"),
    "unclear_put_is_not_ended": ("own attempts", "V14"),
    "put_again_is_not_ended": ("own attempts", "V9"),
    "close_only_when_ended": ("own attempts", "V14"),
    "death_ends_only_local_puts": ("remote death", "V9"),
    "read_back_after_conflict": ("takeover", "V3"),
    "read_back_after_lost_reply": ("takeover", "V3"),
    "claim_if_absent": ("two takeovers", "V11"),
    "claim_names_resume_point": ("rollback", "V6"),
    "void_claims_skipped": ("rollback", "V4"),
    "reread_after_claim": ("rollback", "V5"),
    "reread_retired_first": ("rollback", "V5"),
    "resolve_again_after_claim": ("takeover", "V10"),
    "latest_claim_is_transparent": ("takeover", "V4"),
    "fence_before_put": ("takeover", "V12"),
    "fence_after_put": ("takeover", "V3"),
    "retired_before_deleting": ("rollback", "V5"),
    "fence_after_retired": ("rollback", "V5"),
    "mark_for_each_epoch": ("dead deleter", "V8"),
    "pins_after_retired": ("pins", "V8"),
    "pin_reads_retired": ("pins", "V8"),
    "pin_reads_manifest": ("pins", "V8"),
    "later_epochs_untouched": ("takeover of rollback", "V4"),
    "resume_point_kept": ("rollback", "V5"),
    "posted_when_durable": ("followers", "V1"),
    "all_have_posted": ("followers", "V1"),
    "leader_marks_silence": ("followers", "V14"),
    "follower_removes_nothing": ("followers", "V1"),
    "follower_marks_silence": ("followers", "V16"),
    "follower_reads_fence": ("orphan", "V16"),
    "one_save_at_a_time": ("followers", "V16"),
    "thinned_mark_first": ("thinning", "V1"),
    "thin_reads_fence": ("thinning", "V5"),
    "leases_after_retired": ("leases", "V13"),
    "leases_after_thinned": ("leases and thinning", "V13"),
    "lease_reads_retired": ("leases", "V13"),
    "lease_reads_thinned": ("leases and thinning", "V13"),
    "lease_reads_manifest": ("leases", "V13"),
    "files_synced_first": ("power cut", "V1"),
    "synced_before_told": ("power cut", "V4"),
    "synced_before_relied_on": ("power cut", "V5"),
    "commit_before_replacing": ("replacing", "V4"),
    "reader_lists_again": ("readers", "V7"),
    "reader_compares_registers": ("readers", "V7"),
}
"""Which configuration shows which broken invariant when one rule is left out."""

_MAKERS = {make(Rules()).name: make for make in (*CONFIGURATIONS, *LONG_CONFIGURATIONS)}
_LARGE = {
    *("takeover", "two takeovers", "takeover of rollback", "death", "remote death", "thinning"),
    *("dead deleter", "two takeovers and gc", "two followers"),
}
"""Configurations of which all states take seconds to minutes."""
_LATE = {"tombstone", "tombstone_stays", "mark_for_each_epoch"}
"""Rules of which the harm shows only after seconds."""


def _tiered(names: Iterable[str], slow: set[str]) -> list[ParameterSet]:
    """The names as parameters; the slow ones run in the full tier only."""
    return [pytest.param(n, marks=[pytest.mark.full] if n in slow else []) for n in names]


def _explore(name: str, rules: Rules, *, is_strict: bool = False) -> Exploration:
    found = explore(_MAKERS[name](rules), rules, is_strict=is_strict)
    print(f"{name}: {found.num_states:,} states, {found.num_worlds:,} worlds")
    return found


def _story(found: Exploration) -> str:
    if found.violation is None:
        return "nothing"
    return "\n  ".join((found.violation.invariant, *found.violation.trace))


@pytest.mark.parametrize("name", _tiered([make(Rules()).name for make in CONFIGURATIONS], _LARGE))
def test_no_interleaving_breaks_an_invariant(name: str) -> None:
    """R10, R20, R22: every state of every small configuration is safe."""
    found = _explore(name, Rules())
    assert found.violation is None, _story(found)
    assert found.num_states > 1_000


@pytest.mark.long
@pytest.mark.parametrize("name", [make(Rules()).name for make in LONG_CONFIGURATIONS])
def test_no_interleaving_of_a_crowd_breaks_an_invariant(name: str) -> None:
    """R10, R20, R22: the same for products of more actors."""
    found = _explore(name, Rules())
    assert found.violation is None, _story(found)
    assert found.num_states > 1_000_000


@pytest.mark.parametrize("rule", _tiered(CAUGHT, _LATE))
def test_a_rule_left_out_is_caught(rule: str) -> None:
    """R10, R20, R22: each rule of the protocol prevents a harm that the model shows."""
    configuration, invariant = CAUGHT[rule]
    found = _explore(configuration, replace(Rules(), **{rule: False}))
    assert found.violation is not None
    assert found.violation.invariant.startswith(f"{invariant} "), _story(found)


def test_every_rule_has_a_mutant() -> None:
    """R22: no rule is modelled without a proof that it matters."""
    assert set(CAUGHT) == {field.name for field in fields(Rules) if field.default}


@pytest.mark.parametrize("name", ["rollback", "takeover of rollback", "pins"])
def test_the_known_limit_of_retired_marks_is_real(name: str) -> None:
    """R20: a stale deleter's mark, put too late to delete, can hide a rollback's target."""
    found = _explore(name, Rules(), is_strict=True)
    assert found.violation is not None
    assert found.violation.invariant.startswith("V6 "), _story(found)
    assert "PutRetired" in _story(found)


def test_a_trace_is_the_shortest_way_and_names_each_step() -> None:
    """R22: what the explorer reports can be followed by a person."""
    found = _explore("takeover", replace(Rules(), read_back_after_conflict=False))
    assert found.violation is not None
    assert [line.split("(")[0] for line in found.violation.trace] == [
        "s1: Begin",
        "s1: ReadClaim",
        "s1: PutManifest",
        "s1: TellSaver",
    ]
