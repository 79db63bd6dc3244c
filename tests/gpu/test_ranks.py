"""Tests of sharded saves of tensors on the device, by two processes that share one GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from distributed.run import run_ranks
from gpu.states import DEVICE, tensor_bits
from holdfast import CheckpointManager, load_weights
from marks import full

ROWS = (4, 3)
"""Of each rank: shards are uneven."""
SLOW_WITHOUT_GPU = [pytest.mark.full] if DEVICE == "cpu" else []
EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_ranks.py"


def whole() -> Tensor:
    return torch.linspace(-1, 1, sum(ROWS) * 5).reshape(sum(ROWS), 5)


class Sharded(nn.Module):
    """A weight sharded over the ranks, and a bias that each rank has."""

    def __init__(self, rank: int, device: str) -> None:
        super().__init__()
        mesh = DeviceMesh(device, range(len(ROWS)))
        local = whole().split(ROWS)[rank].to(device)
        shape = {"shape": whole().shape, "stride": whole().stride()}
        self.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], **shape))
        self.bias = nn.Parameter(torch.ones(5, device=device))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """Return the bits that this rank has of the weights and the slots of the optimizer."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = tensor_bits(local(parameter))
        for slot, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{slot}"] = tensor_bits(local(value))
    return found


def train(root: Path, device: str, overlap: bool, rank: int) -> tuple[dict[str, bytes], int]:
    """Save two steps on this rank, resume into zeros, and compare."""
    if device == "cuda":
        torch.cuda.set_device(0)
    model = Sharded(rank, device)
    # One by one: torch before 2.13 refuses a DTensor and a plain tensor in one list on CUDA.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root, state, overlap=overlap) as manager:
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * step
            optimizer.step()
            manager.save(step)
        manager.wait()
    expected = locals_of(model, optimizer)

    again = Sharded(rank, device)
    with torch.no_grad():
        for parameter in again.parameters():
            local(parameter).zero_()
    slots = torch.optim.AdamW(again.parameters(), lr=0.1, foreach=False)
    with CheckpointManager(root, {"model": again, "optimizer": slots}) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        assert {local(one).device.type for one in again.parameters()} == {device}
        assert locals_of(again, slots) == expected
        dist.barrier()
    return expected, found.step


@pytest.mark.parametrize("overlap", [True, *full(False)])
def test_shards_on_a_device_are_one_checkpoint(tmp_path: Path, device: str, overlap: bool) -> None:
    results = run_ranks(2, partial(train, tmp_path / "root", device, overlap))
    parts = [result[0] for result in results if result is not None]

    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(whole(), device=device))
    model.bias = nn.Parameter(torch.zeros(5, device=device))
    load_weights(tmp_path / "root", model)

    assert tensor_bits(model.weight) == b"".join(part["weight"] for part in parts)
    assert tensor_bits(model.bias) == parts[0]["bias"] == parts[1]["bias"]
    assert tensor_bits(model.weight) != tensor_bits(whole())


def start(root: Path, strategy: str) -> subprocess.Popen[bytes]:
    """Start the example with torchrun on one rank, with NCCL if there is a GPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(EXAMPLE)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(root), strategy], env=environment, start_new_session=True
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=SLOW_WITHOUT_GPU) for name in ("ddp", "fsdp2")]
)
def test_a_trainer_under_torchrun_that_was_killed_goes_on(
    tmp_path: Path, device: str, strategy: str
) -> None:
    """Invariant 7, with a process group of torch's choice for the device."""
    assert start(tmp_path / "whole", strategy).wait(120) == 0
    agent = start(tmp_path / "killed", strategy)
    try:
        end_s = time.monotonic() + 120
        while not any((tmp_path / "killed").glob("step-*/manifest.json")):
            assert time.monotonic() < end_s, "no checkpoint was committed"
            assert agent.poll() is None, "it ended before a checkpoint was committed"
            time.sleep(0.02)
    finally:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    assert start(tmp_path / "killed", strategy).wait(120) == 0

    one, other = (torch.load(tmp_path / name / "trained.pt") for name in ("whole", "killed"))
    assert {tensor.device.type for tensor in one} == {device}
    assert [tensor_bits(tensor) for tensor in one] == [tensor_bits(tensor) for tensor in other]
