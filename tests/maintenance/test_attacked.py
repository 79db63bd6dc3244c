"""What an attack with scripts found (issue 20): damage that let something be deleted or hidden."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import errors
from holdfast.encryption.store import sealing
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.records import Closed, Retired, Thinned
from holdfast.keys import Encryption, SecretKey
from holdfast.maintenance.delete import delete_damaged, examine_damaged, prune_checkpoints
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify_root
from holdfast.manager import CheckpointManager
from holdfast.ownership.annotations import annotate, reject
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from tiers import without_backoff

QUIET = Emitter(())
SEAL = Encryption(keys=SecretKey(bytes(32)))


def manager_of(store: Any, **options: Any) -> CheckpointManager:
    state = {"tree": {"x": torch.zeros(8)}}
    return CheckpointManager(store, state, **{"sinks": (), "preflight": False, **options})


def saved(store: Any, *steps: int, which: str = "", **options: Any) -> list[str]:
    """Save these steps in a process's life, after a resume of `which`; gives the folders."""
    with manager_of(store, **options) as manager:
        if which:
            manager.resume(which)
        folders = [manager.save(step).wait().folder for step in steps]
        manager.wait()
    return folders


def flip(store: Store, key: str) -> None:
    data = bytes(store.get(key))
    store.put(key, bytes([*data[:60], data[60] ^ 1, *data[61:]]))


@pytest.mark.parametrize("encrypt", [None, SEAL], ids=["plain", "sealed"])
def test_what_resume_rejected_without_a_manifest_is_kept_and_can_be_deleted(encrypt: Any) -> None:
    """The mark of a rejection is what remembers it when `latest` has moved on."""
    inner = MemoryStore()
    newest = saved(inner, 1, 2, encrypt=encrypt)[-1]
    store = inner if encrypt is None else sealing(inner, encrypt)
    inner.delete(f"{newest}/{layout.MANIFEST}")
    inner.delete(layout.closed_key(1))
    reject(store, newest, by="a reader", reason="its manifest is missing")
    saved(inner, 3, which="latest", encrypt=encrypt)
    collect_garbage(inner)
    assert f"{newest}/" in inner.children()
    assert delete_damaged(store, newest, emit=QUIET) == ""
    assert {*inner.children(newest)} <= {layout.MANIFEST}


@pytest.mark.parametrize("encrypt", [None, SEAL], ids=["plain", "sealed"])
@pytest.mark.parametrize("change", [{"pinned": True}, {"add_tags": ("paper",)}], ids=str)
def test_a_pin_or_tag_that_cannot_be_read_still_keeps(encrypt: Any, change: Any) -> None:
    """R20: one flipped bit must not unpin."""
    inner = MemoryStore()
    first = saved(inner, 1, 2, encrypt=encrypt)[0]
    store = inner if encrypt is None else sealing(inner, encrypt)
    entry = Catalog(store).checkpoints()[-1]
    annotate(store, entry, **change)
    flip(inner, f"{first}/{layout.notes_name(1)}")
    saved(inner, 3, 4, which="latest", keep=Last(1), encrypt=encrypt)
    assert prune_checkpoints(store, Last(1), emit=QUIET).deleted == []
    assert [found.step for found in Catalog(store).checkpoints()] == [4, 1]
    annotate(store, entry, pinned=False)
    assert prune_checkpoints(store, Last(1), emit=QUIET).deleted == [first]


@pytest.mark.parametrize("loses", [True, False], ids=["lost", "damaged"])
def test_a_sealed_one_that_is_pinned_is_shown_so(loses: bool) -> None:
    inner = MemoryStore()
    first = saved(inner, 1, 2, encrypt=SEAL)[0]
    store = sealing(inner, SEAL)
    annotate(store, Catalog(store).checkpoints()[-1], pinned=True)
    key = f"{first}/{layout.MANIFEST}"
    inner.delete(key) if loses else flip(inner, key)
    assert examine_damaged(sealing(inner, SEAL), first).pinned  # a new process


def test_deleting_an_old_target_of_a_rollback_hides_no_newer_damage() -> None:
    """The run stood elsewhere by then, so nothing changes but that folder."""
    store = MemoryStore()
    before = saved(store, 1, 2, 3)
    after = saved(store, 12, 13, which=before[1])
    for folder in (after[1], before[1]):
        flip(store, f"{folder}/{layout.MANIFEST}")
    assert delete_damaged(store, before[1], emit=QUIET) == ""
    with manager_of(store) as manager:
        with pytest.raises(errors.CorruptData):
            manager.load()
        found = manager.resume()
    assert found is not None
    assert (found.step, [folder for folder, _ in found.rejected]) == (12, [after[1]])


def test_one_that_is_not_sealed_stops_no_deletion_of_others() -> None:
    """Anybody may have put it there; resume passes it over."""
    inner, other = MemoryStore(), MemoryStore()
    saved(inner, 1, 2, 3, encrypt=SEAL)
    plain = saved(other, 1, 2, 3, 4)[-1]
    for info in other.list(f"{plain}/"):
        inner.put(info.key, other.get(info.key))
    assert len(prune_checkpoints(sealing(inner, SEAL), Last(1), emit=QUIET).deleted) == 2


@pytest.mark.parametrize("change", [{"pinned": True}, {"add_tags": ("paper",)}], ids=str)
def test_a_pin_on_the_local_root_holds_in_the_remote_one(tmp_path: Path, change: Any) -> None:
    """docs/tiers.md; `holdfast pin` knows one root."""
    local, remote = LocalStore(tmp_path / "local"), LocalStore(tmp_path / "remote")
    tiered = Tiered(local, remote, keep_local=All(), keep_remote=Last(2))
    with manager_of(tiered) as manager:
        for step in range(1, 5):
            manager.save(step).wait()
            manager.wait(60)
            if step == 1:
                annotate(local, Catalog(local).checkpoints()[0], **change)
    assert [entry.step for entry in Catalog(remote).checkpoints()] == [4, 3, 1]
    marks = Catalog(remote).checkpoints()[-1].marks
    assert marks.pinned or marks.tags == ("paper",)


@pytest.mark.parametrize(
    ("harm", "claims_after"),
    [*itertools.product(["flipped", "lost"], [0, 1, 2]), ("lost with its close", 1)],
)
def test_a_rollback_whose_claim_cannot_be_read(harm: str, claims_after: int) -> None:
    """Where a later writer tells where the run stood, it stands there; else a warning says so."""
    store = MemoryStore()
    first = saved(store, 1, 2, 3)[0]
    saved(store, which=first)  # claims and saves nothing
    for _ in range(claims_after):
        saved(store, which="latest")
    key = layout.writer_key(2)
    flip(store, key) if harm == "flipped" else store.delete(key)
    if harm == "lost with its close":
        store.delete(layout.closed_key(2))
    told: list[Event] = []
    with manager_of(store, sinks=(told.append,)) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == (1 if claims_after else 3)
    assert any(event.kind == "warning" and key in event.message for event in told)


def test_a_claim_that_cannot_be_read_and_was_no_rollback_changes_nothing() -> None:
    store = MemoryStore()
    saved(store, 1, 2, 3)
    for _ in range(2):
        saved(store, which="latest")
    flip(store, layout.writer_key(2))
    with manager_of(store) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 3


def test_a_checkpoint_of_another_run_is_no_newest_of_this_one() -> None:
    """It has an epoch that this run knows, and a later place in its order."""
    store, other = MemoryStore(), MemoryStore()
    saved(store, 1, 2)
    foreign = saved(other, 1, 2, 3, 4)[-1]
    for info in other.list(f"{foreign}/"):
        store.put(info.key, other.get(info.key))
    with manager_of(store, keep=Last(1)) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, [folder for folder, _ in found.rejected]) == (2, [foreign])
        manager.save(3).wait()
    with pytest.raises(errors.UsageError, match="its manifest is intact"):
        delete_damaged(store, foreign, emit=QUIET)  # it may be the only copy
    assert [entry.step for entry in Catalog(store).checkpoints()] == [3]
    assert [report.folder for report in verify_root(store).checkpoints if not report.ok] == [
        foreign
    ]
    assert f"{foreign}/{layout.INDEX}" in {info.key for info in store.list(f"{foreign}/")}


def begin_to_delete(store: Store, folder: str, epoch: int) -> None:
    """As a writer that was killed on an object store leaves it, where no death can be proven."""
    mark = Retired(by=f"writer {epoch}", reason="not kept").encode()
    store.put(f"{folder}/{layout.retired_name(epoch)}", mark, if_absent=True)
    store.delete(layout.closed_key(epoch))


def test_resuming_what_somebody_began_to_delete_is_refused_before_any_claim() -> None:
    """It claimed the run a hundred times, blamed a race, and moved the run to a dead end."""
    store = MemoryStore()
    first = saved(store, 1, 2)[0]
    third = saved(store, 3, which="latest")[0]
    begin_to_delete(store, first, 2)
    claims = store.children(layout.WRITERS)
    with (
        manager_of(store, takeover=True) as manager,
        pytest.raises(errors.NoCheckpoint, match=r"writer 2 started to delete it.*--dead-epoch 2"),
    ):
        manager.resume(first)
    assert store.children(layout.WRITERS) == claims
    with manager_of(store, takeover=True) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == third


def test_a_deleter_that_is_said_to_be_dead_binds_nobody_any_more() -> None:
    """`holdfast gc --dead-epoch` left its marks, and the checkpoint could never be used again."""
    store = MemoryStore()
    second = saved(store, 2)[0]
    third = saved(store, 3, which="latest")[0]
    begin_to_delete(store, second, 2)
    flip(store, f"{third}/{layout.MANIFEST}")
    with (
        manager_of(store, takeover=True, keep=All()) as manager,
        pytest.raises(errors.NoUsableCheckpoint, match="--dead-epoch 2"),
    ):
        manager.resume()
    assert [key for key, _ in collect_garbage(store, dead_epochs={2}, dry_run=True).removed] == [
        key for key, _ in collect_garbage(store, dead_epochs={2}).removed
    ]
    with manager_of(store, takeover=True) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == second


def test_a_sender_takes_no_pin_back_that_the_remote_root_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/tiers.md: it is a root like any other. A try had committed there, and failed after."""
    without_backoff(monkeypatch)
    pinned_between = 0
    for at in range(4):
        local, inner = MemoryStore(), MemoryStore("remote")
        people = iter([True])

        def told(
            event: Event, here: Store = local, there: Store = inner, people: Any = people
        ) -> None:
            if event.kind != "upload_failed":
                return
            if arrived := Catalog(there).checkpoints():
                for entry in arrived if next(people, False) else ():
                    annotate(there, entry, pinned=True)
            else:
                for pinned in (True, False):
                    annotate(here, Catalog(here).checkpoints()[0], pinned=pinned)

        faults = [
            Fault(kind="fail", op="put", key="step-00000001*"),
            Fault(kind="fail", op="get", key="step-00000001*/manifest.json", at=at),
        ]
        tiers = Tiered(local, FaultyStore(inner, faults), keep_remote=Last(1))
        with manager_of(tiers, sinks=(told,)) as manager:
            for step in (1, 2, 3):
                manager.save(step).wait()
                manager.wait(60)
        is_pinned = not next(people, False)
        pinned_between += is_pinned
        assert [entry.step for entry in Catalog(inner).checkpoints()] == [3, 1][: 1 + is_pinned]
    assert pinned_between


def test_a_tag_that_was_given_while_the_remote_tier_was_away_comes_there() -> None:
    """A pin that it had already hid the tag from every later resume."""
    local, remote = MemoryStore(), MemoryStore("remote")
    with manager_of(Tiered(local, remote)) as manager:
        manager.save(1).wait()
        manager.wait(60)
        manager.pin(1)
    annotate(local, Catalog(local).checkpoints()[0], add_tags=("paper",))
    with manager_of(Tiered(local, remote)) as manager:
        manager.resume()
        manager.wait(60)
    assert Catalog(remote).checkpoints()[0].tags == ("paper",)


def test_a_rollback_on_another_machine_holds_though_the_local_root_was_claimed() -> None:
    """`holdfast prune` claims the local root alone, and gives way; its claim must not be
    remembered."""
    local, remote = MemoryStore("local"), MemoryStore("remote")
    saved(Tiered(local, remote), 1, 2, 3)
    prune_checkpoints(local, Last(2), emit=QUIET)
    with manager_of(Tiered(MemoryStore("other"), remote)) as manager:
        manager.resume("step=2")
    with manager_of(Tiered(local, remote)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2


def test_what_is_being_deleted_in_one_tier_is_read_in_the_other() -> None:
    """By name and by the resume after that, which passed it over and went back further."""
    local, remote = MemoryStore("local"), MemoryStore("remote")
    tiers = Tiered(local, remote)
    second = saved(tiers, 1, 2)[1]
    saved(tiers, 3, which="latest")
    begin_to_delete(local, second, 2)
    remote.delete(layout.closed_key(2))
    for which in ("step=2", "latest"):
        with manager_of(tiers, takeover=True) as manager:
            found = manager.resume(which)
            assert found is not None
            assert found.step == 2


@pytest.mark.parametrize("encrypt", [None, SEAL], ids=["plain", "sealed"])
def test_each_writer_that_may_still_delete_is_named(encrypt: Any) -> None:
    """And the mark of one that is said to be dead goes, though nobody has the key."""
    inner = MemoryStore()
    first = saved(inner, 1, 2, encrypt=encrypt)[0]
    for step in (3, 4, 5):
        saved(inner, step, which="latest", encrypt=encrypt)
    for epoch in (2, 3, 4):
        begin_to_delete(inner, first, epoch)
    inner.put(layout.closed_key(3), Closed(epoch=3, nonce="0" * 32).encode())
    ways = "--dead-epoch 2 --dead-epoch 4"
    with (
        manager_of(inner, takeover=True, encrypt=encrypt) as manager,
        pytest.raises(errors.NoCheckpoint, match=f"writer 2, 4 started.*{ways}`"),
    ):
        manager.resume(first)
    collect_garbage(inner, dead_epochs={2, 4})
    with manager_of(inner, takeover=True, encrypt=encrypt) as manager:
        found = manager.resume(first)
        assert found is not None
        assert found.folder == first


def test_gc_leaves_users_files_with_the_names_of_a_dead_writers_marks() -> None:
    store = MemoryStore()
    first = saved(store, 1, 2)[0]
    saved(store, 3, which="latest")
    names = layout.thinned_name("tree", 2), layout.retired_name(2)
    for name in names:
        store.put(f"{first}/{name}", b'{"mine": 1}')
    collect_garbage(store, dead_epochs={2})
    assert {*names} <= {*store.children(first)}


def test_a_component_that_a_dead_writer_was_to_drop_comes_back() -> None:
    """Where none of its files is gone yet."""
    store = MemoryStore()
    first = saved(store, 1, 2)[0]
    saved(store, 3, which="latest")
    mark = f"{first}/{layout.thinned_name('tree', 2)}"
    store.put(mark, Thinned(by="writer 2", component="tree", reason="a test").encode())
    store.delete(layout.closed_key(2))
    collect_garbage(store, dead_epochs={2})
    with manager_of(store, takeover=True) as manager:
        assert manager.resume(first) is not None
