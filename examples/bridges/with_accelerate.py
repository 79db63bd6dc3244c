"""A loop with Accelerate that is killed, started again, and ends with the same bits.

Accelerate prepares model, optimizer and scheduler; a `CheckpointManager` of what it has prepared
saves and resumes them. The batches come from a `Loader`, which is not prepared.

    python examples/bridges/with_accelerate.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import Dataset

import holdfast
from holdfast.bridges.accelerate import state
from holdfast.data import Loader

STEPS, WINDOW = 60, 2


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 90) + torch.randn(8)


def train(root: Path, kill_at: int | None = None) -> None:
    """The training script, which does not know how often it was started before."""
    torch.set_num_threads(1)  # enough for a model of this size
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = Loader(Noisy(), batch_size=4, seed=0)  # not prepared

    checkpoints = holdfast.Checkpoints(root, every="7step", keep=holdfast.Last(2))
    with holdfast.CheckpointManager(checkpoints, state(accelerator, data=data)) as manager:
        found = manager.resume()
        step = found.step if found else 0
        for batch in data.until(STEPS, start=step, batches_per_step=WINDOW):
            with accelerator.accumulate(model):
                loss = model(send_to_device(batch, accelerator.device)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)  # as a machine that fails would
            if accelerator.sync_gradients:  # after a whole window
                step += 1
                manager.maybe_save(step)
        manager.save(step, wait=True)
    print(f"{root.name}: trained to step {step}", flush=True)
    torch.save(accelerator.unwrap_model(model).state_dict(), root / "trained.pt")


def start(root: Path, *options: str) -> int:
    """Run the script in a process of its own; returns its status."""
    return subprocess.run([sys.executable, __file__, str(root), *options], check=False).returncode


def main() -> None:
    """Train in one go, train with two kills, and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
        assert start(whole) == 0
        for step in (17, 43):
            print(f"killed: ended with status {start(killed, str(step))}", flush=True)
        assert start(killed) == 0
        one, other = (torch.load(root / "trained.pt") for root in (whole, killed))
        print("the same bits:", all(torch.equal(one[name], other[name]) for name in one))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        main()
