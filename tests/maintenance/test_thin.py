"""Dropping components of checkpoints that stay: what readers see, and a stop at every operation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.crash.test_every_operation import Stores, stores  # noqa: F401
from torch import nn

from holdfast import errors, load_weights
from holdfast.format import layout
from holdfast.format.records import Thinned
from holdfast.maintenance.retention import candidate
from holdfast.maintenance.verify import verify, verify_root
from holdfast.manager import CheckpointManager
from holdfast.ownership.claim import Claim
from holdfast.ownership.deletion import thin
from holdfast.ownership.leases import Readers
from holdfast.policy.rule import Rule
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from runs import Recorder, Run, new_run
from ways import Tiny

THINNING: Rule = Last(1) | All().then_drop("optimizer", "scheduler")


@pytest.fixture
def thinned() -> tuple[MemoryStore, Run, Recorder]:
    """A run of three checkpoints, of which the older two have lost what only a resume needs."""
    store, run, recorder = MemoryStore(), new_run(), Recorder()
    with run.manager(store, keep=THINNING, sinks=(recorder,)) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
        manager.wait()
    return store, run, recorder


def entry_at(store: Store, step: int) -> Entry:
    (found,) = [entry for entry in Catalog(store).checkpoints() if entry.step == step]
    return found


def _claim(epoch: int) -> Claim:
    return Claim(epoch=epoch, nonce="", resumed_from=None)


def test_the_files_of_dropped_components_go_and_the_rest_is_whole(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    store, _, recorder = thinned
    for step in (1, 2):
        entry = entry_at(store, step)
        names = store.children(entry.folder)
        assert not [n for n in names if n.startswith(("optimizer", "scheduler"))]
        assert candidate(store, entry).dropped == ("optimizer", "scheduler")
        assert candidate(store, entry).components == ("model", "counters", "rng")
        left = set(names) & set(entry.manifest.files)
        nbytes = sum(store.head(f"{entry.folder}/{name}").nbytes for name in left)
        assert candidate(store, entry).nbytes == nbytes
    assert candidate(store, entry_at(store, 3)).dropped == ()
    events = recorder.of("thinned")
    assert [event.step for event in events] == [1, 2]
    assert events[0].fields["components"] == ("optimizer", "scheduler")
    assert "all are kept without optimizer, scheduler" in events[0].message


def test_verify_says_dropped_not_damaged(thinned: tuple[MemoryStore, Run, Recorder]) -> None:
    """R18: nothing is wrong; and damage to what is left is still found."""
    store = thinned[0]
    report = verify(store, entry_at(store, 1).folder)
    assert report.ok
    assert report.notes == (
        "component optimizer was dropped by retention",
        "component scheduler was dropped by retention",
    )
    full = verify(store, entry_at(store, 3).folder)
    assert (report.num_files, report.num_tensors) < (full.num_files, full.num_tensors)
    assert verify_root(store).ok
    key = f"{entry_at(store, 1).folder}/model-00000.safetensors"
    store.put(key, store.get(key)[:-1] + b"\x01")
    assert not verify(store, entry_at(store, 1).folder).ok


def test_a_missing_file_of_a_component_that_nobody_dropped_is_damage(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    """R16."""
    store = thinned[0]
    store.delete(f"{entry_at(store, 1).folder}/model-00000.safetensors")
    (problem,) = verify(store, entry_at(store, 1).folder).problems
    assert problem.message == "is missing"


def test_weights_and_other_components_of_a_thinned_one_still_load(
    thinned: tuple[MemoryStore, Run, Recorder], tmp_path: Path
) -> None:
    store = thinned[0]
    for info in store.list():
        path = tmp_path / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(info.key))
    model: nn.Module = new_run(seed=9).model
    assert load_weights(f"{tmp_path}@step=1", model).step == 1
    other = new_run(seed=9)
    with other.manager(store) as manager:
        assert manager.load("step=1", components=["model", "counters"]).step == 1
        assert other.counters == {"step": 1}
        assert manager.load("step=1", skip=["optimizer", "scheduler"]).step == 1
        loaded = manager.load("step=2", strict=False)
        assert [note for note in loaded.notes if "optimizer" in note]


def test_a_run_is_not_resumed_from_a_thinned_one(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    store = thinned[0]
    other = new_run(seed=9)
    before = other.bits()
    with other.manager(store) as manager:
        with pytest.raises(errors.NoCheckpoint, match=r"has dropped optimizer, scheduler of it"):
            manager.resume("step=1")
        with pytest.raises(errors.NoCheckpoint, match=r"has dropped optimizer of it"):
            manager.load("step=1", components=["optimizer"])
        assert other.bits() == before
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected) == (3, ())


def test_resume_walks_over_thinned_ones_and_does_not_mark_them(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    """R19: where the whole ones are damaged the error names each, and why."""
    store = thinned[0]
    store.delete(f"{entry_at(store, 3).folder}/model-00000.safetensors")
    with (
        new_run(seed=9).manager(store, sinks=()) as manager,
        pytest.raises(errors.NoUsableCheckpoint) as caught,
    ):
        manager.resume()
    reasons = [reason for _, reason in caught.value.rejected]
    assert ["has dropped" in reason for reason in reasons] == [False, True, True]
    for entry in Catalog(store).checkpoints():
        assert not (entry.marks.thinned_by and entry.marks.rejected)


def test_a_pin_that_comes_first_keeps_everything() -> None:
    """R20: and the marks are taken back, so that it can be resumed from."""
    store, run = MemoryStore(), new_run()
    with run.manager(store, keep=THINNING, sinks=()) as manager:
        manager.save(1).wait()
        manager.pin("step=1")
        entry = entry_at(store, 1)
        manager.wait()
        claim = _claim(Catalog(store).highest_epoch())
        removal = thin(
            store,
            entry.folder,
            ["optimizer"],
            claim=claim,
            reason="a test",
            readers=Readers(store),
        )
        assert not removal.is_done
        assert not entry_at(store, 1).marks.thinned_by
        manager.save(2).wait()
        manager.wait()
        assert candidate(store, entry_at(store, 1)).dropped == ()


def test_the_mark_of_a_dead_thinner_that_removed_nothing_binds_nobody() -> None:
    """A stale owner may leave it after it was fenced off."""
    store, run = MemoryStore(), new_run()
    with run.manager(store, sinks=()) as manager:
        manager.save(1).wait()
    folder = entry_at(store, 1).folder
    mark = Thinned(by="writer 1", component="optimizer", reason="late").encode()
    store.put(f"{folder}/{layout.thinned_name('optimizer', 1)}", mark)
    assert verify(store, folder).ok
    with new_run().manager(store, sinks=()) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 1


def test_the_mark_of_a_thinner_that_may_be_at_it_binds() -> None:
    store, run = MemoryStore(), new_run()
    manager = run.manager(store, sinks=())
    manager.save(1).wait()
    folder = entry_at(store, 1).folder
    mark = Thinned(by="writer 1", component="optimizer", reason="now").encode()
    store.put(f"{folder}/{layout.thinned_name('optimizer', 1)}", mark)
    with pytest.raises(errors.NoCheckpoint, match="has dropped optimizer"):
        new_run().manager(store, sinks=()).load("step=1")
    manager.close()


def test_a_users_file_with_the_name_of_a_mark_drops_nothing() -> None:
    store, run = MemoryStore(), new_run()
    manager = run.manager(store, sinks=())
    manager.save(1).wait()
    folder = entry_at(store, 1).folder
    mine = f"{folder}/{layout.thinned_name('optimizer', 1)}"
    store.put(mine, b'{"mine": 1}')
    assert not entry_at(store, 1).marks.thinned
    assert new_run().manager(store, sinks=()).load("step=1").step == 1
    with pytest.raises(errors.StoreError, match="not written by Holdfast"):
        thin(store, folder, ["optimizer"], claim=_claim(1), reason="late", readers=Readers(store))
    manager.close()
    assert store.get(mine) == b'{"mine": 1}'


def test_users_files_with_the_names_of_marks_are_not_damage(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    store = thinned[0]
    folder = entry_at(store, 1).folder
    for name in (layout.thinned_name("model", 7), layout.retired_name(7)):
        store.put(f"{folder}/{name}", b"mine")
        report = verify(store, folder)
        assert report.ok
        assert f"{name} is not listed in the manifest" in report.notes


def test_a_fenced_off_thinner_removes_nothing() -> None:
    """R10."""
    store, run = MemoryStore(), new_run()
    manager = run.manager(store, sinks=())
    manager.save(1).wait()
    folder = entry_at(store, 1).folder
    with new_run().manager(store, sinks=(), takeover=True) as later:
        later.resume()
        with pytest.raises(errors.Superseded):
            thin(
                store, folder, ["optimizer"], claim=_claim(1), reason="late", readers=Readers(store)
            )
    manager.close()
    assert f"{folder}/optimizer-00000.json" in {info.key for info in store.list()}
    assert verify(store, folder).notes == ()


def test_a_thinning_that_ends_while_it_is_verified_is_no_damage(
    thinned: tuple[MemoryStore, Run, Recorder],
) -> None:
    """R18."""
    store, folder = thinned[0], entry_at(thinned[0], 3).folder

    def drop(_: str, done: int, __: int) -> None:
        if done and not Catalog(store).marks(folder).thinned_by:
            mark = Thinned(by="writer 1", component="optimizer", reason="now").encode()
            store.put(f"{folder}/{layout.thinned_name('optimizer', 1)}", mark)
            for file in entry_at(store, 3).manifest.components["optimizer"].files:
                store.delete(f"{folder}/{file}")

    report = verify(store, folder, progress=drop)
    assert report.ok
    assert report.notes == ("component optimizer was dropped by retention",)


def test_a_thinning_that_ends_while_it_is_loaded_is_no_damage() -> None:
    """R11."""

    class Thinning(MemoryStore):
        """Drops the optimizer of an entry when its first tree is read."""

        def read_into(self, key: str, *args: Any, **options: Any) -> None:
            if key == f"{entry.folder}/model-00000.json":
                self.put(f"{entry.folder}/{layout.thinned_name('optimizer', 9)}", mark)
                for file in entry.manifest.components["optimizer"].files:
                    self.delete(f"{entry.folder}/{file}")
            super().read_into(key, *args, **options)

    store, run = Thinning(), new_run()
    with run.manager(store, sinks=()) as manager:
        manager.save(1).wait()
        manager.save(2).wait()
    entry = entry_at(store, 1)
    mark = Thinned(by="writer 9", component="optimizer", reason="now").encode()
    reader = new_run(seed=9).manager(store, sinks=())
    with pytest.raises(errors.NoCheckpoint, match="has dropped optimizer"):
        reader.load("step=1")


@pytest.mark.parametrize(
    ("component", "epoch"), [("optimizer", 3), ("a-00000001", 12345678), ("thinned", 123456789)]
)
def test_names_of_marks_say_component_and_epoch(component: str, epoch: int) -> None:
    name = layout.thinned_name(component, epoch)
    assert layout.parse_thinned(name) == (component, epoch)
    with pytest.raises(errors.FormatError):
        layout.check_file_name(name)


@pytest.mark.parametrize("component", ["thinned", "thinned-optimizer", "thinned-00000001"])
def test_no_file_of_a_component_is_taken_for_a_mark(component: str) -> None:
    for number in (0, 99999, 9999999):
        assert layout.parse_thinned(f"{component}-{number:05d}.json") is None
    assert layout.parse_thinned(layout.tree_file(component)) is None


def test_a_mark_says_who_and_why() -> None:
    mark = Thinned(by="writer 3", component="optimizer", reason="last 3 without optimizer")
    assert Thinned.decode(mark.encode(), what="mark") == mark


# A stop at every operation


def thinning_scenario(store: Store, acknowledged: list[int]) -> None:
    """Resume, and two saves of which the older loses two of its components."""
    tiny = Tiny()
    state = {"tiny": tiny.tree, "extra": {"n": 1}, "more": {"n": 2}}
    rule = Last(1) | All().then_drop("extra", "more")
    manager = CheckpointManager(store, state, sinks=(), preflight=False, keep=rule)
    try:
        found = manager.resume()
        last = found.step if found is not None else 0
        for step in range(last + 1, last + 3):
            tiny.become(step)
            acknowledged.append(manager.save(step).wait().step)
        manager.wait()
    finally:
        with suppress(errors.HoldfastError, Stopped):
            manager.close()


def check_thinned(store: Store, acknowledged: list[int]) -> None:
    """All that was acknowledged is there, the newest whole; the next pass ends what was begun."""
    found = {entry.step: entry for entry in Catalog(store).checkpoints()}
    assert set(acknowledged) <= set(found)
    for entry in found.values():
        report = verify(store, entry.folder)
        assert report.ok, report.problems
        assert candidate(store, entry).components[0] == "tiny"
    if acknowledged:
        assert candidate(store, found[max(acknowledged)]).dropped == ()
    more: list[int] = []
    thinning_scenario(store, more)
    assert more[0] == max(found, default=0) + 1
    newest, *older = Catalog(store).checkpoints()
    assert candidate(store, newest).dropped == ()
    for entry in older:
        names = store.children(entry.folder)
        assert candidate(store, entry).dropped == ("extra", "more")
        assert not [name for name in names if name.startswith(("extra", "more"))]


def test_a_stop_at_every_operation_of_thinning_loses_nothing(stores: Stores) -> None:  # noqa: F811
    """R1, R2, R20, R23; invariants 1 and 4."""
    clean = FaultyStore(stores(-1))
    thinning_scenario(clean, [])
    marks = [at for at, (op, key) in enumerate(clean.ops) if op == "put" and "thinned-" in key]
    assert len(marks) == 2
    for at in range(marks[0] - 1, len(clean.ops)):
        store = stores(at)
        acknowledged: list[int] = []
        with suppress(Stopped, errors.HoldfastError):
            faulty = FaultyStore(store, [Fault(kind="stop_after", at=at)])
            thinning_scenario(faulty, acknowledged)
        check_thinned(store, acknowledged)
