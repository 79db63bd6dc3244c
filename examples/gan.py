"""Two optimizers in one Trainer: a GAN that alternates, killed in the middle and resumed.

The `update` function has full control of a step: two updates of the critic, one of the generator.
Both optimizers, their schedules and all generators are in the checkpoint, so the run that is killed
and started again ends with the same bits as one that is not.

    python examples/gan.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.train import Callback, Control, Trainer


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def circle() -> TensorDataset:
    angles = torch.arange(1024) * 0.7
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))


def alternate(control: Control, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model, real = control.model, batch[0]
    for _ in range(2):
        fake = model.generator(torch.randn(len(real), 4)).detach()
        told = softplus(-model.critic(real)).mean() + softplus(model.critic(fake)).mean()
        control.backward(told)
        control.step("critic")
    with control.toggle("generator"):
        loss = softplus(-model.critic(model.generator(torch.randn(len(real), 4)))).mean()
        control.backward(loss)
        control.step("generator")
    return {"loss": loss, "critic": told}


class Kill(Callback):
    def step_end(self, training: object, metrics: object) -> None:
        if training.counters.step == 37:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, callbacks: list[Callback]) -> None:
    trainer = Trainer(
        Gan,
        optimizer={
            name: lambda model, name=name: torch.optim.Adam(getattr(model, name).parameters(), 1e-3)
            for name in ("generator", "critic")
        },
        data=Loader(circle(), batch_size=64),
        update=alternate,
        checkpoints=Checkpoints(root, every="10step"),
        callbacks=callbacks,
        progress=False,
    )
    trainer.fit("80step")
    torch.save(trainer.model.state_dict(), root / "trained.pt")


def start(root: Path, *options: str) -> int:
    return subprocess.run([sys.executable, __file__, str(root), *options], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), [Kill()] if "kill" in sys.argv else [])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
            assert start(whole) == 0
            print("killed: ended with status", start(killed, "kill"))
            print("started again: ended with status", start(killed))
            one, other = (torch.load(root / "trained.pt") for root in (whole, killed))
            print("the same bits:", all(torch.equal(one[name], other[name]) for name in one))
