"""Claims about `every="auto"` on a real manager: what it is told, and what it makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.maintenance.recorded import RecordedRun, three_failures

import holdfast.manager
from holdfast import save_controller
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.recorded_costs import read_recorded_costs
from holdfast.manager import CheckpointManager
from holdfast.policy.auto import Auto
from holdfast.policy.savers import SavePolicy, SideSaver
from holdfast.saving import participants, progress_counters
from holdfast.saving import save as save_module
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from runs import Recorder, Run, new_run

HOUR = 3600.0


class Clock:
    """Stands still unless a test turns it on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    monotonic = perf_counter = __call__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(holdfast.manager, "time", clock)
    monkeypatch.setattr(save_controller, "time", clock)
    monkeypatch.setattr(progress_counters, "time", clock)
    monkeypatch.setattr(save_module, "time", clock)
    monkeypatch.setattr(participants, "time", clock)
    return clock


@dataclass
class Loop:
    """A training loop of 10 s a step that waits for its saves.

    To copy the state takes `stall_s`, to write it `write_s`.
    """

    manager: CheckpointManager
    clock: Clock
    run: Run
    step: int = 0
    stall_s: float = 2.0
    write_s: float = 5.0
    saved: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        prepare = self.manager._session.saver.prepare_save

        def slow_prepare(captured: Any, **options: Any) -> Any:
            self.clock.now_s += self.stall_s
            return prepare(captured, **options)

        self.manager._session.saver.prepare_save = slow_prepare  # type: ignore[method-assign]

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.clock.now_s += 10.0
            self.run.train()
            began_s = self.clock.now_s
            if self.manager.maybe_save(self.step) is not None:
                self.saved.append(began_s)
                self.manager.wait()

    @property
    def auto(self) -> Auto:
        auto = self.manager._session.schedule.auto
        assert auto is not None
        return auto


class SlowStore(MemoryStore):
    """To write a checkpoint takes as long as the loop says."""

    loop: Loop
    clock: Clock

    def put(self, key: str, data: Any, **options: Any) -> None:
        if key.endswith("index.json"):
            self.clock.now_s += self.loop.write_s
        super().put(key, data, **options)


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
def loop(clock: Clock, sink: Recorder) -> Iterator[Loop]:
    store, run = SlowStore(), new_run()
    with run.manager(store, every=Auto(mtbf="6h"), sinks=(sink,)) as manager:
        store.clock, store.loop = clock, Loop(manager, clock, run)
        yield store.loop


def test_the_first_save_comes_after_a_minute_and_the_next_by_what_it_cost(
    loop: Loop, sink: Recorder
) -> None:
    loop.steps(34)
    plan = loop.auto.plan
    assert plan is not None
    loop.steps(3)
    first, second = loop.saved
    assert first - 1000 == 60
    assert plan.interval_s == pytest.approx((2 * 2 * 6 * HOUR) ** 0.5, rel=0.02)
    assert 0 <= second - first - plan.cycle_s < 10
    reasons = [checkpoint.reason for checkpoint in loop.manager.list()]
    assert reasons[::-1][:2] == ["measuring (auto)", "every 4.88 min (auto)"]
    told = sink.of("interval")[0]
    assert told.message == (
        "every 4.88 min: a save costs 2 s and is written in 5 s, failures every 6 h (as given), "
        "cap 5%"
    )
    assert told.fields == {"interval_s": plan.interval_s, "limit": "optimum"}


def test_a_store_that_becomes_slow_makes_saves_rarer_and_says_so(
    loop: Loop, sink: Recorder
) -> None:
    loop.steps(200)
    before = loop.auto.plan
    loop.write_s = 900.0
    loop.steps(60)
    after = loop.auto.plan
    assert before is not None
    assert after is not None
    assert after.interval_s > 3 * before.interval_s
    assert "a save costs 2 s and is written in 15 min" in sink.of("interval")[-1].message
    assert "as long as a save is written" in sink.of("interval")[-1].message


@pytest.mark.full
def test_cheaper_saves_make_it_shorter(loop: Loop, sink: Recorder) -> None:
    loop.stall_s = 60.0
    loop.steps(150)
    dear = loop.auto.plan
    loop.stall_s = 0.5
    loop.steps(1000)
    cheap = loop.auto.plan
    assert dear is not None
    assert cheap is not None
    assert cheap.interval_s < 0.5 * dear.interval_s
    assert len(sink.of("interval")) >= 2


def test_after_a_resume_nothing_jumps(loop: Loop, clock: Clock) -> None:
    loop.steps(300)
    before = loop.auto.plan
    loop.manager.close()
    with loop.run.manager(loop.manager.store, every=Auto(mtbf="6h"), sinks=()) as manager:
        assert manager.resume() is not None
        manager.wait()
        again = Loop(manager, clock, loop.run)
        assert again.auto.plan == before
        found = manager.list()[0]
        again.step = found.step
        began_s = clock.now_s
        again.steps(60)
        assert before is not None
        assert 0 <= again.saved[0] - began_s - before.cycle_s < 10


def test_it_decides_by_what_the_root_records_as_advise_does(loop: Loop) -> None:
    loop.steps(400)
    facts = read_recorded_costs(loop.manager.store)
    plan = loop.auto.plan
    assert plan is not None
    fresh = Auto(mtbf="6h")
    fresh.learn(facts.history)
    assert fresh.plan == plan


def test_failures_of_earlier_starts_are_learnt_at_the_resume(tmp_path: Path) -> None:
    """What `holdfast advise` learns from the same root."""
    store = LocalStore(tmp_path)
    run = new_run()
    with run.manager(store, sinks=()) as manager:
        manager.save(1)
    record = RecordedRun(store)
    record.epoch = 1
    for _ in range(5):
        record.start(0.0)
    with run.manager(store, every="auto", sinks=()) as manager:
        manager.resume()
        manager.wait()
        auto = manager._session.schedule.auto
        assert auto is not None
        assert auto.plan is not None
        assert auto.plan.num_failures == 5


def test_a_recorded_root_gives_its_interval_before_the_first_step() -> None:
    store = MemoryStore()
    three_failures(store)
    auto = Auto()
    auto.learn(read_recorded_costs(store).history)
    assert auto.plan is not None
    assert auto.plan.num_failures == 3
    assert auto.due(None, None, Timestamp(step=1, wall_s=auto.plan.cycle_s - 0.1)) is None
    assert auto.due(None, None, Timestamp(step=1, wall_s=auto.plan.cycle_s))


def test_a_save_that_is_there_already_is_not_measured_twice(loop: Loop) -> None:
    loop.steps(6)
    plan = loop.auto.plan
    assert loop.manager.save(6).wait().step == 6
    loop.manager.wait()
    assert len(loop.manager.list()) == 1
    assert loop.auto.plan == plan


def test_while_a_save_is_written_the_next_one_waits(clock: Clock) -> None:
    hang = Fault(kind="hang", op="put", key="*index.json", at=0)
    run = new_run()
    store = FaultyStore(MemoryStore(), [hang])
    with run.manager(store, every=Auto(at_most="10min"), sinks=()) as manager:
        clock.now_s += 60
        first = manager.maybe_save(1)
        assert first is not None
        assert hang.reached.wait(timeout=60)
        clock.now_s += 300
        assert manager.maybe_save(2) is None
        hang.release.set()
        first.wait()
        manager.wait()
        assert manager._session.schedule.auto is not None
        clock.now_s += 280
        assert manager.maybe_save(3) is not None


def test_a_record_that_cannot_be_read_is_told_and_does_not_stop_training(clock: Clock) -> None:
    """Invariant 8."""
    store, run, sink = MemoryStore(), new_run(), Recorder()
    with run.manager(store, sinks=()) as manager:
        manager.save(1)
    broken = FaultyStore(store)
    with run.manager(broken, every="auto", sinks=(sink,)) as manager:
        tuning = manager._session.measurements
        manager.resume()
        manager.wait()
        assert manager._session.schedule.auto is not None
        tuning._learnt_epoch = None
        failing = FaultyStore(store, [Fault(kind="fail", op="children", times=None)])
        tuning._store = failing
        clock.now_s += 60
        pending = manager.save(2)
        assert pending.wait().step == 2
        manager.wait()
        (told,) = (e for e in sink.of("housekeeping_failed") if "auto" in e.message)
        assert "cannot read the record" in told.message
        assert len(manager._session.schedule.auto._known.history.saves) >= 1


def test_savers_of_a_part_cannot_have_it() -> None:
    with pytest.raises(UsageError, match='"auto" is only for saves of the whole state'):
        SideSaver("weights", every="auto", components=["model"])


def test_a_policy_with_it_makes_ephemeral_saves(clock: Clock) -> None:
    run = new_run()
    policy = SavePolicy(permanent="100step", ephemeral="auto")
    with run.manager(MemoryStore(), every=policy, sinks=()) as manager:
        loop = Loop(manager, clock, run)
        loop.steps(100)
        classes = [checkpoint.save_class for checkpoint in manager.list()][::-1]
    assert classes[0] == "ephemeral"
    assert classes[-1] == "permanent"
