"""The manifest's put: what is said of each outcome, and what happens to the folder."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from each import each
from holdfast import errors
from holdfast.format import layout
from holdfast.format.manifest import Deleted
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import is_closed
from holdfast.policy.rules import Last
from holdfast.root import commit
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import Buffer, ObjectInfo, Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from runs import retracted


def manager_of(store: Store, **options: Any) -> CheckpointManager:
    state = {"tree": {"x": torch.ones(1000)}}
    return CheckpointManager(store, state, sinks=(), preflight=False, **options)


def save_with(store: Store, **fault: Any) -> BaseException | None:
    """Save step 1 with one fault; the cause of the failure."""
    manager = manager_of(FaultyStore(store, [Fault(**fault)]))
    failure = manager.save(1).committed.exception(timeout=60)
    with suppress(errors.SaveFailed):
        manager.close()
    if failure is None:
        return None
    is_unclear = isinstance(failure.__cause__, errors.OutcomeUnknown)
    assert ("may or may not" in str(failure)) == is_unclear
    return failure.__cause__


def steps(store: Store) -> list[int]:
    return [entry.step for entry in Catalog(store).checkpoints()]


def test_a_lost_reply_of_an_object_store_is_read_back_as_success() -> None:
    """R10; invariant 1: the key holds our save id."""
    store = MemoryStore()
    assert save_with(store, kind="lose_reply", op="put", key="*/manifest.json") is None
    assert steps(store) == [1]


def test_an_unclear_put_of_which_nothing_is_to_be_seen_is_sent_again() -> None:
    """R24; invariant 1: the same bytes, of which only one copy can have the key."""
    store = MemoryStore()
    lost = errors.OutcomeUnknown("no reply")
    fault = {"kind": "fail", "op": "put", "key": "*/manifest.json", "error": lost}
    assert save_with(store, **fault, times=2) is None
    assert steps(store) == [1]
    assert not is_closed(store, 1)  # a copy may still arrive after it was deleted


def test_the_register_of_an_unclear_put_stays_when_its_checkpoint_is_deleted() -> None:
    """Rule 1: an earlier copy of the put may still arrive, and must find the key taken."""
    store = MemoryStore()
    lost = errors.OutcomeUnknown("no reply")
    fault = Fault(kind="fail", op="put", key="step-00000001*/manifest.json", error=lost)
    state = {"tree": {"x": torch.ones(1000)}}
    with CheckpointManager(FaultyStore(store, [fault]), state, sinks=(), keep=Last(1)) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()
    assert steps(store) == [3]
    catalog = Catalog(store)
    left = [str(name) for name in catalog.attempts() if name.label == "step-00000001"]
    assert [store.children(folder) for folder in left] == [("manifest.json",)]
    assert isinstance(catalog.read(left[0]), Deleted)
    assert len(catalog.attempts()) == 2


def test_a_put_that_stays_unclear_is_given_up() -> None:
    """Invariant 9."""
    store = MemoryStore()
    lost = errors.OutcomeUnknown("no reply")
    fault = {"kind": "fail", "op": "put", "key": "*/manifest.json", "error": lost}
    assert isinstance(save_with(store, **fault, times=None), errors.OutcomeUnknown)


def test_an_unclear_put_on_a_disk_stays_unclear(tmp_path: Path) -> None:
    """Rule 5: a name whose folder could not be synced may be gone after a crash."""
    store = LocalStore(tmp_path)
    cause = save_with(store, kind="lose_reply", op="put", key="*/manifest.json")
    assert isinstance(cause, errors.OutcomeUnknown)


def test_a_put_that_may_still_arrive_is_unknown_and_its_folder_is_left() -> None:
    """Rule 1: removing it now would resurrect a torn checkpoint later."""
    store = MemoryStore()
    cause = save_with(store, kind="fail", op="put", key="*/manifest.json")
    assert isinstance(cause, errors.OutcomeUnknown)
    assert len(Catalog(store).attempts()) == 1


def test_a_refused_put_gives_the_space_back(tmp_path: Path) -> None:
    """R8: what was refused for sure is not in flight."""
    store = LocalStore(tmp_path)
    full = errors.StoreFull("no space left")
    cause = save_with(store, kind="fail", op="put", key="*/manifest.json", error=full)
    assert isinstance(cause, errors.StoreFull)
    assert Catalog(store).attempts() == ()


def test_an_unclear_file_is_a_plain_failure(tmp_path: Path) -> None:
    """Invariant 2: without a manifest nothing was committed, whatever became of a file."""
    store = LocalStore(tmp_path)
    cause = save_with(store, kind="lose_reply", op="put", key="*/index.json")
    assert isinstance(cause, errors.StoreError)
    assert not isinstance(cause, errors.OutcomeUnknown)
    assert Catalog(store).attempts() == ()


@pytest.mark.parametrize("name", [layout.INDEX, layout.tree_file("tree")])
def test_a_file_that_is_shorter_than_what_was_sent_is_not_committed(name: str) -> None:
    """Invariant 2: the store said that all was well."""
    store = MemoryStore()
    cause = save_with(store, kind="truncate", op="put", key=f"*/{name}")
    assert isinstance(cause, errors.StoreError)
    assert "bytes were written and the store now has" in str(cause)
    assert Catalog(store).attempts() == ()


def test_a_taken_key_is_a_conflict_that_names_the_taker() -> None:
    """R10, invariant 1: gc was faster."""
    store = MemoryStore()
    fault = Fault(kind="hang", op="put", key="*/manifest.json")
    manager = manager_of(FaultyStore(store, [fault]))
    pending = manager.save(1)
    assert fault.reached.wait(60)
    assert mark_aborted(store, str(Catalog(store).attempts()[0]), by="gc", reason="test")
    fault.release.set()
    with pytest.raises(errors.SaveFailed, match="abort marker of gc") as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, errors.CommitConflict)
    manager.close()
    assert steps(store) == []


UNREFUSED = (
    errno.ESHUTDOWN,
    errno.ENOTCONN,
    errno.ECONNABORTED,
    errno.EREMOTEIO,
    errno.EBUSY,
    errno.ENOMEM,
    errno.EINTR,
    524,  # one that the kernel keeps to itself, and has let out of NFS all the same
)


@each("number", [*UNREFUSED, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_an_error_after_the_link_deletes_no_committed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Rule 5, invariant 1: the manifest has its name, and the reply was an error of any kind; also
    one that should mean a refusal, of a file system that answers as it likes."""
    really_link = os.link

    def link(source: str, name: str, **where: int) -> None:
        really_link(source, name, **where)
        if name == layout.MANIFEST:
            raise OSError(number, os.strerror(number))

    root = tmp_path / str(number)
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link)
        manager = manager_of(LocalStore(root))
        failure = manager.save(1).committed.exception(timeout=60)
        with suppress(errors.SaveFailed):
            manager.close()
    if failure is not None:
        assert isinstance(failure.__cause__, errors.OutcomeUnknown), failure
    store = LocalStore(root)
    assert steps(store) == [1]
    (name,) = Catalog(store).attempts()
    assert verify(store, str(name)).ok
    assert not is_closed(store, 1)


def test_a_manifest_that_was_put_before_is_synced_before_it_is_acknowledged(
    tmp_path: Path,
) -> None:
    """Invariant 2: a call that was sent twice finds its own name taken, and nobody synced it."""
    taken = errors.AlreadyExists("it is there")
    fault = Fault(kind="lose_reply", op="put", key="*/manifest.json", error=taken)
    store = FaultyStore(LocalStore(tmp_path), [fault])
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    ops = list(store.ops)
    put = ops.index(("put", f"{folder}/{layout.MANIFEST}"))
    acknowledged = ops.index(("head", layout.writer_key(2)), put)
    assert ("sync_folder", folder) in ops[put:acknowledged]


def test_a_refused_put_that_can_not_be_looked_at_leaves_the_folder(tmp_path: Path) -> None:
    """Rule 1: files are removed only where the register is known to have stayed absent."""
    store = LocalStore(tmp_path)
    refused = {"error": errors.AccessDenied("no"), "key": "*/manifest.json", "kind": "fail"}
    faults = [Fault(op="put", **refused), Fault(op="head", **refused)]  # type: ignore[arg-type]
    manager = manager_of(FaultyStore(store, faults))
    failure = manager.save(1).committed.exception(timeout=60)
    with suppress(errors.SaveFailed):
        manager.close()
    assert failure is not None
    assert isinstance(failure.__cause__, errors.AccessDenied)
    assert len(Catalog(store).attempts()) == 1
    assert not is_closed(store, 1)


@pytest.mark.parametrize("is_before", [True, False])
def test_who_is_superseded_is_told_whether_the_commit_stands(is_before: bool) -> None:
    """R10, rule 3: the fence is read before the manifest is put, and again after."""
    store = MemoryStore()
    name = layout.INDEX if is_before else layout.MANIFEST
    fault = Fault(kind="hang", op="put", key=f"*/{name}")
    manager = manager_of(FaultyStore(store, [fault]))
    pending = manager.save(1)
    assert fault.reached.wait(60)
    store.put(layout.writer_key(2), b"{}")
    fault.release.set()
    with pytest.raises(errors.Superseded) as caught:
        pending.wait()
    manager.close()
    assert caught.value.committed == (not is_before)
    assert steps(store) == ([] if is_before else [1])


def second_save_stopped_at(store: LocalStore, at: int) -> BaseException | None:
    """What a process is told whose save is stopped before one of its operations, while another
    process takes the run over and collects what it left; None: there are no more operations."""
    fault = Fault(kind="hang", key="step-00000002*", at=at)
    first = manager_of(FaultyStore(store, [fault]))
    first.save(1).wait()
    pending = first.save(2)
    pending.committed.add_done_callback(lambda _: fault.reached.set())
    assert fault.reached.wait(60)
    if pending.done():
        fault.release.set()
        first.close()
        return None
    with manager_of(store, takeover=True) as second:
        assert second.resume() is not None
        second.save(3).wait()
    fault.release.set()
    error = pending.committed.exception(timeout=60)
    with pytest.raises(errors.Superseded) if error is not None else nullcontext():
        first.close()  # the last save tells it, too
    assert verify(store, Catalog(store).find_checkpoint().folder).ok
    return error


def test_whoever_lost_the_run_is_told_so_wherever_it_was_stopped(ram_path: Path) -> None:
    """R10, rule 3: its files are gone, its register is taken or its folder; whatever it finds
    first, "the run was taken over" is the reason, and not that training can go on."""
    told = []
    for at in range(100):
        error = second_save_stopped_at(LocalStore(ram_path / str(at)), at)
        if error is None:
            break
        told.append(f"{type(error).__name__}: {error}")
    assert len(told) >= 6
    assert [text for text in told if not text.startswith("Superseded: ")] == []
    assert [text for text in told if "Training can continue" in text] == []
    assert [text for text in told if "writer 2 after 1" not in text] == []


class CutOffStore(MemoryStore):
    """From a fault on, the next claim cannot be looked for: it fails, or takes too long."""

    def __init__(self, cut_off: Fault, answer: Event | None) -> None:
        super().__init__()
        self.cut_off = cut_off
        self.answer = answer

    def head(self, key: str) -> ObjectInfo:
        is_hidden = self.cut_off.reached.is_set() and key == layout.writer_key(2)
        if is_hidden and (self.answer is None or not self.answer.wait(60)):
            raise errors.AccessDenied("expired")
        return super().head(key)


@pytest.mark.parametrize("ending", ["is read", "fails", "hangs"])
def test_that_training_can_go_on_is_said_only_where_the_run_is_ours(ending: str) -> None:
    """Rule 3, invariant 9: after a failure the fence is read; what is not read promises nothing."""
    full = Fault(kind="fail", op="put", key="*/index.json", error=errors.StoreFull("no space"))
    answer = Event()
    cut_off = CutOffStore(full, answer if ending == "hangs" else None)
    inner = MemoryStore() if ending == "is read" else cut_off
    state = {"tree": {"x": torch.ones(1000)}}
    manager = CheckpointManager(
        FaultyStore(inner, [full]), state, sinks=(), preflight=False, save_timeout_s=1
    )
    failure = manager.save(1).committed.exception(timeout=60)
    answer.set()
    with pytest.raises(errors.SaveFailed):
        manager.close()
    assert isinstance(failure, errors.SaveFailed)
    assert "no space" in str(failure)
    is_known = ending == "is read"
    assert ("Training can continue" in str(failure)) == is_known
    assert ("still owns the run is not known" in str(failure)) != is_known


class LateStore(MemoryStore):
    """The first put of a manifest hangs on the way, and its sender hears nothing of it."""

    def __init__(self, meanwhile: str) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.late: tuple[str, bytes] | None = None

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if not key.endswith(f"/{layout.MANIFEST}"):
            super().put(key, data, if_absent=if_absent)
        elif self.late is None:
            self.late = key, bytes(data)
            if self.meanwhile == "gc gives it up":
                assert mark_aborted(self, key.rpartition("/")[0], by="gc", reason="test")
            if self.meanwhile == "the run is taken over":
                super().put(layout.writer_key(2), b"{}")
            if self.meanwhile == "it arrives, and a copy is behind it":
                super().put(key, data, if_absent=True)
            raise errors.OutcomeUnknown("no reply")
        elif self.meanwhile == "the credentials expire":
            raise errors.AccessDenied("expired")
        else:
            super().put(key, data, if_absent=if_absent)

    def arrive(self) -> None:
        """The first put arrives at last."""
        assert self.late is not None
        key, data = self.late
        with suppress(errors.AlreadyExists):
            super().put(key, data, if_absent=True)


@pytest.mark.parametrize(
    "meanwhile",
    [
        "the credentials expire",
        "gc gives it up",
        "the run is taken over",
        "it arrives, and a copy is behind it",
    ],
)
def test_a_put_that_arrives_after_everything_else_resurrects_nothing(meanwhile: str) -> None:
    """R10, invariant 1, rule 1: however the save ended, its register stays and no clean close says
    that nothing is in flight."""
    store = LateStore(meanwhile)
    manager = manager_of(store)
    manager.save(1).committed.exception(timeout=60)
    with suppress(errors.HoldfastError):
        manager.close()
    assert not is_closed(store, 1)
    collect_garbage(store)
    store.arrive()
    for entry in Catalog(store).checkpoints():
        assert verify(store, entry.folder).ok


@pytest.mark.parametrize("note", [{"pinned": True}, {"add_tags": ["kept"]}])
def test_what_was_pinned_or_tagged_before_the_mark_is_not_deleted(note: dict[str, Any]) -> None:
    """R10, rule 4: a deleter decides, and then reads the pins again."""
    store = MemoryStore()
    with manager_of(store) as manager:
        manager.save(1).wait()
    (entry,) = Catalog(store).checkpoints()
    annotate(store, entry, **note)
    assert not retracted(store, entry.folder)
    assert verify(store, entry.folder).ok


def test_no_file_goes_before_the_tombstone_is_there() -> None:
    """R10, rule 1: else a reader would take what is left for damage."""
    store = MemoryStore()
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    refused = Fault(kind="fail", op="put", key="*/manifest.json")
    with pytest.raises(errors.TransientStoreError):
        retracted(FaultyStore(store, [refused]), folder)
    assert verify(store, folder).ok


def test_the_mark_of_a_deleter_goes_after_what_it_speaks_of() -> None:
    """Rule 4: who knows the manifest looks for index and mark alone."""
    store = FaultyStore(MemoryStore())
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    assert retracted(store, folder)
    deleted = [key for op, key in store.ops if op == "delete" and key.startswith(folder)]
    mark = f"{folder}/{layout.retired_name(1)}"
    assert f"{folder}/{layout.INDEX}" in deleted
    assert deleted[-1] == mark
    assert {info.key for info in store.list(f"{folder}/")} == {f"{folder}/{layout.MANIFEST}"}


@pytest.mark.parametrize("is_whole", [True, False])
def test_files_of_others_in_a_checkpoint_stay_with_its_register(is_whole: bool) -> None:
    store = MemoryStore()
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    # A name that no key has, names of our own patterns, and one inside a folder.
    mine = (
        *("index (copy).json", "model-00001-of-00002.safetensors", "notes-0007.json", "eval/a"),
        *("model-00007.safetensors.zst", "data-00007.json.lz4"),
    )
    for name in mine:
        store._objects[f"{folder}/{name}"] = b"{}"
    left_alone = commit.remove_files(store, folder, whole=is_whole)
    assert sorted(left_alone) == sorted(name.partition("/")[0] for name in mine)
    left = {key.removeprefix(f"{folder}/") for key in store._objects if key.startswith(folder)}
    assert left == {layout.MANIFEST, *mine}
    for name in mine:
        del store._objects[f"{folder}/{name}"]
    assert commit.remove_files(store, folder, whole=True) == ()
    assert not [key for key in store._objects if key.startswith(folder)]


def test_a_users_file_with_the_name_of_a_mark_begins_no_deletion() -> None:
    store = MemoryStore()
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    for epoch in (1, 7):
        store.put(f"{folder}/{layout.retired_name(epoch)}", b'{"mine": 1}')
    (entry,) = Catalog(store).checkpoints()
    assert not entry.marks.retired
    with manager_of(store) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == folder


def test_a_deletion_whose_mark_a_users_file_hides_does_not_begin() -> None:
    """Rule 8: readers look for the mark, and would not see it."""
    store = MemoryStore()
    with manager_of(store) as manager:
        folder = manager.save(1).wait().folder
    store.put(f"{folder}/{layout.retired_name(1)}", b'{"mine": 1}')
    with pytest.raises(errors.StoreError, match="not written by Holdfast"):
        retracted(store, folder)
    assert store.get(f"{folder}/{layout.retired_name(1)}") == b'{"mine": 1}'
    store.delete(f"{folder}/{layout.retired_name(1)}")
    assert verify(store, folder).ok
