"""Claims about what is read off a root: nothing that is not recorded, and all that is."""

from __future__ import annotations

import pytest
from tests.care.recorded import RecordedRun, dead, elsewhere, three_failures

from holdfast.care.advise import RecordedFacts, gather
from holdfast.engine.claims.process import this_process
from holdfast.format import layout
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
    facts = gather(store)
    assert facts.num_saves == 200
    assert facts.nbytes == 1000
    assert facts.stall is not None
    assert (facts.stall.seconds, facts.stall.count, len(facts.saves)) == (2.0, 32, 200)
    assert facts.write is None
    assert facts.step is not None
    assert facts.step.seconds == pytest.approx(3.58)
    assert facts.spacing is not None
    assert (facts.spacing.steps, facts.spacing.interval_s) == (100, 358)
    assert facts.spacing.is_by_interval
    assert facts.trained_s == 20 * 3600
    assert endings(facts) == ["failed"] * 3 + ["closed"]
    assert facts.num_failures == 3
    assert [start.resume_gap_s for start in facts.starts] == [480, 480, 480, None]
    assert [start.steps_left_behind for start in facts.starts] == [0, 0, 0, None]
    assert facts.unreadable == ()


def test_a_real_manager_records_all_that_is_needed(store: MemoryStore) -> None:
    live = new_run()
    with live.manager(store, every="1step") as manager:
        for step in (1, 2, 3, 4):
            live.train()
            manager.maybe_save(step)
    with new_run().manager(store) as manager:
        manager.resume()
        running = gather(store)
    facts = gather(store)
    assert facts.num_saves == 4
    assert facts.stall is not None
    assert (facts.stall.count, len(facts.saves)) == (3, 4)
    assert facts.stall.seconds > 0
    assert facts.spacing is not None
    assert facts.spacing.is_by_interval
    assert facts.spacing.steps == 1
    assert facts.trained_s > 0
    assert endings(running) == ["closed", "running"]
    assert endings(facts) == ["closed", "closed"]


def test_reading_writes_nothing(store: MemoryStore) -> None:
    """Invariant 11."""
    three_failures(store)
    faulty = FaultyStore(store)
    assert gather(faulty).num_saves == 200
    assert {op for op, _ in faulty.ops} <= {"get", "head", "list", "children"}


def test_an_empty_run_tells_nothing(store: MemoryStore) -> None:
    facts = gather(store)
    assert (facts.stall, facts.write, facts.step, facts.spacing, facts.nbytes) == (None,) * 5
    assert (facts.starts, facts.num_saves, facts.trained_s) == ((), 0, 0)


def test_a_start_that_cannot_be_judged_from_here_is_no_failure(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    assert endings(gather(run.store)) == ["unknown"]


def test_whoever_claimed_next_had_found_the_owner_gone(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    run.start(60, this_process())
    assert endings(gather(run.store)) == ["failed", "running"]


def test_one_that_was_taken_over_may_have_lived(run: RecordedRun) -> None:
    run.start(0, elsewhere())
    run.start(60, dead(), takeover=True)
    assert endings(gather(run.store)) == ["unknown", "failed"]


def test_claims_of_one_process_are_one_failure(run: RecordedRun) -> None:
    """A process that resumes again, or loses a race, claims anew without a close."""
    for at_s in (0, 10, 20):
        run.start(at_s, dead())
    facts = gather(run.store)
    assert endings(facts) == ["continued", "continued", "failed"]
    assert facts.num_failures == 1


def test_steps_that_were_left_behind_are_counted(run: RecordedRun) -> None:
    run.start(0)
    first = run.save(100, 100)
    run.save(200, 200)
    run.start(300, point=first, rollback=True)
    (failed, _) = gather(run.store).starts
    assert (failed.steps_left_behind, failed.resume_gap_s) == (100, 200)


def test_a_gap_without_its_commit_is_not_made_up(run: RecordedRun) -> None:
    """Retention deleted it, or the next start went on from an older one."""
    run.start(0)
    first = run.save(100, 100)
    run.start(200, point=first)
    run.save(200, 200)
    run.start(300, point=first)
    starts = gather(run.store).starts
    assert [start.resume_gap_s for start in starts] == [100, None, None]
    assert [start.steps_left_behind for start in starts] == [0, 100, None]
    run.store.delete(f"{first.folder}/{layout.MANIFEST}")
    starts = gather(run.store).starts
    assert [start.resume_gap_s for start in starts] == [None] * 3
    assert [start.steps_left_behind for start in starts] == [None] * 3


@pytest.mark.parametrize("created", ["yesterday", "", "2026-11-20T12:00:00"])
def test_a_time_that_says_nothing_is_passed_over(run: RecordedRun, created: str) -> None:
    run.start(0)
    point = run.save(100, 100, created=created)
    run.start(300, point=point)
    assert gather(run.store).starts[0].resume_gap_s is None


def test_distances_skip_what_retention_deleted(run: RecordedRun) -> None:
    """Two saves of which one between is gone are no interval; a step is still a step."""
    run.start(0)
    run.save(100, 100)
    run.save(200, 200)
    run.lose(7)
    run.save(1000, 1000)
    facts = gather(run.store)
    assert facts.spacing is not None
    assert (facts.spacing.steps, facts.spacing.num_pairs) == (100, 1)
    assert facts.step is not None
    assert facts.step.count == 2
    assert facts.trained_s == 1000


def test_saves_by_hand_in_between_do_not_shorten_the_interval(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 100)
    run.save(150, 150, reason="manual")
    run.save(200, 200, reason="at 200step, every 100step")
    run.save(210, 210, reason="final")
    facts = gather(run.store)
    assert facts.spacing is not None
    assert (facts.spacing.steps, facts.spacing.num_pairs) == (100, 1)
    assert facts.spacing.interval_s == 98


def test_where_only_hands_saved_their_distance_is_taken(run: RecordedRun) -> None:
    run.start(0)
    for step in (100, 200, 300):
        run.save(step, step, reason="manual")
    facts = gather(run.store)
    assert facts.spacing is not None
    assert (facts.spacing.steps, facts.spacing.is_by_interval) == (100, False)


def test_distances_do_not_reach_across_starts(run: RecordedRun) -> None:
    run.start(0)
    point = run.save(100, 100)
    run.start(200, point=point)
    run.save(200, 200)
    facts = gather(run.store)
    assert (facts.spacing, facts.step) == (None, None)


def test_saves_without_timings_are_not_measured(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 100, timings={})
    run.save(200, 200, timings={"capture_s": 1.0})
    run.save(300, 300, timings={"capture_s": 1.0, "stage_s": -3.0})
    run.save(400, 400, timings={"capture_s": 1.0, "stage_s": 2.0, "write_s": 30.0})
    facts = gather(run.store)
    assert facts.stall is not None
    assert (facts.stall.seconds, facts.stall.count) == (3.0, 1)
    assert facts.write is not None
    assert (facts.write.seconds, facts.write.count) == (30.0, 1)


def test_the_first_save_of_a_start_counts_only_where_it_is_alone(run: RecordedRun) -> None:
    """It also pays for the memory of the copy."""
    slow = {"capture_s": 1.0, "stage_s": 9.0, "write_s": 30.0}
    run.start(0)
    run.save(100, 100, timings=slow)
    alone = gather(run.store)
    run.save(200, 200)
    run.start(300)
    run.save(300, 300, timings=slow)
    both = gather(run.store)
    assert alone.stall is not None
    assert both.stall is not None
    assert (alone.stall.seconds, alone.stall.count) == (10, 1)
    assert (both.stall.seconds, both.stall.count, len(both.saves)) == (2, 1, 3)


def test_saves_of_a_part_of_the_state_are_no_measure_of_the_whole(run: RecordedRun) -> None:
    run.start(0)
    run.lose()
    run.save(100, 100)
    run.save(150, 150, timings={"capture_s": 0.1, "stage_s": 0.1}, left_out=("optimizer",))
    facts = gather(run.store)
    assert (facts.num_saves, len(facts.saves)) == (2, 1)


def test_numbers_that_no_clock_gives_are_passed_over(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 0.0, timings={"capture_s": 1e308, "stage_s": 1e308})
    run.save(200, 1e-308, timings={})
    run.save(300, 1e308, at_s=3)
    run.save(400, -1e308, at_s=4)
    run.save(300, 1000.0)
    facts = gather(run.store)
    assert (facts.spacing, facts.step, facts.trained_s) == (None, None, 1000)
    assert facts.stall is not None
    assert facts.stall.count == 3


def test_copies_from_another_run_are_not_measured(run: RecordedRun) -> None:
    """D5."""
    run.start(0)
    run.save(100, 100)
    run.epoch = 99
    run.save(9000, 9000)
    facts = gather(run.store)
    assert (facts.num_saves, facts.trained_s) == (1, 100)


def test_a_root_without_its_claims_still_tells_its_costs(run: RecordedRun) -> None:
    run.epoch = 3
    run.save(100, 100)
    run.save(200, 200)
    facts = gather(run.store)
    assert (facts.num_saves, facts.starts) == (2, ())


def test_damage_is_named_and_left_out(run: RecordedRun) -> None:
    run.start(0)
    run.save(100, 100)
    broken = run.save(200, 200)
    run.start(300)
    run.store.put(f"{broken.folder}/{layout.MANIFEST}", b"{}")
    run.store.put(layout.writer_key(2), b"{}")
    facts = gather(run.store)
    assert (facts.num_saves, len(facts.starts)) == (1, 1)
    assert facts.unreadable[0].startswith(f"{broken.folder}: ")
    assert facts.unreadable[1].startswith("claim 2: ")
