"""The mutants of `make mutants` can be run: each changes one place of the source as it is now."""

from __future__ import annotations

from tests.mutants.tables import all_mutants, faults, untouched_folders

LEAST = 60


def test_every_mutant_changes_one_place_and_names_a_promise() -> None:
    assert not list(faults(all_mutants()))


def test_there_are_mutants_of_every_folder() -> None:
    mutants = all_mutants()
    assert not untouched_folders(mutants)
    assert len(mutants) >= LEAST
