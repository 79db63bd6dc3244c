"""Tests that a save holds the work queued on the current stream before it, and none after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.states import Run, needs_cuda
from holdfast.manager import CheckpointManager

# Torch may warn that gradients come from another stream than in the steps before.
pytestmark = [needs_cuda, pytest.mark.filterwarnings("default")]
CYCLES = 200_000_000
"""Cycles for which a kernel delays a stream: a tenth of a second, longer than a save's start."""


def sleep() -> None:
    """Queue a kernel on the current stream that takes `CYCLES`."""
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


def held_up(stream: torch.cuda.Stream, tensor: Tensor, value: float) -> None:
    """Have a stream fill a tensor after a delay."""
    with torch.cuda.stream(stream):
        sleep()
        tensor.fill_(value)


@pytest.fixture
def stream() -> torch.cuda.Stream:
    """A stream beside the default one."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@pytest.fixture
def tree() -> dict[str, Tensor]:
    """A small tensor and a large one."""
    return {"small": torch.zeros(10, device="cuda"), "large": torch.zeros(5_000_000, device="cuda")}


def loaded(root: Path, tree: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Load step 1, and return the least and the largest value of each tensor."""
    with CheckpointManager(root, {"tree": tree}, sinks=()) as manager:
        manager.load(1)
    return [(float(tensor.min()), float(tensor.max())) for tensor in tree.values()]


def test_what_another_stream_writes_is_saved_when_the_current_one_waits_for_it(
    tmp_path: Path, tree: dict[str, Tensor], stream: torch.cuda.Stream
) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with CheckpointManager(tmp_path, {"tree": tree}, sinks=()) as manager:
        for tensor in tree.values():
            held_up(stream, tensor, 3.0)
        torch.cuda.current_stream().wait_stream(stream)
        manager.save(1)
        for tensor in tree.values():
            tensor.fill_(4.0)
        manager.wait()
    assert loaded(tmp_path, tree) == [(3.0, 3.0)] * 2


def test_a_save_inside_a_stream_takes_what_that_stream_writes(
    tmp_path: Path, tree: dict[str, Tensor], stream: torch.cuda.Stream
) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with (
        CheckpointManager(tmp_path, {"tree": tree}, sinks=()) as manager,
        torch.cuda.stream(stream),
    ):
        for tensor in tree.values():
            held_up(stream, tensor, 3.0)
        manager.save(1)
        for tensor in tree.values():
            tensor.fill_(4.0)
        manager.wait()
    torch.cuda.current_stream().wait_stream(stream)
    assert loaded(tmp_path, tree) == [(3.0, 3.0)] * 2


@pytest.mark.parametrize("overlap", [True, "check"])
def test_a_step_on_another_stream_comes_after_the_copy(
    tmp_path: Path, overlap: Any, stream: torch.cuda.Stream
) -> None:
    """The optimizer makes the stream on which it steps wait for the copy."""
    run = Run("cuda")
    run.step()
    with CheckpointManager(tmp_path, run.state, overlap=overlap, sinks=()) as manager:
        for step in range(1, 4):
            expected = run.bits()
            sleep()  # so that the copy, which comes after it, is late
            pending = manager.save(step)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run.step()
            torch.cuda.current_stream().wait_stream(stream)
            pending.wait()
            manager.load(step)
            assert run.bits() == expected
