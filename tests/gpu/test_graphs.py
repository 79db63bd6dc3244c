"""Tests with CUDA graphs: saves between replays are exact; saves in a capture are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu.states import Run, needs_cuda
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager
from holdfast.weights import load_weights

# Torch may warn that gradients come from another stream than in the first steps.
pytestmark = pytest.mark.filterwarnings("default")


CALLS: dict[str, Callable[[CheckpointManager], Any]] = {
    "save": lambda manager: manager.save(2),
    "maybe_save": lambda manager: manager.maybe_save(2),
    "load": lambda manager: manager.load(),
    "resume": lambda manager: manager.resume(),
    "load_weights": lambda manager: load_weights("unused", nn.Linear(1, 1)),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_copied_while_a_graph_is_captured(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A call during a capture is refused and changes nothing: its copies would be recorded."""
    run = Run(device)
    run.step()
    with CheckpointManager(tmp_path, run.state, every="1step", sinks=()) as manager:
        manager.save(1).wait()
        expected = run.bits()
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(UsageError, match="while a CUDA graph is captured"):
                CALLS[call](manager)
        assert run.bits() == expected
        assert manager.save(2).wait().step == 2


@needs_cuda
def test_a_save_that_was_refused_leaves_the_capture_as_it_is(tmp_path: Path) -> None:
    value = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with CheckpointManager(tmp_path, {"tree": {"value": value}}, sinks=()) as manager:
        manager.save(1).wait()
        with torch.cuda.graph(graph):
            value += 1
            with pytest.raises(UsageError, match="while a CUDA graph is captured"):
                manager.save(2)
            value *= 2
        graph.replay()
        manager.save(3).wait()
        value.zero_()
        manager.load(3)
    assert value.eq(2).all()


def captured(run: Run, batch: Tensor) -> torch.cuda.CUDAGraph:
    """Capture a step as a graph, after three warm-up steps on another stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run.step(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.step(batch)
    return graph


@needs_cuda
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_saves_between_replays_hold_the_state_of_their_call(
    tmp_path: Path, overlap: bool, in_place: bool
) -> None:
    """R14: saves are exact though no hook sees a replay; replays go on from what was loaded."""
    run = Run("cuda", capturable=True)
    batch = torch.randn(16, 96, device="cuda")
    with CheckpointManager(tmp_path, run.state, overlap=overlap, sinks=()) as manager:
        graph = captured(run, batch)
        for step in range(1, 4):
            graph.replay()
            expected = run.bits()
            manager.save(step)
            graph.replay()
            graph.replay()
            manager.wait()
            further = run.bits()
            assert further != expected
            manager.load(step, in_place=in_place)
            assert run.bits() == expected
            graph.replay()
            graph.replay()
            assert run.bits() == further
