"""Tests that each mutant of `make mutants` still fits the source, and changes one place of it."""

from __future__ import annotations

from tests.mutants.tables import all_mutants, faults, untouched_folders

LEAST = 60


def test_every_mutant_changes_one_place_and_names_a_promise() -> None:
    assert not list(faults(all_mutants()))


def test_there_are_mutants_of_every_folder() -> None:
    mutants = all_mutants()
    assert not untouched_folders(mutants)
    assert len(mutants) >= LEAST
