"""Claims about `holdfast gc`."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.roots import Result, cut_off, flip, folder_of, overwrite

from holdfast.format import layout
from holdfast.format.records import Alive, WriterRecord
from holdfast.ownership import claim
from holdfast.ownership.process import this_process
from holdfast.store.local import LocalStore

Command = Callable[..., Result]


@pytest.fixture
def unfinished(root: Path) -> Path:
    """An attempt that did not commit, of a writer that closed cleanly."""
    folder = folder_of(root, 300)
    cut_off(folder)
    return folder


def owned_by(root: Path, **changes: object) -> None:
    """Make the claim of the root that of another process, which has not closed."""
    path = root / "writers" / "00000001.json"
    writer: WriterRecord = WriterRecord.decode(path.read_bytes(), what="claim")
    process = msgspec.structs.replace(this_process(), **changes)
    overwrite(path, msgspec.structs.replace(writer, process=process).encode())
    (root / "writers" / "00000001.closed.json").unlink()


def test_uncommitted_attempts_go_and_checkpoints_stay(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    """R9."""
    result = holdfast("gc", root)
    assert result.code == 0
    assert f"removed {unfinished.name}: never committed" in result.out
    assert "freed" in result.out
    assert not unfinished.exists()
    assert holdfast("verify", root).out.count("ok  ") == 2
    assert holdfast("gc", root).out == "nothing to remove\n"


def test_a_dry_run_says_the_same_and_touches_nothing(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    before = sorted(root.rglob("*"))
    planned = holdfast("gc", root, "--dry-run", "--json").document
    assert sorted(root.rglob("*")) == before
    assert f"would remove {unfinished.name}" in holdfast("gc", root, "--dry-run").out
    assert "would be freed" in holdfast("gc", root, "--dry-run").out
    assert sorted(root.rglob("*")) == before
    done = holdfast("gc", root, "--json").document
    assert (planned.pop("dry_run"), done.pop("dry_run")) == (True, False)
    assert planned == done


def test_json_has_what_the_text_says(holdfast: Command, root: Path, unfinished: Path) -> None:
    document = holdfast("gc", root, "--json").document
    (removed,) = document["removed"]
    assert removed["folder"] == unfinished.name
    assert document["nbytes"] > 10_000
    assert document["failed"] == []


def test_what_a_live_owner_may_still_finish_stays(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    """R22."""
    owned_by(root)
    result = holdfast("gc", root)
    assert result.code == 0
    assert f"kept {unfinished.name}: writer 1 is alive" in result.out
    assert unfinished.exists()


def test_a_live_process_cannot_be_declared_dead(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    """R22."""
    owned_by(root)
    result = holdfast("gc", root, "--dead-epoch", 1)
    assert result.code == 2
    assert "is alive on this host; stop it first" in result.err
    assert unfinished.exists()


def test_a_writer_of_a_host_that_is_gone_can_be_declared_dead(
    holdfast: Command, root: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "WATCH_S", 0.03)
    owned_by(root, boot_id="another", host="node17")
    result = holdfast("gc", root, "--dead-epoch", 1)
    assert result.code == 0
    assert not unfinished.exists()


def test_an_owner_on_another_host_whose_heart_beats_cannot_be_declared_dead(
    holdfast: Command, root: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: it may have just judged the pins of what it deletes."""
    monkeypatch.setattr(claim, "WATCH_S", 3.0)
    owned_by(root, boot_id="another", host="node17")
    writer = WriterRecord.decode((root / "writers" / "00000001.json").read_bytes(), what="claim")
    has_ended = threading.Event()

    def beat() -> None:
        store = LocalStore(root)
        for number in itertools.count():
            alive = Alive(epoch=1, nonce=writer.nonce, beat=number)
            store.put(layout.alive_key(1), alive.encode())
            if has_ended.wait(0.001):
                return

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        result = holdfast("gc", root, "--dead-epoch", 1)
    finally:
        has_ended.set()
        heart.join()
    assert result.code == 2
    assert "on node17 owns the run and has a live heartbeat; stop it first" in result.err
    assert unfinished.exists()


def test_a_writer_whose_claim_was_lost_can_be_declared_dead(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    owned_by(root)
    claim_of_1 = root / "writers" / "00000001.json"
    (root / "writers" / "00000002.json").write_bytes(claim_of_1.read_bytes())
    claim_of_1.unlink()
    assert holdfast("gc", root, "--dead-epoch", 1).code == 0
    assert not unfinished.exists()


def test_markers_that_stay_are_counted_each_time_with_what_to_do(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    """R22: nobody but a person can know that a writer elsewhere is not just paused."""
    owned_by(root, boot_id="another", host="node17")
    (root / "writers" / "00000002.json").write_bytes(b"not to be read: it is later than the first")
    for first in (True, False):
        result = holdfast("gc", root)
        assert result.code == 0
        assert (f"marked {unfinished.name}" in result.out) is first
        assert "markers kept: 1, from writers 1," in result.out
        assert f"holdfast gc {root} --dead-epoch 1" in result.out
    assert holdfast("gc", root, "--json").document["markers"] == [{"epoch": 1, "number": 1}]
    assert "stay" not in holdfast("gc", root, "--dead-epoch", "1").out
    assert not unfinished.exists()
    assert holdfast("gc", root, "--json").document["markers"] == []


def test_a_writer_with_an_unreadable_claim_can_be_declared_dead(
    holdfast: Command, root: Path, unfinished: Path
) -> None:
    owned_by(root)
    flip(root / "writers" / "00000001.json", 100)
    assert holdfast("gc", root, "--dead-epoch", 1).code == 0
    assert not unfinished.exists()


@pytest.mark.parametrize("number", ["7", "0", "-1", "one"])
def test_a_writer_that_never_was_cannot_be_declared_dead(
    holdfast: Command, root: Path, number: str
) -> None:
    assert holdfast("gc", root, "--dead-epoch", number).code == 2


def test_a_dead_owner_is_noticed_by_itself(holdfast: Command, root: Path, unfinished: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=60)
    owned_by(root, pid=gone.pid, start="1")
    assert holdfast("gc", root).code == 0
    assert not unfinished.exists()


def test_a_damaged_manifest_is_not_collected(holdfast: Command, root: Path) -> None:
    """R20, D13: what cannot be read may be a checkpoint."""
    flip(folder_of(root, 300) / "manifest.json", 100)
    result = holdfast("gc", root)
    assert result.code == 1
    assert f"FAILED {folder_of(root, 300).name}: " in result.out
    assert (folder_of(root, 300) / "model-00000.safetensors").exists()


def test_a_running_manager_of_this_process_is_left_alone(
    holdfast: Command, root: Path, unfinished: Path, saving: Callable[..., Any]
) -> None:
    manager = saving()
    assert holdfast("gc", root).code == 0
    manager.save(400).wait()
    assert holdfast("verify", f"{root}@step=400").code == 0
