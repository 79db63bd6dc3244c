"""Retention, thinning and pruning beside readers: what waits, what was begun, what goes later."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ownership.test_leases import Clock, folder_at, keys, make, put_lease, steps

from holdfast import errors, load_weights, reading
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.maintenance.verify import verify, verify_root
from holdfast.ownership.leases import SILENT_S, leased
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog
from holdfast.store.base import Buffer
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from runs import Recorder, new_run

QUIET = Emitter(())


@pytest.fixture
def store() -> MemoryStore:
    """Three checkpoints, and no owner."""
    return make(MemoryStore())


class Raced(FaultyStore):
    """A reader comes as soon as the first mark is put: too late to be seen before it."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Put, and let a reader come."""
        super().put(key, data, if_absent=if_absent)
        folder, _, name = key.rpartition("/")
        if layout.parse_retired(name) or layout.parse_thinned(name):
            put_lease(self.inner, folder)


def test_what_is_read_is_not_pruned_and_gets_no_mark(store: MemoryStore) -> None:
    """R20: a mark stays, so that none may be left without need."""
    folder = folder_at(store, 1)
    with leased(store, folder):
        report = prune_checkpoints(store, Last(1), emit=QUIET)
        assert [where for where, _ in report.postponed] == [folder]
        assert "process" in report.postponed[0][1]
        assert len(report.deleted) == 1
        assert not Catalog(store).marks(folder).retired
        assert steps(store) == [3, 1]
        assert verify(store, folder).ok
    assert prune_checkpoints(store, Last(1), emit=QUIET).postponed == []
    assert steps(store) == [3]


def test_a_lease_that_comes_after_the_mark_stops_what_was_begun(store: MemoryStore) -> None:
    """R20, R23: the files stay until the lease is gone; then the deletion is finished."""
    report = prune_checkpoints(Raced(store), Last(1), emit=QUIET, watch=lambda seconds: None)
    assert (report.deleted, report.thinned) == ([], [])
    assert {where for where, _ in report.postponed} == {folder_at(store, 1), folder_at(store, 2)}
    assert steps(store) == [3, 2, 1]
    assert all(verify(store, folder_at(store, step)).ok for step in (1, 2, 3))
    for key in keys(store):
        store.delete(key)
    assert len(prune_checkpoints(store, Last(1), emit=QUIET).deleted) == 2
    assert steps(store) == [3]


def test_thinning_waits_too() -> None:
    store = MemoryStore()
    with new_run().manager(store, sinks=()) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    rule, folder = Last(1) | All().then_drop("optimizer"), folder_at(store, 1)
    with leased(store, folder):
        assert prune_checkpoints(store, rule, emit=QUIET).thinned == []
        assert Catalog(store).marks(folder).thinned == ()
    report = prune_checkpoints(Raced(store), rule, emit=QUIET)
    assert (report.thinned, len(report.postponed)) == ([], 1)
    assert [note for note in verify(store, folder).notes if "dropped" in note] == []
    for key in keys(store):
        store.delete(key)
    assert prune_checkpoints(store, rule, emit=QUIET).thinned == [folder]


def test_who_reads_a_thinned_checkpoint_is_told_what_is_gone(tmp_path: Path) -> None:
    with new_run().manager(tmp_path, sinks=()) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    prune_checkpoints(LocalStore(tmp_path), Last(1) | All().then_drop("optimizer"), emit=QUIET)
    with reading(f"{tmp_path}@step=1") as checkpoint:
        assert checkpoint.notes == ("retention has dropped optimizer of it",)
    with reading(f"{tmp_path}@step=2") as checkpoint:
        assert checkpoint.notes == ()


def test_a_prune_watches_a_reader_on_another_host(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no next time, so it waits until the silence says enough."""
    clock, recorder = Clock(), Recorder()
    monkeypatch.setattr("holdfast.maintenance.delete.Readers", _with_clock(clock))
    put_lease(store, folder_at(store, 1))

    def beat(seconds: float) -> None:
        clock.wait(seconds)
        put_lease(store, folder_at(store, 1), beat=int(clock.now))

    report = prune_checkpoints(store, Last(1), emit=Emitter((recorder,)), watch=beat)
    assert len(report.postponed) == 1
    assert clock.now < 1000 + SILENT_S
    assert any("node-7" in event.message for event in recorder.of("warning"))
    report = prune_checkpoints(store, Last(1), emit=QUIET, watch=clock.wait)
    assert report.postponed == []
    assert (steps(store), keys(store)) == ([3], [])


def _with_clock(clock: Clock) -> object:
    from holdfast.ownership.leases import Readers

    return lambda store: Readers(store, clock=clock)


def test_leases_that_cannot_be_looked_for_delete_nothing(store: MemoryStore) -> None:
    """R6, invariant 8: told, and tried again later."""

    class Blind(FaultyStore):
        def children(self, folder: str = "") -> tuple[str, ...]:
            if folder == layout.READERS:
                raise errors.TransientStoreError("no list today")
            return super().children(folder)

    put_lease(store, folder_at(store, 1))
    with pytest.raises(errors.TransientStoreError):
        prune_checkpoints(Blind(store), Last(1), emit=QUIET)
    assert steps(store) == [3, 2, 1]


def test_weights_are_loaded_and_a_root_is_verified_under_leases(tmp_path: Path) -> None:
    """Invariant 11: nothing is claimed, and no lease is left."""
    run = new_run()
    with run.manager(tmp_path, sinks=()) as manager:
        manager.save(1).wait()
    seen: list[str] = []

    class Watched(LocalStore):
        def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
            seen.append(key.partition("/")[0])
            super().put(key, data, if_absent=if_absent)

    notes = load_weights(tmp_path, new_run(1).model).notes
    assert not any("lease" in note for note in notes)
    assert keys(LocalStore(tmp_path)) == []
    store = Watched(tmp_path)
    assert verify_root(store).ok
    assert seen == []
    assert verify_root(store, keeps=True).ok
    assert seen == [layout.READERS]
    assert keys(store) == []
