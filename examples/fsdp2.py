"""FSDP2 on several ranks: killed at any moment, started again with torchrun, the same run.

Each rank saves its own shards; all of them together are one checkpoint. A run that was killed goes
on where its last checkpoint is, bit for bit on as many ranks, and in the same order of samples on
any other number of them.

    torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# gloo cannot connect again after a restart by torchrun unless this is set, before torch is imported.
os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = holdfast.data.Loader(words(), batch_size=GLOBAL_BATCH // world_size, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with holdfast.CheckpointManager(root, state, every="10step", keep="last:2") as manager:
        found = manager.resume()
        step = found.step if found else 0
        torch.manual_seed(step * world_size + rank) if not found else None
        if rank == 0 and found:
            print(f"goes on from step {step}", flush=True)
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
        print(f"loss {loss.item():.4f} after {step} steps", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(Path(sys.argv[1]))
    finally:
        dist.destroy_process_group()
