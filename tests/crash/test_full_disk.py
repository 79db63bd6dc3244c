"""A full disk: a clear error, earlier checkpoints as they were, space given back, training on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import errors
from holdfast.maintenance.verify import verify_root
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.saving import save as save_module
from holdfast.store.local import LocalStore
from holdfast.store.local.blocks import LocalBlockWriter
from marks import diagonal

MIB = 1 << 20


def new_manager(root: Path, nbytes: int, **options: Any) -> CheckpointManager:
    state = {"small": {"x": torch.ones(6 * MIB // 4)}, "tree": {"x": torch.ones(nbytes // 4)}}
    return CheckpointManager(root, state, **{"sinks": (), "preflight": False} | options)


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    path = disk / "ballast"
    with open(path, "wb") as file:
        file.write(b"\1" * (free(disk) - leave))
    return path


@pytest.mark.parametrize(("leave_mib", "size_mib"), diagonal([0, 1, 4, 10, 23], [24, 40]))
def test_a_save_that_does_not_fit_fails_clean(
    small_disk: Path, leave_mib: int, size_mib: int
) -> None:
    """R8, D1, D7: same size and growing; the old one stays, and no byte is left behind."""
    root = small_disk / "run"
    with new_manager(root, 24 * MIB, keep=Last(1)) as manager:
        manager.save(1).wait()
        ballast = fill(small_disk, leave_mib * MIB)
        before = free(small_disk)
        manager.state["tree"]["x"] = torch.ones(size_mib * MIB // 4)
        with pytest.raises(errors.SaveFailed) as caught:
            manager.save(2).wait()
        assert isinstance(caught.value.__cause__, errors.StoreFull)
        assert "free" in str(caught.value)
        assert free(small_disk) >= before - 64 * 1024
        assert [checkpoint.step for checkpoint in manager.list()] == [1]
        ballast.unlink()
        manager.state["tree"]["x"] = torch.ones(8 * MIB // 4)
        manager.save(3).wait()
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [3]
    assert verify_root(LocalStore(root)).ok


def test_preflight_says_before_the_first_save_that_it_will_not_fit(small_disk: Path) -> None:
    """R8, 13 of the field's gaps: no hours are spent first; what retention keeps counts, too."""
    with (
        new_manager(small_disk / "run", 24 * MIB, keep=Last(3), preflight=True) as manager,
        pytest.raises(errors.PreflightFailed, match="bytes"),
    ):
        manager.save(1)
    assert not [name for name in os.listdir(small_disk / "run") if name.startswith("step")]


def test_no_inodes_left_is_a_clear_error(small_disk: Path) -> None:
    """R8."""
    root = small_disk / "run"
    with new_manager(root, MIB) as manager:
        manager.save(1).wait()
        ballast = small_disk / "many"
        ballast.mkdir()
        number = 0
        while os.statvfs(small_disk).f_favail > 0:
            (ballast / str(number)).touch()
            number += 1
        with pytest.raises(errors.SaveFailed, match="inodes"):
            manager.save(2).wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [1]
    assert verify_root(LocalStore(root)).ok


def test_a_mutant_that_keeps_its_failed_attempts_is_caught(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: the space of a failed save must come back, from files under way and from whole ones."""
    monkeypatch.setattr(save_module, "abandon", lambda store, attempt: False)
    monkeypatch.setattr(LocalBlockWriter, "abort", lambda writer: None)
    with pytest.raises((AssertionError, errors.HoldfastError)):
        test_a_save_that_does_not_fit_fails_clean(small_disk, 10, 24)
