"""A rank of an FSDP2 training under torchrun, below `holdfast run --memory`: ROOT UNTIL DIES.

DIES is a file: if it is missing, rank 0 ends by SIGKILL right before the manifest of step 3, and so
do all ranks. Each rank prints a digest of its shards at each step, and when it has resumed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.manager import CheckpointManager
from holdfast.saving import save

STEP = 3


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _say(word: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = hashlib.sha256()
    tensors = [*model.parameters()]
    tensors += [slots["exp_avg"] for slots in optimizer.state.values()]
    for tensor in tensors:
        found.update(tensor.detach().to_local().numpy().tobytes())  # type: ignore[attr-defined]
    text = f"rank {dist.get_rank()} {word} {step} {found.hexdigest()[:16]}\n"
    os.write(1, text.encode())


def main(root: str, until: int, dies: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 601), nn.ReLU(), nn.Linear(601, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root, state, sinks=(), preflight=False) as manager:
        found = manager.resume()
        step = found.step if found else 0
        if found:
            _say("resumed", step, model, optimizer)
        while step < until:
            step += 1
            model(torch.ones(2, 64) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            _say("trained", step, model, optimizer)
            if step == STEP and dist.get_rank() == 0 and not dies.exists():
                dies.touch()
                save.commit = _die
            manager.save(step).wait()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
