"""A checkpoint whose manifest was lost is no leftover of a save that never committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.encryption.test_store import SEALS

from holdfast import errors
from holdfast.format import layout
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify, verify_root
from holdfast.ownership.annotations import annotate, reject
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.weights import load_weights
from runs import ReadsNoted, Recorder, begun, new_run
from tiers import opened, saved
from ways import Tiny


@pytest.fixture(params=["local", "memory", "sealed"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, dict[str, Any]]:
    """An empty root, and the options with which it is opened."""
    store = LocalStore(tmp_path / "root") if request.param == "local" else MemoryStore()
    return store, {"encrypt": SEALS} if request.param == "sealed" else {}


def a_root(store: Store, *lives: tuple[int, ...], is_killed: bool = False, **options: Any) -> None:
    """One process after another, each of which resumes and saves these steps; then one whose last
    life did not end its claim."""
    tiny = Tiny()
    for number, steps in enumerate(lives, start=1):
        with opened(store, tiny, **options) as manager:
            manager.resume()
            saved(manager, tiny, *steps)
        if is_killed and number == len(lives):
            store.delete(layout.closed_key(Catalog(store).highest_epoch()))


def folder_of(store: Store, number: int = 0) -> str:
    """The folder of the newest attempt, or of the one so many before it."""
    return str(Catalog(store).attempts()[number])


def test_a_folder_that_was_moved_and_linked_is_damaged(tmp_path: Path) -> None:
    """Line 26 of the review: it was invisible, and the run went back in silence."""
    root, disk = tmp_path / "root", tmp_path / "disk"
    store = LocalStore(root)
    a_root(store, (1, 2))
    folder = folder_of(store)
    (root / folder).rename(disk)
    (root / folder).symlink_to(disk)
    before = sorted(disk.iterdir())
    with pytest.raises(errors.CorruptData, match=r"symbolic link.*mount --bind"):
        Catalog(store).find_checkpoint("latest")
    recorder = Recorder()
    with opened(store, Tiny(), sinks=(recorder,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1
        ((name, why),) = found.rejected
        assert name == folder
        assert "symbolic link" in why
    collect_garbage(store)
    assert [name for name, _ in Catalog(store).survey()[1]] == [folder]
    assert sorted(disk.iterdir()) == before
    (root / folder).unlink()
    disk.rename(root / folder)
    assert Catalog(store).entry(Catalog(store).attempts()[0]) is not None


def lose(store: Store, number: int = 0) -> str:
    """Take the manifest of the newest attempt away, or of the one so many before it."""
    folder = folder_of(store, number)
    store.delete(f"{folder}/{layout.MANIFEST}")
    return folder


def gone_on_from(store: Store, **options: Any) -> tuple[int, dict[str, str]]:
    """The step from which a new life goes on, and what it passed over for it."""
    with opened(store, Tiny(), **options) as manager:
        found = manager.resume()
        assert found is not None
        manager.wait()
    return found.step, dict(found.rejected)


def test_a_lost_manifest_is_rejected_by_name_and_the_rest_of_it_stays(
    place: tuple[Store, dict[str, Any]],
) -> None:
    """Three lives saved steps 1 to 3, and two went on from 3 without a save. Without its manifest
    it was silently passed over, and deleted as something that was never committed."""
    store, options = place
    a_root(store, (1,), (2,), (3,), (), (), **options)
    before = {info.key for info in store.list(f"{folder_of(store)}/")}
    folder = lose(store)
    step, rejected = gone_on_from(store, **options)
    assert step == 2
    assert "manifest.json is missing" in rejected[folder]
    assert "'latest' names it" in rejected[folder]
    assert {info.key for info in store.list(f"{folder}/")} >= before - {f"{folder}/manifest.json"}
    assert gone_on_from(store, **options)[0] == 2
    assert folder not in dict(collect_garbage(store).removed)


@pytest.mark.parametrize("is_killed", [False, True])
def test_where_the_only_one_lost_its_manifest_the_run_is_not_begun_afresh(
    place: tuple[Store, dict[str, Any]], is_killed: bool
) -> None:
    """None means that nothing was ever committed; also after a kill, when only `latest` tells."""
    store, options = place
    a_root(store, (1, 2, 3), keep=Last(1), is_killed=is_killed, **options)
    folder = lose(store)
    with opened(store, Tiny(), **options) as manager:
        with pytest.raises(errors.NoUsableCheckpoint, match=r"manifest\.json is missing"):
            manager.resume()
        with pytest.raises(errors.UsageError, match="holds the checkpoints of a run"):
            saved(manager, Tiny(), 1)
    report = collect_garbage(store, dead_epochs=[1])
    assert folder not in dict(report.removed)
    assert "is missing" in dict(report.failed)[folder]


def test_it_is_damage_for_verify_and_listed() -> None:
    """Those who look after a root are told of it; a copy of the file heals it."""
    store = MemoryStore()
    a_root(store, (1, 2))
    data = store.get(f"{folder_of(store)}/{layout.MANIFEST}")
    folder = lose(store)
    found = verify_root(store)
    assert not found.ok
    (report,) = [report for report in found.checkpoints if report.folder == folder]
    (problem,) = report.problems
    assert (problem.file, problem.is_damage) == (layout.MANIFEST, True)
    ((listed, error),) = Catalog(store).survey()[1]
    assert listed == folder
    assert isinstance(error, errors.CorruptData)
    with pytest.raises(errors.CorruptData, match="is missing"):
        Catalog(store).find_checkpoint(folder)
    with pytest.raises(errors.CorruptData, match="is missing"):
        load_weights(store, new_run().model, which=folder)
    store.put(f"{folder}/{layout.MANIFEST}", data)
    assert verify(store, folder).ok
    assert gone_on_from(store)[0] == 2


def _pin(store: Store, number: int) -> None:
    annotate(store, Catalog(store).checkpoints()[number], pinned=True)


def _reject(store: Store, number: int) -> None:
    reject(store, folder_of(store, number), by="test", reason="test")


def _await_upload(store: Store, number: int) -> None:
    store.put(layout.upload_key(folder_of(store, number)), b"")


def _nothing(store: Store, number: int) -> None:
    pass


@pytest.mark.parametrize(
    ("number", "record", "why"),
    [
        (0, _nothing, "'latest' names it"),
        (1, _pin, "notes-0001.json was put beside it"),
        (1, _reject, "rejected.json was put beside it"),
        (1, _await_upload, "it was to be sent to the other tier"),
    ],
)
def test_each_record_of_a_commit_tells(
    number: int, record: Callable[[Store, int], None], why: str
) -> None:
    store = MemoryStore()
    a_root(store, (1, 2), is_killed=True)
    record(store, number)
    folder = lose(store, number)
    with pytest.raises(errors.CorruptData, match=why):
        Catalog(store).read(folder)


@pytest.mark.parametrize("is_claim_lost", [False, True])
def test_a_later_writer_tells_from_what_it_went_on(is_claim_lost: bool) -> None:
    """In its claim, and where that is lost in what it saved."""
    store = MemoryStore()
    a_root(store, (1, 2), is_killed=True)
    a_root(store, (3,))
    folder = lose(store, 1)
    if is_claim_lost:
        store.delete(layout.writer_key(2))
    with pytest.raises(errors.CorruptData, match="writer 2 resumed from it"):
        Catalog(store).read(folder)


def test_a_clean_close_tells_of_what_is_whole_but_for_the_manifest() -> None:
    """Where all files of an attempt are there and nothing of its writer failed, it was committed;
    half of one is what a failed save left where it could not clear away."""
    store = MemoryStore()
    a_root(store, (1, 2), is_killed=True)
    folder = lose(store)
    store.delete(layout.LATEST)
    assert Catalog(store).read(folder) is None
    store.put(layout.closed_key(1), b"")
    with pytest.raises(errors.CorruptData, match="its writer has ended cleanly"):
        Catalog(store).read(folder)
    store.delete(f"{folder}/tiny-00000.safetensors")
    assert Catalog(store).read(folder) is None


@pytest.mark.parametrize("kept_by", ["claims", "latest"])
def test_half_of_a_folder_that_a_claim_names_is_an_upload_under_way(kept_by: str) -> None:
    """Both tiers have the claims, and one of them may have but a part of the files yet. `latest`
    was put in this very root, after the commit."""
    store = MemoryStore()
    a_root(store, (1, 2), ())
    if kept_by == "claims":
        store.delete(layout.LATEST)
    folder = lose(store)
    store.delete(f"{folder}/tiny-00000.safetensors")
    if kept_by == "claims":
        assert Catalog(store).read(folder) is None
    else:
        with pytest.raises(errors.CorruptData, match="'latest' names it"):
            Catalog(store).read(folder)


def test_a_save_that_was_killed_before_its_commit_is_a_leftover_as_ever() -> None:
    """All of its files are there, and nothing says that it was committed: gc removes it, and the
    resume before that asks for it with a few small reads, however many claims there are."""
    store = ReadsNoted()
    for step in range(1, 6):
        a_root(store, (step,))
    killed = FaultyStore(store, [Fault(kind="stop_before", op="put", key="*/manifest.json")])
    with pytest.raises(errors.SaveFailed):
        a_root(killed, (6,))
    folder = folder_of(store)
    assert layout.INDEX in store.children(folder)
    assert Catalog(store).read(folder) is None
    store.keys.clear()
    assert Catalog(store).read(folder) is None
    assert len(store.keys) <= 4
    step, rejected = gone_on_from(store, takeover=True)
    assert (step, rejected) == (5, {})
    collect_garbage(store, dead_epochs=[6])
    assert folder not in map(str, Catalog(store).attempts())


class PutMeanwhile(MemoryStore):
    """Puts a manifest between a look at the register and the looks at other records."""

    key, data = "", b""

    def children(self, folder: str = "") -> tuple[str, ...]:
        if self.key and folder == self.key.split("/")[0]:
            self.put(self.key, self.data)
        return super().children(folder)


def test_a_commit_between_the_looks_is_no_loss() -> None:
    """What tells of a commit may have been put since the look at the register, as the manifest."""
    store = PutMeanwhile()
    a_root(store, (1, 2))
    key = f"{folder_of(store)}/{layout.MANIFEST}"
    store.data = store.get(key)
    store.delete(key)
    store.key = key
    assert Catalog(store).read(folder_of(store)) is not None


def test_what_was_deleted_or_only_begun_is_not_lost() -> None:
    store = MemoryStore()
    a_root(store, (1, 2, 3), keep=Last(1))
    assert len(Catalog(store).attempts()) == 1
    folder = begun(store, label="x", epoch=1, sequence=9).folder
    store.put(layout.LATEST, folder.encode())
    assert Catalog(store).read(folder) is None


def test_it_stays_when_newer_ones_come_and_retention_tells_why() -> None:
    store, recorder, tiny = MemoryStore(), Recorder(), Tiny()
    a_root(store, (1, 2))
    folder = lose(store)
    with opened(store, tiny, sinks=(recorder,), keep=Last(1)) as manager:
        manager.resume()
        saved(manager, tiny, 2, 3, 4)
    assert any(folder in event.message for event in recorder.of("warning"))
    assert folder in map(str, Catalog(store).attempts())
    assert [entry.step for entry in Catalog(store).checkpoints()] == [4]


def test_of_two_tiers_one_may_lack_what_a_claim_goes_on_from(tmp_path: Path) -> None:
    """R22: it was committed in the other tier; here all of its files lie without a manifest, since
    the sender was killed before that, and later nobody wanted it here any more."""
    tiny = Tiny()
    for step in (1, 2):
        with opened(Tiered(tmp_path / "local", tmp_path / "remote"), tiny) as manager:
            manager.resume()
            saved(manager, tiny, step)
    remote = LocalStore(tmp_path / "remote")
    newest, first = Catalog(remote).attempts()
    register = tmp_path / "remote" / str(first) / layout.MANIFEST
    register.unlink()
    claim = Catalog(remote).writer(newest.epoch)
    assert claim is not None
    assert claim.tiered
    assert claim.resumed_from is not None
    assert claim.resumed_from.folder == str(first)
    assert Catalog(remote).read(str(first)) is None


def test_saves_that_never_committed_cost_a_resume_two_requests_each() -> None:
    """Line 26: to resume over 2,000 of them took 2.25 s. Each is asked for its manifest and its
    names; other records are read once."""

    def num_requests(num_left: int) -> int:
        inner = MemoryStore()
        a_root(inner, (1, 2))
        for number in range(3, 3 + num_left):
            name = layout.attempt_name(f"step-{number:08d}", 1, number, f"{number:032x}")
            inner.put(f"{name}/model-00000.json", b"{}")
        store = FaultyStore(inner)
        assert len([*Catalog(store).lineage()]) == 2
        return len(store.ops)

    few, many = map(num_requests, (50, 100))
    assert many - few == 50 * 2
