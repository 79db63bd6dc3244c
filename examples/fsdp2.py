"""FSDP2 on several ranks: killed at any moment, started again with torchrun, the same run.

Each rank saves its own shards; all of them together are one checkpoint. A run that was killed goes
on where its last checkpoint is, bit for bit on as many ranks, and in the same order of samples on
any other number of them. Alone, this file starts torchrun three times, and compares every bit:

    python examples/fsdp2.py

A run of your own: `torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2`.
Before `--max-restarts` with gloo, read *Restarts by torchrun* in docs/ranks.md.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast

STEPS, GLOBAL_BATCH = 60, 24


def words() -> TensorDataset:
    """Numbers in base seven and the digit that follows each: something that can be learnt."""
    numbers = torch.arange(2400).unsqueeze(1) // torch.tensor([[1, 7, 49, 343]]) % 7
    return TensorDataset(numbers, numbers.sum(1) % 7)


def train(root: Path) -> None:
    """Train from wherever `root` stands to the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first weights on every rank
    model = nn.Sequential(
        nn.Embedding(7, 20), nn.Flatten(), nn.Linear(80, 33), nn.Dropout(0.1), nn.Linear(33, 7)
    )
    for layer in (model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(1 + rank)  # dropout of its own on each; a resume sets each rank's generators
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = holdfast.data.Loader(words(), batch_size=GLOBAL_BATCH // world_size, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with holdfast.CheckpointManager(root, state, every="10step", keep="last:2") as manager:
        found = manager.resume()
        step = found.step if found else 0
        while step < STEPS:
            for inputs, targets in data:
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                manager.maybe_save(step)
                if step == STEPS:
                    break
        manager.save(step, wait=True)
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    if rank == 0:
        torch.save(whole, root / "trained.pt")
    dist.barrier()  # see "The end of a process" in docs/ranks.md


def start(root: Path) -> subprocess.Popen[bytes]:
    """Start this file on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        [*command, *address, __file__, str(root)], start_new_session=True, **quiet
    )


def demonstrate(folder: Path) -> None:
    """Train once in one go, and once killed after a checkpoint and started again."""
    assert start(folder / "whole").wait() == 0
    agent = start(folder / "killed")
    while not any((folder / "killed").glob("step-*/manifest.json")):
        time.sleep(0.05)
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    print("killed after a checkpoint was committed")
    assert start(folder / "killed").wait() == 0
    whole, again = (torch.load(folder / name / "trained.pt") for name in ("whole", "killed"))
    same = all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))
    print("the same weights, bit for bit:", same)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as temporary:
            demonstrate(Path(temporary))
    else:
        dist.init_process_group("gloo")
        try:
            train(Path(sys.argv[1]))
        finally:
            dist.destroy_process_group()
