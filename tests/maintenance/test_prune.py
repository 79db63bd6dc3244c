"""Pruning from outside a run: who holds it, and what is left when something goes wrong."""

from __future__ import annotations

import pytest

from holdfast import errors
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import UploadRecord
from holdfast.maintenance.delete import preview, prune_checkpoints
from holdfast.ownership.claim import is_closed
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from runs import new_run

QUIET = Emitter(())


@pytest.fixture
def store() -> MemoryStore:
    """Three checkpoints, and no owner."""
    store = MemoryStore()
    with new_run().manager(store, sinks=()) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    return store


def steps(store: Store) -> list[int]:
    return [entry.step for entry in Catalog(store).checkpoints()]


def test_a_preview_writes_nothing_and_decides_the_same(store: MemoryStore) -> None:
    """Invariant 11."""
    faulty = FaultyStore(store)
    planned = preview(faulty, Last(1))
    assert {op for op, _ in faulty.ops} <= {"get", "head", "list", "children"}
    assert prune_checkpoints(store, Last(1), emit=QUIET).planned == planned


def test_a_prune_holds_an_epoch_and_closes_it(store: MemoryStore) -> None:
    report = prune_checkpoints(store, Last(1), emit=QUIET)
    assert (len(report.deleted), report.thinned, report.failed) == (2, [], [])
    assert Catalog(store).highest_epoch() == 2
    assert is_closed(store, 2)
    assert steps(store) == [3]


def test_what_waits_for_its_upload_stays(store: MemoryStore) -> None:
    """D19: also where nobody can read what is noted of it."""
    first, second, _ = (entry.folder for entry in reversed(Catalog(store).checkpoints()))
    note = UploadRecord(remote="memory://remote", state="waiting", nbytes=1, changed="")
    Ledger(store).put_note(second, note)
    store.put(layout.upload_key(first), b"{")
    report = prune_checkpoints(store, Last(1), emit=QUIET)
    assert report.deleted == []
    assert dict(report.postponed) == {
        first: "it waits for its upload",
        second: "it waits for its upload to memory://remote",
    }
    assert steps(store) == [3, 2, 1]


def test_the_run_goes_on_from_where_it_stood(store: MemoryStore) -> None:
    """The claim of a prune is transparent: it never commits."""
    with new_run().manager(store, sinks=()) as manager:
        manager.resume("step=1")
    prune_checkpoints(store, Last(1), emit=QUIET)
    assert steps(store) == [3, 1]
    with new_run().manager(store, sinks=()) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 1


def test_a_deletion_that_fails_is_told_and_the_rest_goes_on(store: MemoryStore) -> None:
    """Invariant 8."""
    oldest = Catalog(store).checkpoints()[-1].folder
    fault = Fault(kind="fail", op="put", key=f"{oldest}/retired-*", times=None)
    report = prune_checkpoints(FaultyStore(store, [fault]), Last(1), emit=QUIET)
    assert [folder for folder, _ in report.failed] == [oldest]
    assert len(report.deleted) == 1
    assert steps(store) == [3, 1]
    assert is_closed(store, 2)


def test_an_epoch_with_something_in_flight_is_not_said_to_be_closed(store: MemoryStore) -> None:
    """R10: a mark whose reply was lost may still land."""
    fault = Fault(kind="lose_reply", op="put", key="*/thinned-*")
    report = prune_checkpoints(
        FaultyStore(store, [fault]), Last(1) | All().then_drop("optimizer"), emit=QUIET
    )
    assert len(report.failed) == 1
    assert not is_closed(store, 2)


def test_a_later_claim_stops_it_before_anything_goes(store: MemoryStore) -> None:
    """R10, R22."""

    class Raced(FaultyStore):
        """Another manager takes the run over as soon as the first mark is put."""

        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:  # type: ignore[override]
            super().put(key, data, if_absent=if_absent)
            if layout.parse_retired(key.rpartition("/")[2]) is not None:
                new_run().manager(store, sinks=(), takeover=True).resume()

    with pytest.raises(errors.Superseded):
        prune_checkpoints(Raced(store), Last(1), emit=QUIET)
    assert steps(store) == [3, 2, 1]
