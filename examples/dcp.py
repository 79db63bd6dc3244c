"""PyTorch Distributed Checkpoint on Holdfast: only the storage argument is another.

A loop in the style of torchtitan: FSDP2, `dcp.async_save`, `dcp.load`. Its checkpoints are whole or
not there, every byte has a digest. Alone, this file trains on two ranks and goes on with three:

    python examples/dcp.py

A run of your own: `torchrun --nproc-per-node 2 examples/dcp.py runs/dcp 40`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.interop.dcp import HoldfastReader, HoldfastWriter


def network() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 20), nn.Flatten(), nn.Linear(80, 33), nn.Linear(33, 7))


def newest_step(root: Path) -> int:
    try:
        with holdfast.reading(root) as checkpoint:
            return checkpoint.step
    except holdfast.errors.NoCheckpoint:
        return 0


def train(root: Path, last: int) -> None:
    """Train from wherever `root` stands to step `last`."""
    torch.manual_seed(0)
    model = network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = newest_step(root)
    if step:
        weights, slots = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": slots, "train": {"tokens": 0}}
        dcp.load(state, storage_reader=HoldfastReader(root))  # was: FileSystemReader(folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots)
        keep_weights(model, root.with_name("loaded.pt"))
    group = dist.new_group(backend="gloo")  # for saves, beside the collectives of training
    saving, generator = None, torch.Generator().manual_seed(step * 100 + dist.get_rank())
    while step < last:
        inputs = torch.randint(7, (16, 4), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs.sum(1) % 7)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            if saving is not None:
                saving.result()  # raises what the last save failed with
            weights, slots = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": slots, "train": {"tokens": 64 * step}}
            saving = dcp.async_save(
                state,
                storage_writer=HoldfastWriter(root, step=step),  # was: FileSystemWriter(folder)
                process_group=group,
            )
    if saving is not None:
        saving.result()
    keep_weights(model, root.with_name("trained.pt"))


def keep_weights(model: nn.Module, path: Path) -> None:
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    if dist.get_rank() == 0:
        torch.save(whole, path)


def demonstrate(folder: Path) -> None:
    root = folder / "run"
    for num_ranks, last in ((2, 20), (3, 40)):
        before = torch.load(folder / "trained.pt") if last > 20 else []
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
        command = [*launch, "--standalone", __file__, str(root), str(last)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print(f"{num_ranks} ranks: trained to step {newest_step(root)}")
    loaded, trained = (torch.load(folder / name) for name in ("loaded.pt", "trained.pt"))
    same = all(torch.equal(one, other) for one, other in zip(before, loaded, strict=True))
    print("what two ranks saved, three have loaded, bit for bit:", same)
    model = network()
    holdfast.load_weights(root, model)
    same = all(torch.equal(*pair) for pair in zip(model.parameters(), trained, strict=True))
    print("and one process loads what three have saved:", same)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as temporary:
            demonstrate(Path(temporary))
    else:
        dist.init_process_group("gloo")
        train(Path(sys.argv[1]), int(sys.argv[2]))
        dist.destroy_process_group()
