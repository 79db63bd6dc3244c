"""States larger than the memory that a save may take: the same bytes, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from children import environment
from holdfast import CheckpointManager
from holdfast.errors import DeadlineExceeded, OutOfMemory, SaveFailed, StoreFull, UsageError
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.staging.arena import FileImage
from holdfast.staging.waves import WaveTransfer
from holdfast.store import open_store
from holdfast.testing import Fault, FaultyStore
from holdfast.threads import buffers

BUDGET = 4 * BLOCK_NBYTES
STATE_NBYTES = 200 << 20
SLACK_NBYTES = 16 << 20
"""Of stacks of threads, of modules that the first save imports, and of small records."""
MEMORY_CHILD = """
import sys
import torch
from bench.machine import PeakMemory
from holdfast import CheckpointManager

root, budget, nbytes = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
state = {f"x{n}": torch.full((1 << 21,), float(n)) for n in range(nbytes >> 23)}
with CheckpointManager(root, {"tree": state}, memory_budget=budget, sinks=()) as manager:
    peak = PeakMemory()
    with peak.watch():
        manager.save(1).wait()
print(peak.extra_nbytes)
"""


def odd_state() -> dict[str, Any]:
    """Large and small tensors of many kinds, some of which lie across blocks."""
    whole = torch.randn(1500, 2000, dtype=torch.float64)
    return {
        "plain": torch.randn(3, BLOCK_NBYTES // 4),
        "strided": whole.t(),
        "every second": whole[:, ::2],
        "expanded": torch.randn(1, 3000).expand(1000, 3000),
        "conjugate": torch.randn(700, 900, dtype=torch.complex64).conj(),
        "negative": torch.randn(700, 900, dtype=torch.complex64).conj().imag,
        "half": torch.randn(3_000_001).to(torch.bfloat16),
        "bytes": torch.randint(0, 255, (3_000_001,), dtype=torch.uint8),
        "flags": torch.rand(1_000_003) > 0.5,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "small": [torch.randn(7) for _ in range(500)],
    }


def files_of(root: Path) -> dict[str, bytes]:
    (folder,) = root.glob("step*")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_waves_write_the_same_bytes(tmp_path: Path) -> None:
    """R21: how a state was staged is nothing that a file tells."""
    state = odd_state()
    for name, budget in (("whole", None), ("waves", BUDGET)):
        with CheckpointManager(tmp_path / name, {"x": state}, memory_budget=budget) as manager:
            manager.save(1, components=["x"]).wait()
    assert files_of(tmp_path / "waves") == files_of(tmp_path / "whole")


def test_the_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    """R14: the last wave was copied by then."""
    state = {"x": torch.zeros(12, BLOCK_NBYTES // 4)}
    with CheckpointManager(tmp_path, {"s": state}, memory_budget=BUDGET) as manager:
        for number in range(1, 6):
            state["x"].fill_(number)
            pending = manager.save(number)
            assert pending.staged.done()
            state["x"].fill_(-1)
            pending.wait()
            manager.load(f"step={number}", components=["s"])
            assert state["x"].min() == state["x"].max() == number


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM of Linux")
def test_a_save_takes_no_more_memory_than_its_budget(tmp_path: Path) -> None:
    """R14: beside that only what threads and small records take; without one, the whole state."""
    assert 0 < taken_nbytes(tmp_path / "waves", str(BUDGET)) < BUDGET + SLACK_NBYTES
    assert taken_nbytes(tmp_path / "whole", "") > STATE_NBYTES - SLACK_NBYTES


def taken_nbytes(root: Path, budget: str) -> int:
    """By how much the resident memory of a process grows at most while it saves."""
    command = [sys.executable, "-c", MEMORY_CHILD, str(root), budget, str(STATE_NBYTES)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    print(f"budget {budget or 'none'}: {int(done.stdout) >> 20} MiB")
    return int(done.stdout)


def test_a_state_that_fits_is_staged_as_a_whole(tmp_path: Path) -> None:
    state = {"x": torch.zeros(BLOCK_NBYTES // 4)}
    with CheckpointManager(tmp_path, {"s": state}, memory_budget="32MiB") as manager:
        manager.save(1).wait()
        assert manager._session.saver.stager._pool is None


@pytest.mark.parametrize("budget", [1, BUDGET - 1, "1MiB", "much"])
def test_a_budget_that_no_save_can_do_with_is_refused(tmp_path: Path, budget: Any) -> None:
    with pytest.raises(UsageError, match=r"memory_budget|size"):
        CheckpointManager(tmp_path, {"s": {}}, memory_budget=budget)


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_save_that_fails_in_a_wave_lets_training_go_on(tmp_path: Path, at: int) -> None:
    """R7, R8: save returns, the error comes with the next call, and the next save is whole."""
    full = Fault(kind="fail", op="write", at=at, error=StoreFull("no space left"))
    state = {"x": torch.randn(12, BLOCK_NBYTES // 4)}
    store = FaultyStore(open_store(tmp_path), [full])
    with CheckpointManager(store, {"s": state}, memory_budget=BUDGET, preflight=False) as manager:
        failed = manager.save(1)
        with pytest.raises(SaveFailed, match="no space left"):
            failed.wait()
        manager.save(2).wait()
        expected = state["x"].clone()
        state["x"].zero_()
        manager.load("step=2", components=["s"])
        assert torch.equal(state["x"], expected)
        assert [checkpoint.step for checkpoint in manager.list()] == [2]


def test_a_disk_that_hangs_is_named_and_the_next_save_has_memory_of_its_own(
    tmp_path: Path,
) -> None:
    """Invariant 9."""
    hangs = Fault(kind="hang", op="write", at=1, deadline_s=60)
    state = {"x": torch.randn(12, BLOCK_NBYTES // 4)}
    store = FaultyStore(open_store(tmp_path), [hangs])
    with CheckpointManager(
        store, {"s": state}, memory_budget=BUDGET, save_timeout_s=1, preflight=False
    ) as manager:
        with pytest.raises((SaveFailed, DeadlineExceeded)):
            manager.save(1).wait(120)
        hangs.release.set()
        manager._session.saver.timeout_s = 60
        manager.save(2).wait()
        expected = state["x"].clone()
        state["x"].zero_()
        manager.load("step=2", components=["s"])
        assert torch.equal(state["x"], expected)


class Interrupted(BaseException):
    """What a person presses."""


@pytest.mark.parametrize("error", [Interrupted, DeadlineExceeded])
def test_who_leaves_a_save_before_its_last_wave_gets_no_torn_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """R14, invariant 2: training goes on and changes what was not copied yet."""
    hangs = Fault(kind="hang", op="write", at=1, deadline_s=60)
    state = {"x": torch.zeros(12, BLOCK_NBYTES // 4)}
    store = FaultyStore(open_store(tmp_path), [hangs])

    def leave(staged: WaveTransfer, *_: Any) -> None:
        assert hangs.reached.wait(60)
        raise error("left")

    with CheckpointManager(store, {"s": state}, memory_budget=BUDGET, preflight=False) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(WaveTransfer, "run_copies", leave)
            with pytest.raises(error):
                manager.save(1)
        state["x"].fill_(1)
        hangs.release.set()
        manager._session.saver.wait_until_idle(60)
        assert manager.list() == ()
        manager.save(2).wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [2]


def test_saving_twice_at_a_step_is_nothing_in_waves_too(tmp_path: Path) -> None:
    state = {"x": torch.zeros(12, BLOCK_NBYTES // 4)}
    with CheckpointManager(
        tmp_path, {"s": state}, memory_budget=BUDGET, save_timeout_s=120
    ) as manager:
        first = manager.save(1).wait()
        assert manager.save(1).wait().folder == first.folder


def test_the_budget_holds_for_parts_that_are_saved_one_by_one(tmp_path: Path) -> None:
    state = {name: {"x": torch.zeros(2, BLOCK_NBYTES // 4)} for name in "abcd"}
    with CheckpointManager(tmp_path, state, memory_budget=BUDGET, preflight=False) as manager:
        for number, name in enumerate("abcd", start=1):
            manager.save(number, components=[name]).wait()
            kept = manager._session.saver.stager._files.values()
            assert sum(
                f.file.nbytes for files in kept for f in files if isinstance(f, FileImage)
            ) <= (BUDGET + BLOCK_NBYTES)


def test_a_save_that_failed_has_ended_also_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Fault(kind="fail", op="write", at=1)
    state = {"x": torch.zeros(12, BLOCK_NBYTES // 4)}
    store = FaultyStore(open_store(tmp_path), [fails])
    with CheckpointManager(store, {"s": state}, memory_budget=BUDGET, preflight=False) as manager:
        pending = manager.save(1)
        with pytest.raises(SaveFailed):
            pending.wait()
        with monkeypatch.context() as patched:
            patched.setattr(buffers, "allocate_pages", no_memory)
            with pytest.raises(OutOfMemory):
                manager.save(2)
        manager.save(3).wait()


def no_memory(nbytes: int) -> Any:
    raise OutOfMemory(f"{nbytes} bytes are not to be had")
