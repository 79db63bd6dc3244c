"""A root keeps its speed, however often its run was killed where no death can be proven."""

from __future__ import annotations

import itertools
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast import CheckpointManager, Last
from holdfast.errors import AccessDenied, HoldfastError
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.format.records import Ended
from holdfast.maintenance.gc import collect_garbage
from holdfast.ownership import claim as claims
from holdfast.ownership.process import this_process
from holdfast.root.attempts import known_ended
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from runs import begun

NUM_KILLS = 12


class Lives:
    """Processes that own a run one after the other, each in a process namespace of its own, and of
    which each is killed amid its third save."""

    def __init__(self, store: Store, patch: pytest.MonkeyPatch) -> None:
        self.store = store
        self._patch = patch
        self.number = 0

    def begin(self, *faults: Fault) -> tuple[FaultyStore, CheckpointManager]:
        """Another process, and what it does to the store."""
        self.number += 1
        process = msgspec.structs.replace(this_process(), pid_namespace=f"pid:[{self.number}]")
        self._patch.setattr(claims, "this_process", lambda: process)
        store = FaultyStore(_another(self.store), faults)
        state = {"model": {"w": torch.zeros(64)}}
        return store, CheckpointManager(store, state, keep=Last(2), takeover=True, sinks=())

    def live_and_die(self) -> None:
        """Resume, save twice, and be killed when all but the manifest of the third is there."""
        killed = Fault(kind="stop_after", op="put", key="step-*/index.json", at=2)
        _, manager = self.begin(killed)
        with suppress(Stopped, HoldfastError), manager:
            _train(manager, 10 * self.number, num_saves=3)

    def costs(self) -> tuple[int, list[int]]:
        """Operations of a resume, and of three saves after it."""
        store, manager = self.begin()
        with manager:
            manager.resume()
            manager.wait()
            counts = [len(store.ops)]
            for step in range(3):
                _save(manager, 10 * self.number + step)
                counts.append(len(store.ops))
        return counts[0], [after - before for before, after in itertools.pairwise(counts)]


def _another(store: Store) -> Store:
    """The same store, as another process opens it."""
    if isinstance(store, LocalStore):
        return LocalStore(Path(store.url))
    assert isinstance(store, MemoryStore)
    other = MemoryStore()
    other.__dict__.update(store.__dict__)
    return other


def _train(manager: CheckpointManager, first: int, num_saves: int) -> None:
    manager.resume()
    for step in range(first, first + num_saves):
        _save(manager, step)


def _save(manager: CheckpointManager, step: int) -> None:
    manager.state["model"]["w"] += 1
    manager.save(step).wait()
    manager.wait()


@pytest.fixture(params=["local", "objects"])
def lives(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    """On a disk, and on a store without folders."""
    monkeypatch.setattr(claims, "WATCH_S", 0.003)
    store = LocalStore(tmp_path / "root") if request.param == "local" else MemoryStore()
    return Lives(store, monkeypatch)


def test_kills_without_a_proof_of_death_do_not_slow_the_run_down(lives: Lives) -> None:
    """What has ended for good is looked at once, and written down for the next process."""
    lives.live_and_die()
    fresh_resume, fresh_saves = lives.costs()
    for _ in range(NUM_KILLS):
        lives.live_and_die()
    resume, saves = lives.costs()
    assert resume <= 2 * fresh_resume
    assert all(now <= 1.2 * before for before, now in zip(fresh_saves, saves, strict=True))
    beats = [n for n in lives.store.children(layout.WRITERS) if layout.parse_alive(n) is not None]
    assert len(beats) <= 1
    assert len(list(Catalog(_another(lives.store)).checkpoints())) == 2


def test_on_a_disk_what_was_deleted_goes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest was put once, by a call that has ended; only what never committed keeps a
    marker."""
    monkeypatch.setattr(claims, "WATCH_S", 0.003)
    lives = Lives(LocalStore(tmp_path), monkeypatch)
    for _ in range(4):
        lives.live_and_die()
    lives.costs()
    registers = [Catalog(lives.store).read(str(n)) for n in Catalog(lives.store).attempts()]
    kinds = [type(register).__name__ for register in registers]
    assert kinds.count("Manifest") == 2
    assert kinds.count("Aborted") == 4
    assert "Deleted" not in kinds


def _root_with_a_record(folder: Path) -> tuple[Path, Path]:
    """A root, and a copy of a checkpoint that has ended there since."""
    root, copy = folder / "root", folder / "copy"
    with CheckpointManager(root, {"model": {"w": torch.zeros(4)}}, keep=None) as manager:
        for step in range(1, 9):
            manager.save(step).wait()
        first = manager.list()[-1].folder
    (root / layout.closed_key(1)).unlink()  # so that markers stay
    shutil.copytree(root / first, copy / first)
    store = LocalStore(root)
    for entry in Catalog(store).checkpoints()[3:]:
        (root / entry.folder / layout.MANIFEST).unlink()
        mark_aborted(store, entry.folder, by="a test", reason="gone")
    for _ in range(2):  # the second finds nothing but markers, and names them
        collect_garbage(LocalStore(root), own_epoch=9)
    assert (root / layout.ended_name(9)).exists()
    return root, copy / first


def test_what_a_person_put_back_is_found_where_nothing_else_can_be_used(
    tmp_path: Path,
) -> None:
    """Nothing but time depends on the record: by step, and by a resume that has nothing else."""
    root, copy = _root_with_a_record(tmp_path)
    shutil.rmtree(root / copy.name, ignore_errors=True)
    shutil.copytree(copy, root / copy.name)
    with CheckpointManager(root, {"model": {"w": torch.ones(4)}}) as manager:
        assert manager.load("step=1").step == 1
    for folder in [*root.glob("step-*")]:
        if folder.name != copy.name:
            shutil.rmtree(folder)
    with CheckpointManager(root, {"model": {"w": torch.ones(4)}}) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.step == 1


def test_what_latest_names_is_looked_at_whatever_a_record_says(tmp_path: Path) -> None:
    """A record that lists a checkpoint is wrong: no older one is resumed in silence."""
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(tmp_path, state) as manager:
        folders = [manager.save(step).wait().folder for step in (1, 2, 3)]
    record = Ended(epoch=1, aborted=tuple(folders[1:]), deleted=()).encode()
    (tmp_path / layout.ended_name(1)).write_bytes(record)
    with CheckpointManager(tmp_path, state) as manager:
        resumed = manager.resume()
    assert resumed is not None
    assert resumed.step == 3


def test_gc_by_a_person_removes_a_record_that_names_a_checkpoint(
    tmp_path: Path,
) -> None:
    root, copy = _root_with_a_record(tmp_path)
    shutil.rmtree(root / copy.name, ignore_errors=True)
    shutil.copytree(copy, root / copy.name)
    report = collect_garbage(LocalStore(root))
    assert (copy.name, "committed, although recorded as ended: it was restored") in report.kept
    assert not [*root.glob("ended-*")]
    assert copy.name in [entry.folder for entry in Catalog(LocalStore(root)).checkpoints()]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_a_damaged_record_costs_time_and_nothing_else(tmp_path: Path, damage: str) -> None:
    root, _ = _root_with_a_record(tmp_path)
    record = root / layout.ended_name(9)
    data = record.read_bytes()
    bad = {"flipped": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-9], "empty": b""}
    record.chmod(0o644)
    record.write_bytes(bad[damage])
    store = LocalStore(root)
    assert [entry.step for entry in Catalog(store).checkpoints()] == [8, 7, 6]
    assert isinstance(Catalog(store).read(str(Catalog(store).open_attempts()[0])), Manifest)


def test_only_what_holds_nothing_but_its_marker_is_named(tmp_path: Path) -> None:
    """What a paused writer leaves in its folder later is found by the next gc, and removed."""
    store = LocalStore(tmp_path)
    with CheckpointManager(store, {"model": {"w": torch.zeros(4)}}) as manager:
        manager.save(1).wait()
    folders = []
    for number in range(6):
        attempt = begun(store, label="step-00000009", epoch=1, sequence=90 + number)
        mark_aborted(store, attempt.folder, by="a test", reason="gone")
        folders.append(attempt.folder)
    (tmp_path / folders[0] / "model-00000.safetensors").write_bytes(bytes(64))
    (tmp_path / layout.closed_key(1)).unlink()  # so that markers stay
    collect_garbage(store, own_epoch=2)
    assert not known_ended(store).is_listed(folders[0])
    assert all(known_ended(store).is_listed(folder) for folder in folders[1:])
    collect_garbage(store, own_epoch=2)
    assert {path.name for path in (tmp_path / folders[0]).iterdir()} == {layout.MANIFEST}


def test_a_folder_that_was_removed_may_be_made_again(tmp_path: Path) -> None:
    """A sender makes it anew where the rule of the remote tier wants it after all: neither the
    record nor what this process has read hides it then."""
    root, copy = _root_with_a_record(tmp_path)
    reader = LocalStore(root)
    assert len(Catalog(reader).open_attempts()) == 3
    collect_garbage(LocalStore(root), dead_epochs=[1])
    assert not [*root.glob("ended-*")]
    assert len(Catalog(reader).attempts()) == 3
    shutil.copytree(copy, root / copy.name)
    for store in (reader, LocalStore(root)):
        assert [entry.step for entry in Catalog(store).checkpoints()] == [8, 7, 6, 1]


def test_a_record_that_cannot_be_read_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """It is asked for again with the next list."""
    root, _ = _root_with_a_record(tmp_path)
    refused = Fault(kind="fail", op="head", key="ended-*", error=AccessDenied("not yours"))
    store = FaultyStore(LocalStore(root), [refused])
    assert len(Catalog(store).open_attempts()) == 8
    assert len(Catalog(store).open_attempts()) == 3
