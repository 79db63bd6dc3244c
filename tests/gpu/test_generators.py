"""Tests that random generators, global and of the state, are restored on CPU and device."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from children import environment
from holdfast.manager import CheckpointManager

FRESH_CHILD = """
import sys, torch
from holdfast.manager import CheckpointManager

root, device = sys.argv[1:]
with CheckpointManager(root, {"tree": {"x": torch.zeros(3)}}, sinks=()) as manager:
    manager.load(1)
print(torch.rand(5).tolist() + torch.rand(5, device=device).tolist())
"""


def draws(device: str, *own: Any) -> list[Any]:
    """Draw a few numbers from each global generator and from those given."""
    found = [random.random(), float(np.random.random())]
    found += torch.rand(5).tolist() + torch.rand(5, device=device).tolist()
    for generator in own:
        found += torch.rand(5, device=generator.device, generator=generator).tolist()
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_all_generators_go_on_where_they_were(tmp_path: Path, device: str, overlap: bool) -> None:
    """Invariant 7: the global generators, and those that a program has made for itself."""
    own = [torch.Generator().manual_seed(5), torch.Generator(device).manual_seed(6)]
    state = {"data": {"order": own[0], "noise": own[1]}}
    draws(device, *own)
    with CheckpointManager(tmp_path, state, overlap=overlap, sinks=()) as manager:
        pending = manager.save(1)
        expected = draws(device, *own)
        pending.wait()
        assert draws(device, *own) != expected
        manager.load(1)
        assert draws(device, *own) == expected


@pytest.mark.full
def test_a_new_process_that_has_not_used_the_device_draws_the_same(
    tmp_path: Path, device: str
) -> None:
    """Invariant 7: a load restores the generator of a device that the process has not used yet."""
    torch.rand(3, device=device)
    with CheckpointManager(tmp_path, {"tree": {"x": torch.zeros(3)}}, sinks=()) as manager:
        manager.save(1).wait()
    expected = torch.rand(5).tolist() + torch.rand(5, device=device).tolist()
    command = [sys.executable, "-c", FRESH_CHILD, str(tmp_path), device]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment()
    )
    assert done.stdout.strip() == str(expected)
