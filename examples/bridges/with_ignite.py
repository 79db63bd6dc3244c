"""A training under Ignite that is killed, started again, and ends with the same bits.

Dropout, a dataset that draws random numbers, a scheduler of Ignite's, a validation at each epoch's
end: a resume has to bring back all of it, at the very place.

    python examples/bridges/with_ignite.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import PiecewiseLinear
from ignite.metrics import Loss
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast.bridges.ignite import HoldfastRun
from holdfast.data import Loader


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8) * (index % 7) + torch.randn(8)
        return x, x.sum().reshape(1)


def train(root: Path, kill_at: int | None = None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    evaluator = create_supervised_evaluator(model, {"val_loss": Loss(nn.MSELoss())})
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 0.01), (96, 0.001)])
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(_: Engine) -> None:
        evaluator.run(Loader(Noisy(), batch_size=32, shuffle=False))

    @trainer.on(Events.ITERATION_STARTED)
    def kill(engine: Engine) -> None:
        if engine.state.iteration - 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run = HoldfastRun(
        trainer, root, state, every="5step", keep="last:2,best:val_loss", evaluator=evaluator
    )
    run.run(Loader(Noisy(), batch_size=4), max_epochs=4)
    print(f"{root.name}: trained to step {trainer.state.iteration}", flush=True)
    torch.save(model.state_dict(), root / "trained.pt")


def start(root: Path, *options: str) -> int:
    return subprocess.run([sys.executable, __file__, str(root), *options], check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            whole, killed = Path(temporary, "whole"), Path(temporary, "killed")
            assert start(whole) == 0
            for step in (17, 53):
                print(f"killed: ended with status {start(killed, str(step))}", flush=True)
            assert start(killed) == 0
            one, other = (torch.load(root / "trained.pt") for root in (whole, killed))
            print("the same bits:", all(torch.equal(one[name], other[name]) for name in one))
