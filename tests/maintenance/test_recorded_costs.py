"""Claims about what is read off a root: nothing that is not recorded, and all that is."""

from __future__ import annotations

import pytest
from tests.maintenance.recorded import RecordedRun, dead, elsewhere, three_failures

from holdfast.format import layout
from holdfast.maintenance.recorded_costs import RecordedFacts, read_recorded_costs
from holdfast.ownership.process import this_process
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from runs import new_run


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore) -> RecordedRun:
    return RecordedRun(store)


def endings(facts: RecordedFacts) -> list[str]:
    return [start.ending for start in facts.starts]


def test_a_run_tells_its_costs_its_distances_and_its_failures(store: MemoryStore) -> None:
    three_failures(store)
    facts = read_recorded_costs(store)
    assert [cost.stall_s for cost in facts.saves] == [2.0] * 200
    assert facts.trained_s == 20 * 3600
    assert endings(facts) == ["failed"] * 3 + ["closed"]
    assert facts.history.num_failures == 3
    assert facts.unreadable == ()


def test_a_real_manager_records_all_that_is_needed(store: MemoryStore) -> None:
    live = new_run()
    with live.manager(store, every="1step") as manager:
        for step in (1, 2, 3, 4):
            live.train()
            manager.maybe_save(step)
    with new_run().manager(store) as manager:
        manager.resume()
        running = read_recorded_costs(store)
    facts = read_recorded_costs(store)
    assert [cost.stall_s > 0 for cost in facts.saves] == [True] * 4
    assert facts.trained_s > 0
    assert endings(running) == ["closed", "running"]
    assert endings(facts) == ["closed", "closed"]


def test_reading_writes_nothing(store: MemoryStore) -> None:
    """Invariant 11."""
    three_failures(store)
    faulty = FaultyStore(store)
    assert len(read_recorded_costs(faulty).saves) == 200
    assert {op for op, _ in faulty.ops} <= {"get", "head", "list", "children"}


def test_an_empty_run_tells_nothing(store: MemoryStore) -> None:
    facts = read_recorded_costs(store)
    assert (facts.starts, facts.saves, facts.trained_s) == ((), (), 0)


def test_a_start_that_cannot_be_judged_from_here_is_no_failure(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    assert endings(read_recorded_costs(run.store)) == ["unknown"]


def test_whoever_claimed_next_had_found_the_owner_gone(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    run.start(60, this_process())
    assert endings(read_recorded_costs(run.store)) == ["failed", "running"]


def test_one_that_was_taken_over_may_have_lived(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    run.start(60, dead(), takeover=True)
    assert endings(read_recorded_costs(run.store)) == ["unknown", "failed"]


def test_claims_of_one_process_are_one_failure(run: RecordedRun) -> None:
    """A process that resumes again, or loses a race, claims anew without a close."""
    for at_s in (0, 10, 20):
        run.start(at_s, dead())
    facts = read_recorded_costs(run.store)
    assert endings(facts) == ["continued", "continued", "failed"]
    assert facts.history.num_failures == 1


def test_saves_without_timings_are_not_measured(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 100, timings={})
    run.save(200, 200, timings={"capture_s": 1.0})
    run.save(300, 300, timings={"capture_s": 1.0, "stage_s": -3.0})
    run.save(400, 400, timings={"capture_s": 1.0, "stage_s": 2.0, "write_s": 30.0})
    facts = read_recorded_costs(run.store)
    assert [(cost.stall_s, cost.write_s) for cost in facts.saves] == [(3.0, 30.0)]


def test_the_first_save_of_a_start_is_marked(run: RecordedRun) -> None:
    """It also pays for the memory of the copy."""
    run.start(0)
    run.save(100, 100)
    run.save(200, 200)
    run.start(300)
    run.save(300, 300)
    assert [cost.is_first for cost in read_recorded_costs(run.store).saves] == [True, False, True]


def test_saves_of_a_part_of_the_state_are_no_measure_of_the_whole(run: RecordedRun) -> None:
    run.start(0)
    run.lose()
    run.save(100, 100)
    run.save(150, 150, timings={"capture_s": 0.1, "stage_s": 0.1}, left_out=("optimizer",))
    assert len(read_recorded_costs(run.store).saves) == 1


def test_numbers_that_no_clock_gives_are_passed_over(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 0.0, timings={"capture_s": 1e308, "stage_s": 1e308})
    run.save(200, 1e-308, timings={})
    run.save(300, 1e308, at_s=3)
    run.save(400, -1e308, at_s=4)
    run.save(300, 1000.0)
    facts = read_recorded_costs(run.store)
    assert (facts.trained_s, len(facts.saves)) == (1000, 3)


def test_copies_from_another_run_are_not_measured(run: RecordedRun) -> None:
    """D5."""
    run.start(0)
    run.save(100, 100)
    run.epoch = 99
    run.save(9000, 9000)
    facts = read_recorded_costs(run.store)
    assert (len(facts.saves), facts.trained_s) == (1, 100)


def test_a_root_without_its_claims_still_tells_its_costs(run: RecordedRun) -> None:
    run.epoch = 3
    run.save(100, 100)
    run.save(200, 200)
    facts = read_recorded_costs(run.store)
    assert (len(facts.saves), facts.starts) == (2, ())


def test_damage_is_named_and_left_out(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 100)
    broken = run.save(200, 200)
    run.start(300)
    run.store.put(f"{broken.folder}/{layout.MANIFEST}", b"{}")
    run.store.put(layout.writer_key(2), b"{}")
    facts = read_recorded_costs(run.store)
    assert (len(facts.saves), len(facts.starts)) == (1, 1)
    assert facts.unreadable[0].startswith(f"{broken.folder}: ")
    assert facts.unreadable[1].startswith("claim 2: ")
