"""Copies from a device, as far as they can be tried without one; tests/gpu has the rest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import DeadlineExceeded
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.staging.arena import FileImage
from holdfast.staging.device import DeviceCopy, begin_copies, is_capturing, pin
from holdfast.staging.in_memory import Arrival, ImageTransfer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Event:
    """Stands in for what comes after copies on a stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def synchronize(self) -> None:
        """The copies have arrived, or failed."""
        if self._error is not None:
            raise self._error


def device_copy(error: Exception | None = None) -> DeviceCopy:
    event: Any = Event(error)
    return DeviceCopy(event, torch.device("cuda"))


def new_image() -> FileImage:
    specs = [TensorSpec(key="a", dtype="F32", shape=(4,))]
    return FileImage(lay_out("model", specs)[0])


def test_nothing_is_captured_and_nothing_begun_without_a_device_tensor() -> None:
    assert is_capturing() is False
    assert begin_copies([]) == []


def test_blocks_are_there_when_the_copy_has_arrived() -> None:
    image, copy = new_image(), device_copy()
    copying = ImageTransfer([], [Arrival(image, [0], copy)])
    with pytest.raises(DeadlineExceeded):
        copying.wait_for_block(image, 0, 0.01)
    copying.run_later()
    copying.wait_for_block(image, 0, 0.01)
    assert copy.done()


def test_who_waits_for_blocks_gets_the_error_of_the_copy() -> None:
    image = new_image()
    copying = ImageTransfer([Arrival(image, [0], device_copy(RuntimeError("device lost")))], [])
    with pytest.raises(RuntimeError, match="device lost"):
        copying.run_now(1.0)
    with pytest.raises(RuntimeError, match="device lost"):
        copying.wait_for_block(image, 0, 0.01)


class Runtime:
    """Stands in for CUDA's: what it was told, and by which threads."""

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.told: list[tuple[str, int]] = []
        self.threads: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Take the memory, or refuse it."""
        self.told.append(("register", address))
        self.threads.add(threading.get_ident())
        return self._status

    def cudaHostUnregister(self, address: int) -> None:
        """Forget it."""
        self.told.append(("unregister", address))


@pytest.fixture
def new_runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Runtime]:
    """Puts one in the place of CUDA's."""

    def made(status: int) -> Runtime:
        runtime = Runtime(status)
        monkeypatch.setattr("holdfast.staging.device._runtime", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        return runtime

    return made


def test_memory_is_forgotten_when_its_owner_goes_but_not_in_a_forked_child(
    new_runtime: Callable[[int], Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child has no CUDA, and its parent still uses the memory."""
    runtime, memory = new_runtime(0), torch.zeros(4096, dtype=torch.uint8)
    for is_child in (False, True):
        runtime.told.clear()
        owner = nn.Identity()
        assert pin(memory, owner, torch.device("cuda", 0))
        assert runtime.told == [("register", memory.data_ptr())]
        with monkeypatch.context() as patch:
            if is_child:
                patch.setattr(os, "getpid", lambda: 0)
            del owner
        assert (("unregister", memory.data_ptr()) in runtime.told) is not is_child


def test_a_refusal_is_no_error_and_stays_with_a_thread_of_its_own(
    new_runtime: Callable[[int], Runtime],
) -> None:
    """CUDA's runtime keeps an error for the thread, where the next kernel would raise it."""
    runtime, owner = new_runtime(2), nn.Identity()
    assert not pin(torch.zeros(4096, dtype=torch.uint8), owner, torch.device("cuda", 0))
    assert runtime.threads
    assert threading.get_ident() not in runtime.threads
    del owner
    assert [what for what, _ in runtime.told] == ["register"]


@needs_cuda
def test_pinned_memory_is_given_back() -> None:
    memory, owner = torch.zeros(1 << 20, dtype=torch.uint8), nn.Identity()
    device = torch.device("cuda", 0)
    assert pin(memory, owner, device)
    assert not pin(memory, nn.Identity(), device), "registered twice"
    torch.ones(3, device=device).sum().item()  # which would raise what is left of the refusal
    del owner
    assert pin(memory, nn.Identity(), device)
