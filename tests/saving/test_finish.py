"""Decision 0069: what a dead training has staged whole is finished, in its term or not at all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import warm
from holdfast.errors import CommitConflict, StoreError
from holdfast.format.manifest import Manifest
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ownership.process import this_process
from holdfast.root.catalog import Catalog, Entry
from holdfast.saving import finish as finish_module
from holdfast.saving import save as save_module
from holdfast.saving.finish import finish_saves
from holdfast.staging.arena import FileImage
from holdfast.staging.shared import SUPERVISOR, SharedFolder, Supervisor, write_record
from holdfast.store.local import LocalStore
from marks import full

TRAINED = Path(__file__).with_name("trained.py")
FINISHING = """
import sys
sys.path.insert(0, sys.argv[1])
import trained
from holdfast.saving.finish import main

trained.strike(sys.argv[2])
main(sys.argv[3])
"""
KEPT = 2
"""Step that is committed before the one at which a training dies."""
MOMENTS = {
    "before staging": KEPT,
    "while staging": KEPT,
    "before the record": KEPT,
    "staged": KEPT + 1,
    "making the folder": KEPT + 1,
    "writing": KEPT + 1,
    "before the index": KEPT + 1,
    "before the manifest": KEPT + 1,
    "after the manifest": KEPT + 1,
    "settled": KEPT + 1,
}
"""Newest step after the finish, by the moment of the death."""
QUICK = ("while staging", "staged", "writing", "before the manifest", "after the manifest")
"""Moments of `make test`: one of each state in which a save can be left."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SharedFolder]:
    """The folder of a supervisor, which is this process."""
    (tmp_path / "shared").mkdir()
    supervisor = Supervisor(this_process(), 100 << 20)
    folder, lock = SharedFolder.make_at(tmp_path / "shared", supervisor)
    yield folder
    os.close(lock)


def train(folder: SharedFolder, root: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a training, and return the facts that it tells."""
    environment = {"HOLDFAST_MEMORY": str(folder.path)}
    done = warm.run([TRAINED, root, json.dumps(options)], env=environment)
    assert done.returncode == (-9 if "die" in options else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def bits_of(told: Sequence[dict[str, Any]], step: int, rank: int = 0) -> str:
    """The bits of a rank at a step, before its save or after its resume."""
    return next(
        one["bits"]
        for one in told
        if one.get("rank") == rank and step in (one.get("step"), one.get("resumed"))
    )


def finish(folder: SharedFolder, *, are_dead: bool = False) -> str:
    """Finish what is left; returns what was said."""
    texts: list[str] = []
    finish_saves(folder, texts.append, are_dead=are_dead)
    return "\n".join(texts)


def entries_of(root: Path) -> list[Entry]:
    """All checkpoints of a root, newest first, which are all whole."""
    catalog = Catalog(LocalStore(root))
    found = [entry for name in catalog.attempts() if (entry := catalog.entry(name))]
    for entry in found:
        assert verify(catalog.store, entry.folder).ok
    return sorted(found, key=lambda entry: entry.name.order, reverse=True)


@pytest.mark.parametrize("overlap", [False, *full(True)])
@pytest.mark.parametrize(
    ("moment", "newest"),
    [
        pytest.param(*item, marks=() if item[0] in QUICK else pytest.mark.full)
        for item in MOMENTS.items()
    ],
)
def test_a_save_is_finished_if_it_was_staged_whole(
    folder: SharedFolder, tmp_path: Path, moment: str, newest: int, overlap: bool
) -> None:
    root = tmp_path / "run"
    told = train(folder, root, until=9, at=KEPT + 1, die=moment, overlap=overlap)
    said = finish(folder)
    assert ("finished" in said) is (
        newest > KEPT and moment not in ("after the manifest", "settled")
    )
    assert [entry.step for entry in entries_of(root)] == [*range(newest, 0, -1)]
    assert finish(folder) == ""
    again = train(folder, root, until=newest + 1)
    assert again[0]["resumed"] == newest
    assert bits_of(again, newest) == bits_of(told, newest)
    assert [entry.step for entry in entries_of(root)] == [*range(newest + 1, 0, -1)]


@pytest.mark.parametrize("moment", ["posting", "before the manifest", *full(*MOMENTS)])
def test_so_is_one_of_several_ranks(folder: SharedFolder, tmp_path: Path, moment: str) -> None:
    """Each is staged by some of the ranks, or by all, when one of them ends the process of all."""
    root = tmp_path / "run"
    told = train(folder, root, until=9, at=KEPT + 1, die=moment, ranks=3)
    said = finish(folder)
    newest = entries_of(root)[0]
    is_late = moment in ("before the index", "before the manifest")
    assert newest.step == KEPT + 1 if is_late else newest.step in (KEPT, KEPT + 1)
    is_committed = moment in ("after the manifest", "settled")
    assert ("finished" in said) is (newest.step > KEPT and not is_committed)
    assert newest.manifest.world_size == 3
    again = train(folder, root, until=newest.step + 1, ranks=3)
    for rank in range(3):
        assert bits_of(again, newest.step, rank) == bits_of(told, newest.step, rank)
    assert entries_of(root)[0].step == newest.step + 1


def test_it_has_the_epoch_of_the_dead_and_the_next_sequence(
    folder: SharedFolder, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    finish(folder)
    (newest, before, *_) = entries_of(root)
    assert (newest.name.epoch, newest.name.sequence) == (1, KEPT + 2)
    assert newest.manifest.writer == before.manifest.writer
    assert LocalStore(root).pointed("latest") == newest.folder


def test_with_two_tiers_it_is_committed_locally_and_the_restart_uploads_it(
    folder: SharedFolder, tmp_path: Path
) -> None:
    root, remote = tmp_path / "run", tmp_path / "remote"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest", remote=str(remote))
    finish(folder)
    assert entries_of(root)[0].step == KEPT + 1
    train(folder, root, until=KEPT + 2, remote=str(remote))
    assert [entry.step for entry in entries_of(remote)] == [*range(KEPT + 2, 0, -1)]


def test_after_a_later_claim_nothing_is_committed(folder: SharedFolder, tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    with CheckpointManager(root, {"x": {"n": 1}}, sinks=(), takeover=True) as manager:
        manager.start_new()
        assert "took the run over" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_a_claim_that_comes_in_between_wins(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 3, right before the put of the manifest."""
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    commit = save_module.commit
    with CheckpointManager(root, {"x": {"n": 1}}, sinks=()) as manager:

        def claim_first(*args: Any) -> None:
            manager.start_new()
            commit(*args)

        monkeypatch.setattr(save_module, "commit", claim_first)
        assert "took the run over" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_gc_meanwhile_leaves_a_marker(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 1: the epoch has something in flight although its process is dead."""
    root, commit = tmp_path / "run", save_module.commit
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")

    def collect_first(store: Any, attempt: Any, manifest: Manifest) -> None:
        report = collect_garbage(LocalStore(root))
        assert attempt.folder in [folder for folder, _ in report.marked]
        with pytest.raises(CommitConflict):
            commit(store, attempt, manifest)
        raise CommitConflict("as it was")

    monkeypatch.setattr(save_module, "commit", collect_first)
    assert "was not finished" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_flipped_bits_are_found_if_the_digest_was_known(
    folder: SharedFolder, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    (own,) = folder.staging_folders()
    with (own.path / "model-00000.safetensors.arena").open("r+b") as arena:
        arena.seek(100_000)
        byte = arena.read(1)[0]
        arena.seek(100_000)
        arena.write(bytes([byte ^ 1]))
    assert "is not what was staged" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_a_damaged_record_is_left_alone(folder: SharedFolder, tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    (own,) = folder.staging_folders()
    path = own.record_path
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "digest does not fit" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_a_record_that_cannot_be_read_now_ends_no_save_of_its_ranks(
    folder: SharedFolder, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest", ranks=3)
    record = folder.staging_folders()[0].path / "staged"
    record.rename(tmp_path / "record")
    record.mkdir()  # as by an error of the system
    assert "no staged save was finished" in finish(folder)
    assert folder.is_unfinished
    record.rmdir()
    (tmp_path / "record").rename(record)
    assert "finished the save of step" in finish(folder)
    assert not folder.is_unfinished


def test_a_failed_save_is_not_finished(folder: SharedFolder, tmp_path: Path) -> None:
    """Invariant 2: a save with any failure never commits."""
    root = tmp_path / "run"
    told = train(folder, root, until=3, at=3, die="failed")
    assert any("the disk is full" in one.get("save_failed", "") for one in told)
    assert finish(folder) == ""
    assert [entry.step for entry in entries_of(root)] == [2, 1]


def test_a_living_process_keeps_its_save_which_is_finished_once_it_is_dead(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    with monkeypatch.context() as living:
        living.setattr(finish_module, "_DEAD_S", 0.0)
        living.setattr(finish_module, "liveness", lambda process: "alive")
        assert "may still run" in finish(folder)
        assert [entry.step for entry in entries_of(root)] == [2, 1]
    assert "finished" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [3, 2, 1]


def test_a_process_of_another_namespace_is_dead_if_its_lock_is_free(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    monkeypatch.setattr(finish_module, "_DEAD_S", 0.0)
    monkeypatch.setattr(finish_module, "liveness", lambda process: "unknown")
    assert "may still run" in finish(folder)
    assert "finished" in finish(folder, are_dead=True)
    assert [entry.step for entry in entries_of(root)] == [3, 2, 1]


@pytest.mark.parametrize(
    "moment",
    ["before the manifest", "after the manifest", *full("making the folder", "writing", "settled")],
)
def test_a_killed_finish_is_made_again_and_commits_once(
    folder: SharedFolder, tmp_path: Path, moment: str
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    assert warm.run(["-c", FINISHING, TRAINED.parent, moment, folder.path]).returncode == -9
    finish(folder)
    assert [entry.step for entry in entries_of(root)] == [3, 2, 1]
    train(folder, root, until=KEPT + 2)
    assert [entry.step for entry in entries_of(root)] == [4, 3, 2, 1]


def test_memory_of_an_earlier_layout_is_freed_though_a_fork_has_it_mapped(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the worker processes of a data loader."""
    monkeypatch.setenv("HOLDFAST_MEMORY", str(folder.path))
    model = nn.Linear(8, 8192)
    with CheckpointManager(tmp_path / "run", {"model": model}, sinks=()) as manager:
        manager.save(1).wait()
        (own,) = folder.staging_folders()
        with own.arena_path("model-00000.safetensors").open("rb") as mapped:
            assert os.fstat(mapped.fileno()).st_blocks > 0
            model.register_buffer("more", torch.ones(8))
            manager.save(2).wait()
            assert os.fstat(mapped.fileno()).st_nlink == 0
            assert os.fstat(mapped.fileno()).st_blocks == 0


def test_after_an_error_of_the_store_it_is_tried_again(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    train(folder, root, until=9, at=KEPT + 1, die="before the manifest")
    with monkeypatch.context() as failing:
        failing.setattr(save_module, "commit", _fail)
        assert "was not finished: the disk is full" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [2, 1]
    assert "finished" in finish(folder)
    assert [entry.step for entry in entries_of(root)] == [3, 2, 1]


def _fail(*_: Any) -> None:
    raise StoreError("the disk is full")


def test_a_training_in_another_root_leaves_it_to_be_finished(
    folder: SharedFolder, tmp_path: Path
) -> None:
    """As an evaluation that the command of `holdfast run` starts afterwards."""
    train(folder, tmp_path / "run", until=9, at=KEPT + 1, die="before the manifest")
    train(folder, tmp_path / "other", until=1)
    assert "finished" in finish(folder)
    assert [entry.step for entry in entries_of(tmp_path / "run")] == [3, 2, 1]


def test_it_is_compressed_as_the_training_would_have(folder: SharedFolder, tmp_path: Path) -> None:
    root, manager = tmp_path / "run", {"compress": {"model": "zstd"}}
    told = train(folder, root, until=9, at=KEPT + 1, die="before the manifest", manager=manager)
    finish(folder)
    (newest, before, *_) = entries_of(root)
    assert sorted(newest.manifest.files) == sorted(before.manifest.files)
    again = train(folder, root, until=KEPT + 1, manager=manager)
    assert bits_of(again, KEPT + 1) == bits_of(told, KEPT + 1)


@pytest.mark.parametrize(
    ("manager", "why"),
    [
        ({"memory_budget": "32MiB"}, ""),
        ({"encrypt": True}, "not for encrypted runs"),
    ],
)
def test_what_cannot_be_kept_is_said(
    folder: SharedFolder, tmp_path: Path, manager: dict[str, Any], why: str
) -> None:
    root = tmp_path / "run"
    told = train(folder, root, until=9, at=KEPT + 1, die="before the manifest", manager=manager)
    warned = " ".join(one.get("warning", "") for one in told)
    assert why in warned
    assert ("finished" in finish(folder)) is (why == "")


def test_hashing_does_not_delay_the_record(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap the state is whole while threads hash it, which may take seconds."""
    monkeypatch.setenv("HOLDFAST_MEMORY", str(folder.path))
    may_hash, digest = threading.Event(), FileImage.digest_block

    def wait_and_digest(image: FileImage, number: int) -> bytes:
        assert may_hash.wait(60)
        return digest(image, number)

    monkeypatch.setattr(FileImage, "digest_block", wait_and_digest)
    models = {f"model{number}": nn.Linear(8, 8192) for number in range(16)}
    parameters = [one for model in models.values() for one in model.parameters()]
    state = {**models, "optimizer": torch.optim.SGD(parameters)}
    with CheckpointManager(tmp_path / "run", state, sinks=(), overlap=True) as manager:
        pending = manager.save(1)
        end = time.monotonic() + 60
        while not folder.is_unfinished and time.monotonic() < end:
            time.sleep(0.01)
        assert folder.is_unfinished
        assert not pending.committed.done()
        may_hash.set()
        pending.wait()


def test_over_the_budget_the_state_is_in_ordinary_memory(
    folder: SharedFolder, tmp_path: Path
) -> None:
    write_record(folder.path / SUPERVISOR, Supervisor(this_process(), 500_000))
    root = tmp_path / "run"
    told = train(folder, root, until=2)
    (warning,) = [one["warning"] for one in told if "--memory" in one.get("warning", "")]
    assert "ordinary memory" in warning
    assert "500,000" in warning
    assert [entry.step for entry in entries_of(root)] == [2, 1]
    assert list(folder.path.glob("*/*.arena")) == []
