"""Readers while a writer saves, deletes and collects: they see whole checkpoints or none."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from holdfast import errors
from holdfast.manager import CheckpointManager
from holdfast.saving import save as save_module
from holdfast.staging.interfaces import Staged
from holdfast.staging.stage import Stager
from holdfast.state.capture.capture import Captured

WRITER = """
import sys, torch
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
tree = {"step": 0, "x": [torch.zeros(20000) for _ in range(4)]}
with CheckpointManager(sys.argv[1], {"tree": tree}, keep=Last(2), sinks=()) as manager:
    print("ready", flush=True)
    for step in range(1, 10**9):
        tree["step"] = step
        for x in tree["x"]:
            x.fill_(step)
        manager.save(step).wait()
        if step == 2:
            print("going", flush=True)
"""


COMMITS_EARLY = """
import os, time
num_commits = 0
from holdfast.saving import save
from holdfast.saving.write_files import WrittenFile
real_commit, held = save.commit, []

def write_files(store, files, **options):
    digests = {}
    for file in files:
        if isinstance(file.content, save.BytesContent):
            store.put(file.key, file.content.data)
            digest = save.blocks.digest_blocks(file.content.data)
            digests[file.key] = WrittenFile(digests=digest)
            continue
        count = -(-file.content.nbytes // save.layout.BLOCK_NBYTES)
        data = b"".join(bytes(file.content.block(number, 60)) for number in range(count))
        store.put(file.key, bytes(len(data)))
        held.append((os.path.join(store.url, file.key), data))
        digests[file.key] = WrittenFile(digests=save.blocks.digest_blocks(data))
    return digests

def commit(*args):
    global num_commits
    real_commit(*args)
    num_commits += 1
    if num_commits == 2:
        print("going", flush=True)
        time.sleep(600)  # until it is killed, so that a reader cannot come too late
    for path, data in held:
        os.chmod(path, 0o644)
        with open(path, "wb") as file:
            file.write(data)
    held.clear()

save.write_files, save.commit = write_files, commit
"""


def read_beside_a_writer(root: Path, loads: int, mutant: str = "") -> int:
    """Load so often while a writer lives; the number of checkpoints that went away under us."""
    writer = warm.Popen(["-c", mutant + WRITER, root], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "ready\n"
        assert writer.stdout.readline() == "going\n"
        return sum(not load_whole(root) for _ in range(loads))
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


def load_whole(root: Path) -> bool:
    """Load the newest one and check that it is of one step; False when it was deleted under us."""
    tree = {"step": 0, "x": [torch.zeros(20000) for _ in range(4)]}
    manager = CheckpointManager(root, {"tree": tree}, sinks=())
    try:
        found = manager.load()
    except errors.NoCheckpoint:
        return False
    except errors.CorruptData as error:
        if "missing" not in str(error):
            raise
        return False
    finally:
        manager.close()
    assert values_of(tree) == {float(found.step)} == {float(tree["step"])}
    return True


def test_readers_beside_a_writer_see_whole_checkpoints(tmp_path: Path) -> None:
    """R11: no torn load, no crash; a checkpoint that is deleted meanwhile is a clear error."""
    gone = read_beside_a_writer(tmp_path, 150)
    assert gone < 150  # on a busy machine many may go


def test_a_writer_that_commits_before_it_writes_is_caught(tmp_path: Path) -> None:
    """R11: readers would see it."""
    with pytest.raises(errors.CorruptData):
        read_beside_a_writer(tmp_path, 1, COMMITS_EARLY)


@pytest.mark.long
def test_ten_thousand_loads_beside_a_writer(tmp_path: Path) -> None:
    """R11."""
    assert read_beside_a_writer(tmp_path, 10_000) < 5_000


def test_a_hundred_saves_hold_the_state_of_their_call(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: every tensor is changed right after save() returned."""
    changed = threading.Event()
    assert save_and_change(ram_path / "right", 100, changed) == 0
    # The mutant copies in the background, when the tensors have changed already.
    late: list[Callable[[], object]] = []
    prepare, write_files = Stager.prepare_staging, save_module._write_own

    def prepare_late(stager: Stager, captured: Captured, **options: Any) -> Staged:
        staged = prepare(stager, captured)
        late.append(lambda: prepare(stager, captured))
        return staged

    monkeypatch.setattr(Stager, "prepare_staging", prepare_late)

    def copy_and_write(*args: Any) -> Any:
        assert changed.wait(60)
        while late:
            late.pop()()
        return write_files(*args)

    monkeypatch.setattr(save_module, "_write_own", copy_and_write)
    assert save_and_change(ram_path / "mutant", 5, changed) == 5


def values_of(tree: dict[str, Any]) -> set[float]:
    """The lowest and the highest value of each tensor."""
    return {float(value) for x in tree["x"] for value in (x.min(), x.max())}


def save_and_change(root: Path, number: int, changed: threading.Event) -> int:
    """The number of checkpoints that hold more than the call's state; the event is set while the
    tensors hold what came after the call."""
    tree = {"x": [torch.zeros(4096) for _ in range(4)]}
    bad = 0
    with CheckpointManager(root, {"tree": tree}, sinks=(), preflight=False) as manager:
        for step in range(1, number + 1):
            for x in tree["x"]:
                x.fill_(step)
            changed.clear()
            pending = manager.save(step)
            for x in tree["x"]:
                x.fill_(-1)
            changed.set()
            pending.wait()
            manager.load(f"step={step}", components=["tree"])
            bad += values_of(tree) != {float(step)}
    return bad
