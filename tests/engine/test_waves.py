"""States larger than the memory that a save may take: the same bytes, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager
from holdfast.errors import DeadlineExceeded, SaveFailed, StoreFull, UsageError
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store import open_store
from holdfast.testing import Fault, FaultyStore

BUDGET = 4 * BLOCK_NBYTES


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


def test_a_state_that_fits_is_staged_as_a_whole(tmp_path: Path) -> None:
    state = {"x": torch.zeros(BLOCK_NBYTES // 4)}
    with CheckpointManager(tmp_path, {"s": state}, memory_budget="32MiB") as manager:
        manager.save(1).wait()
        assert manager._saver._stager._pool is None


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
            manager.save(1).wait(30)
        hangs.release.set()
        manager._saver.timeout_s = 60
        manager.save(2).wait()
        expected = state["x"].clone()
        state["x"].zero_()
        manager.load("step=2", components=["s"])
        assert torch.equal(state["x"], expected)
