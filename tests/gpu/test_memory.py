"""Tests that the host memory of saves is registered with CUDA once, and unregistered."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.states import Run
from holdfast.manager import CheckpointManager
from holdfast.staging import device as staging


class Counting:
    """Wrapper of CUDA's runtime that records which host memory is registered and unregistered."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.registered: list[int] = []
        self.returned: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        """Register memory, and record its address if CUDA accepts it."""
        status = self._runtime.cudaHostRegister(address, nbytes, flags)
        if int(status) == 0:
            self.registered.append(address)
        return status

    def cudaHostUnregister(self, address: int) -> Any:
        """Record the address of memory, and unregister it."""
        self.returned.append(address)
        return self._runtime.cudaHostUnregister(address)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_manager_that_is_closed_has_given_its_memory_back(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Closing unregisters all host memory, which was registered once, not at each save."""
    runtime = Counting(torch.cuda.cudart() if device == "cuda" else None)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(staging, "_runtime", lambda: runtime)
    run = Run(device)
    with CheckpointManager(tmp_path, run.state, overlap=overlap, sinks=()) as manager:
        counts = []
        for step in (1, 2, 3):
            run.step()
            manager.save(step).wait()
            counts.append(len(runtime.registered))
        kept = manager._session.saver.stager._files.values()
        images = [weakref.ref(image) for files in kept for image in files]
        assert images
        assert counts == [counts[0]] * 3
        assert (counts[0] > 0) is (device == "cuda")
        del kept
    gc.collect()
    assert [image() for image in images] == [None] * len(images)
    assert sorted(runtime.returned) == sorted(runtime.registered)
