"""Deleting a checkpoint whose manifest cannot be read: stops, readers, races, object stores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from holdfast import errors
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import Deleted
from holdfast.format.records import Lease
from holdfast.maintenance.delete import delete_damaged, examine_damaged, prune_checkpoints
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.ownership.claim import is_closed
from holdfast.ownership.leases import leased
from holdfast.ownership.process import this_process, utc_text
from holdfast.policy.rules import All
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Kind, Stopped
from marks import full
from runs import new_run
from stops import stops

QUIET = Emitter(())


def new_store() -> tuple[MemoryStore, str]:
    """Three checkpoints, and the folder of the second."""
    store = MemoryStore()
    with new_run().manager(store, sinks=()) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()
    return store, Catalog(store).checkpoints()[1].folder


def damage(store: Store, folder: str) -> bytes:
    """Turn a bit of the manifest over; gives the bytes that were there."""
    key = f"{folder}/{layout.MANIFEST}"
    sound = bytes(store.get(key))
    store.put(key, bytes([*sound[:100], sound[100] ^ 1, *sound[101:]]))
    return sound


def damaged_store() -> tuple[MemoryStore, str]:
    store, folder = new_store()
    damage(store, folder)
    return store, folder


def expect_others_whole(store: Store) -> None:
    entries = Catalog(store).checkpoints()
    assert [entry.step for entry in entries] == [3, 1]
    assert all(verify(store, entry.folder).ok for entry in entries)


@pytest.mark.parametrize("kind", ["stop_after", *full("stop_before")])
def test_a_stop_at_any_change_leaves_it_or_nothing_of_it(kind: Kind) -> None:
    """What is begun again ends the same; the other checkpoints are whole all the time."""
    store, folder = damaged_store()
    clean = FaultyStore(store)
    assert delete_damaged(clean, folder, emit=QUIET) == ""
    assert store.children(folder) == ()
    for fault in stops(kind, clean):
        store, folder = damaged_store()
        with suppress(Stopped):
            delete_damaged(FaultyStore(store, [fault]), folder, emit=QUIET)
        expect_others_whole(store)
        with suppress(errors.UsageError, errors.NoCheckpoint):  # it is gone already
            assert delete_damaged(store, folder, emit=QUIET) == ""
        collect_garbage(store)
        assert {*store.children(folder)} <= {layout.MANIFEST}
        expect_others_whole(store)


def test_where_a_request_may_still_arrive_a_tombstone_stays() -> None:
    """R22: of the save id it has what the folder's name tells."""
    store, folder = damaged_store()
    store.delete(layout.closed_key(1))
    assert delete_damaged(store, folder, emit=QUIET) == ""
    assert store.children(folder) == (layout.MANIFEST,)
    register = Catalog(store).read(folder)
    assert isinstance(register, Deleted)
    assert register.save_id == folder[-8:] + 24 * "0"
    expect_others_whole(store)


def test_what_somebody_reads_stays() -> None:
    """R11, rule 8: a lease is looked for before the run is claimed or anything is marked."""
    store, folder = new_store()
    with leased(store, folder):
        damage(store, folder)
        before = everything(store)
        assert delete_damaged(store, folder, emit=QUIET, watch=lambda _: None).endswith(" reads it")
        assert everything(store) == before
    assert delete_damaged(store, folder, emit=QUIET) == ""
    expect_others_whole(store)


def everything(store: Store) -> dict[str, bytes]:
    """All objects but the heartbeats."""
    return {i.key: bytes(store.get(i.key)) for i in store.list() if "alive" not in i.key}


def test_it_is_not_deleted_under_a_reader_that_comes_after_the_claim() -> None:
    """R11: and then nothing is left that would delete it later."""
    store, folder = damaged_store()
    raced = Raced(store)
    lease = Lease(nonce=32 * "a", beat=1, created=utc_text(), process=this_process())
    key = layout.lease_key(folder, lease.nonce)
    raced.then = lambda: store.put(key, lease.encode())
    assert delete_damaged(raced, folder, emit=QUIET) == "somebody reads it"
    assert not Catalog(store).marks(folder).retired


class Raced(FaultyStore):
    """Something happens as soon as the mark of a deletion is put."""

    then: Callable[[], object]

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:  # type: ignore[override]
        super().put(key, data, if_absent=if_absent)
        if layout.parse_retired(key.rpartition("/")[2]) is not None:
            self.then()


def test_one_that_is_mended_meanwhile_stays_and_is_kept_later_too() -> None:
    store, folder = new_store()
    sound = damage(store, folder)
    raced = Raced(store)
    raced.then = lambda: store.put(f"{folder}/{layout.MANIFEST}", sound)
    assert delete_damaged(raced, folder, emit=QUIET) == "its manifest can be read again"
    assert not Catalog(store).marks(folder).retired
    assert prune_checkpoints(store, All(), emit=QUIET).deleted == []
    assert [entry.step for entry in Catalog(store).checkpoints()] == [3, 2, 1]
    assert verify(store, folder).ok


def test_a_run_that_stood_on_it_by_choice_goes_on_from_what_was_shown() -> None:
    """What a rollback has left behind is not gone back to."""
    store, folder = new_store()
    with new_run().manager(store, sinks=()) as manager:
        manager.resume("step=2")
    damage(store, folder)
    shown = examine_damaged(store, folder).goes_on_from
    assert shown == Catalog(store).checkpoints()[-1].folder
    assert delete_damaged(store, folder, emit=QUIET) == ""
    with new_run().manager(store, sinks=()) as manager:
        found = manager.resume()
    assert found is not None
    assert (found.step, found.folder) == (1, shown)


def test_it_is_refused_where_only_what_a_rollback_left_behind_would_remain() -> None:
    """The next resume would take that; a person has to name what is wanted first."""
    store, _ = new_store()
    newest, _, first = (entry.folder for entry in Catalog(store).checkpoints())
    with new_run().manager(store, sinks=()) as manager:
        manager.resume("step=1")
    damage(store, first)
    before = everything(store)
    with pytest.raises(errors.UsageError, match=r"left .* behind.* First resume"):
        delete_damaged(store, first, emit=QUIET)
    assert everything(store) == before
    with new_run().manager(store, sinks=()) as manager:
        manager.resume(newest)
    assert delete_damaged(store, first, emit=QUIET) == ""
    with new_run().manager(store, sinks=()) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 3


def test_a_later_claim_stops_it_before_anything_goes() -> None:
    """R10, R22."""
    store, folder = damaged_store()
    raced = Raced(store)
    raced.then = lambda: new_run().manager(store, sinks=(), takeover=True).resume()
    with pytest.raises(errors.Superseded):
        delete_damaged(raced, folder, emit=QUIET)
    assert len(store.children(folder)) > 3


def test_an_epoch_with_something_in_flight_is_not_said_to_be_closed() -> None:
    """R10: a mark whose reply was lost may still land."""
    store, folder = damaged_store()
    fault = Fault(kind="lose_reply", op="put", key="*/retired-*")
    with pytest.raises(errors.OutcomeUnknown):
        delete_damaged(FaultyStore(store, [fault]), folder, emit=QUIET)
    assert not is_closed(store, 2)
