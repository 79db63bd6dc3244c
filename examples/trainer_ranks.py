"""A Trainer on several ranks: start it with torchrun, kill it, start it again: the same run.

The Trainer opens the process group, and trains with DDP, or with FSDP2 where that is asked for.
Alone, this file starts torchrun three times, and compares every bit:

    python examples/trainer_ranks.py

A run of your own: `torchrun --nproc-per-node 2 examples/trainer_ranks.py runs/ranks fsdp2`.
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
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from holdfast import Checkpoints, Last
from holdfast.data import Loader
from holdfast.train import Trainer, Validation

GLOBAL_BATCH = 24


def words() -> TensorDataset:
    """Numbers in base seven and the digit that follows each: something that can be learnt."""
    numbers = torch.arange(2400).unsqueeze(1) // torch.tensor([[1, 7, 49, 343]]) % 7
    return TensorDataset(numbers, numbers.sum(1) % 7)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 20), nn.Flatten(), nn.Linear(80, 33), nn.Dropout(0.1), nn.Linear(33, 7)
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def train(root: Path, strategy: str) -> None:
    """Train from wherever `root` stands to the end."""
    batch_size = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        network,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=Loader(words(), batch_size=batch_size),
        loss=loss,
        validate=Validation(data=Loader(words(), batch_size=100), every="30step", batches=3),
        checkpoints=Checkpoints(root, every="10step", keep=Last(2)),
        strategy=strategy,
        accumulate=2,
        ema=0.9,
    )
    trainer.fit("60step")
    state = trainer.model.state_dict().values()
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state]
    if os.environ["RANK"] == "0":
        torch.save(whole, root / "trained.pt")
    if torch.distributed.is_initialized():  # one rank of DDP needs no process group
        torch.distributed.barrier()  # see "The end of a process" in docs/ranks.md


def start(root: Path) -> subprocess.Popen[bytes]:
    """Start this file on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        [*command, *address, __file__, str(root), "ddp"], start_new_session=True, **quiet
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
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            demonstrate(Path(temporary))
